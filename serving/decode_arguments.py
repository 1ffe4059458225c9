"""From the plan of a decode step to its arguments: rows, sampling settings, and the masks of constrained requests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Int32, UInt32

from widemesh.serving.config import EngineConfig
from widemesh.serving.engine_request import Request
from widemesh.serving.running_set import RunningSet
from widemesh.serving.sampling import SlotSettings, TallyRow, full_mask
from widemesh.serving.scheduling import DecodePlan
from widemesh.serving.step_work import DecodeWork


class DecodeArguments:
    """For the engine's thread alone. What has not changed since the last step is the same object."""

    def __init__(self, config: EngineConfig, vocab_size: int, running: RunningSet):
        self._most_rows, self._vocab_size, self._running = config.decode_rows, vocab_size, running
        self._settings = SlotSettings(config.max_num_seqs, vocab_size)
        self.sampling, _ = self._settings.sync(())
        self._rows: tuple[DecodePlan, Int32[np.ndarray, "slots"]] | None = None  # of the last plan
        self._awaits_token = np.zeros(config.max_num_seqs, bool)  # slots whose constraint waits for a result
        self._any_awaits = False

    @property
    def hold(self) -> Bool[np.ndarray, "slots"] | None:
        """Slots that cannot decode before a result is there; None: all can."""
        return self._awaits_token if self._any_awaits else None

    def work(self, plan: DecodePlan, requests: Sequence[Request]) -> DecodeWork:
        """The arguments of a plan for the requests that run."""
        tallies: tuple[TallyRow, ...] = ()
        if self._running.sync(requests):
            self.sampling, found = self._settings.sync((r.slot, r.epoch, r) for r in requests)
            tallies = tuple(found)
        if self._rows is None or self._rows[0] is not plan or self._running.constrained:
            self._rows = plan, plan.is_active * np.int32(self._most_rows)
        rows = self._rows[1]
        mask = self._constrain(plan.is_active, rows) if self._running.constrained else None
        return DecodeWork(rows=rows, mask=mask, tallies=tallies)

    def settled(self, plan: DecodePlan) -> None:
        """The result of a plan's step is there."""
        if self._any_awaits:
            self._awaits_token[plan.is_active] = False
            self._any_awaits = bool(self._awaits_token.any())

    def _constrain(
        self, is_active: Bool[np.ndarray, "slots"], rows: Int32[np.ndarray, "slots"]
    ) -> UInt32[np.ndarray, "slots W"] | None:
        """Masks of constrained requests, which run a single row and then wait for what it drew."""
        mask = None
        for request in self._running.constrained:
            if request.constraint is not None and is_active[request.slot]:
                if mask is None:
                    mask = full_mask(len(rows), self._vocab_size)
                mask[request.slot] = request.constraint.mask
                rows[request.slot] = 1
                self._awaits_token[request.slot] = self._any_awaits = True
        return mask
