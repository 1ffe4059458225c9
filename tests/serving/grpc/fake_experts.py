"""Expert control without an engine: a placement that moves at once or stays, loads that are given, and a memory."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from widemesh.eplb import ExpertLayout, balancedness, check_placement, initial_placement, placement_hash
from widemesh.model.config import ConfigError
from widemesh.serving.expert_control import EplbBusy, EplbOff, ExpertStatus

LAYOUT = ExpertLayout(num_layers=3, num_experts=6, ranks=4, num_redundant_experts=2)
WINDOW = 100


class FakeExperts:
    """Implements ExpertControl. `asked` lists what came in; `phase` and `error` may be set to what is to be met."""

    def __init__(self, layout: ExpertLayout = LAYOUT, *, phase: str = "idle", load: np.ndarray | None = None,
                 is_paused: bool = False, model: str = "target", **facts: Any):  # fmt: skip
        self.layout, self.phase, self.facts, self.model = layout, phase, facts, model
        self.slot_owner = initial_placement(layout)
        # Rank 0 takes most in layer 0, rank 1 in layer 1, and so on; in each layer by its first slot.
        self.load = hot_load(layout) if load is None else load
        self.asked: list[Any] = []
        self.threads: set[str] = set()
        self.error: Exception | None = None
        self.is_paused = is_paused

    def status(self) -> ExpertStatus:
        self._enter()
        facts: dict[str, Any] = dict(
            load_steps=750, layers_done=0, layers_total=0, rebalances={"committed": 2, "skipped": 1, "abandoned": 0},
            last_failure="", moved_bytes=3 << 20, moved_rows=40, least_rows=38, is_disabled=False, steps_to_trigger=120,
        )  # fmt: skip
        return ExpertStatus(
            model=self.model, layout=self.layout, slot_owner=self.slot_owner.copy(), load=self.load.copy(),
            placement_hash=placement_hash(self.slot_owner), phase=self.phase, is_paused=self.is_paused,
            balancedness=balancedness(self.load, self.layout.ranks), **facts | self.facts,
        )  # fmt: skip

    def rebalance(self, steps: int | None = None) -> None:
        self._steer("rebalance", steps)
        if steps is not None and not 1 <= steps <= WINDOW:
            raise ConfigError(f"steps={steps} must be between 1 and window_size={WINDOW}; leave it out for a window")

    def pause(self) -> None:
        self._steer("pause")
        self.is_paused = True

    def resume(self) -> None:
        self._steer("resume")
        self.is_paused = False

    def import_placement(self, slot_owner: np.ndarray) -> None:
        self._steer("import")
        check_placement(slot_owner, self.layout)
        if self.phase == "migrating":
            raise EplbBusy(self.model)
        self.slot_owner = slot_owner

    def _steer(self, *call: Any) -> None:
        self._enter()
        if self.phase == "off":
            raise EplbOff
        self.asked.append(call)

    def _enter(self) -> None:
        self.threads.add(threading.current_thread().name)
        if self.error is not None:
            raise self.error


def hot_load(layout: ExpertLayout) -> np.ndarray:
    """int64 [L, X]: 10 rows in each slot, 70 in the first slot of rank l of layer l."""
    load = np.full((layout.num_layers, layout.num_slots), 10, np.int64)
    for layer in range(layout.num_layers):
        load[layer, layer % layout.ranks * layout.slots_per_rank] = 70
    return load
