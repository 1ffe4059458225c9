"""The expert placement of a running engine, from any thread: what it is, and how it is steered."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
from jaxtyping import Int32

from widemesh.eplb import Reshuffler, placement_hash
from widemesh.eplb.agreed import PAUSE, RESUME, TRIGGER, trigger_after
from widemesh.eplb.reshuffler import ReshuffleBusy, ReshufflePaused
from widemesh.model.config import ConfigError
from widemesh.serving.expert_control import EplbBusy, EplbOff, EplbPaused, ExpertStatus
from widemesh.serving.loop import EngineLoop
from widemesh.serving.placed_experts import PlacedExperts


class LiveExperts:
    """The `ExpertControl` of one model of an engine. `reshuffler` is None where experts stay where they are."""

    def __init__(
        self, model: str, loop: EngineLoop, placed: PlacedExperts, reshuffler: Reshuffler | None, window_size: int
    ):
        self._model, self._placed = model, placed
        self._loop, self._reshuffler, self._window_size = loop, reshuffler, window_size

    def status(self) -> ExpertStatus:
        """Placement, load, and what is under way."""
        if self._reshuffler is None:
            return self._fixed()
        found = self._loop.call(self._reshuffler.status)
        named = {field.name: getattr(found, field.name) for field in dataclasses.fields(ExpertStatus)}
        return ExpertStatus(**named)

    def rebalance(self, steps: int | None = None) -> None:
        """Make a plan after `steps` more recorded steps, 32 or the whole window if None."""
        if self._reshuffler is None:  # whatever `steps` is
            raise EplbOff
        if steps is not None and not isinstance(steps, int | np.integer):
            raise ConfigError(f"steps={steps!r} must be a whole number; use 1 to {self._window_size}, or leave it out")
        if steps is not None and not 1 <= steps <= self._window_size:
            raise ConfigError(f"steps={steps} must be between 1 and window_size={self._window_size}; use one "
                              "of them, or leave it out")  # fmt: skip
        command = TRIGGER if steps is None else trigger_after(int(steps))
        try:
            self._ask(lambda reshuffler: reshuffler.request(command))
        except ReshufflePaused:
            raise EplbPaused(self._model) from None

    def pause(self) -> None:
        """Record nothing and make no new plan until `resume`; withdraw an import that waits for other processes."""
        self._ask(lambda reshuffler: reshuffler.request(PAUSE))

    def resume(self) -> None:
        """Go on after `pause`, or after too many abandoned rebalances."""
        self._ask(lambda reshuffler: reshuffler.request(RESUME))

    def import_placement(self, slot_owner: Int32[np.ndarray, "L X"]) -> None:
        """Begin to move to this placement."""
        try:
            self._ask(lambda reshuffler: reshuffler.import_placement(slot_owner))
        except ReshuffleBusy:
            raise EplbBusy(self._model) from None

    def _ask(self, ask: Callable[[Reshuffler], None]) -> None:
        """Call it between two steps."""
        reshuffler = self._reshuffler
        if reshuffler is None:
            raise EplbOff
        self._loop.call(lambda: ask(reshuffler))

    def _fixed(self) -> ExpertStatus:
        owner, layout = self._placed.slot_owner, self._placed.layout
        return ExpertStatus(
            model=self._model, layout=layout, slot_owner=owner, placement_hash=placement_hash(owner),
            load=np.zeros(owner.shape, np.int64), load_steps=0, balancedness=0.0, phase="off", layers_done=0,
            layers_total=0, rebalances=dict.fromkeys(("committed", "skipped", "abandoned"), 0), last_failure="",
            moved_bytes=0, moved_rows=0, least_rows=0, is_paused=False, is_disabled=False, steps_to_trigger=0,
        )  # fmt: skip
