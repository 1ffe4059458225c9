"""What a reshuffler counts, measures and logs."""

from __future__ import annotations

import logging

import numpy as np
from jaxtyping import Int64

from widemesh.eplb.layout import ExpertLayout
from widemesh.eplb.mover import LoadReading
from widemesh.eplb.plan import Plan
from widemesh.eplb.reshuffle_status import NoListener, ReshuffleListener

_log = logging.getLogger(__name__)


class ReshuffleFigures:
    """Of one model, on one process. Process 0 logs what all of them see alike; failures are logged by each."""

    def __init__(self, model: str, layout: ExpertLayout, *, logs: bool, logs_balancedness: bool, row_bytes: int,
                 listener: ReshuffleListener | None):  # fmt: skip
        self._model, self._layout, self._logs, self._logs_balancedness = model, layout, logs, logs_balancedness
        self._row_bytes = row_bytes
        self._listener: ReshuffleListener = listener or NoListener()
        self.load: Int64[np.ndarray, "L X"] = np.zeros((layout.num_layers, layout.num_slots), np.int64)
        self.load_steps = 0
        self.balancedness = self._window_balancedness = 0.0
        self.feasible: float | None = None
        self.rebalances = {"committed": 0, "skipped": 0, "abandoned": 0}
        self.last_failure = ""
        self.moved_rows = self.least_rows = 0  # since the start
        self._start_rows = self._start_least = 0  # when the goal was set

    @property
    def moved_bytes(self) -> int:
        return self.moved_rows * self._row_bytes

    def step_read(self, found: LoadReading) -> None:
        """The load of one step. It is shown if there is none of a window under the same placement."""
        if not found.load_by_slot.any():  # nothing was routed in it, and so nothing measured
            return
        if self.load_steps <= 1:
            self.load, self.load_steps = found.load_by_slot, 1
        self._measured(found.balancedness)

    def window_read(self, found: LoadReading, steps: int) -> None:
        """The load of so many steps."""
        self.load, self.load_steps, self._window_balancedness = found.load_by_slot, steps, found.balancedness
        self._measured(found.balancedness)

    def planned(self, plan: Plan) -> None:
        """A plan was made from the last window."""
        self.feasible = plan.feasible
        self._listener.balancedness(self._model, self.balancedness, self.feasible)
        if not self._logs:
            return
        advised, redundant = plan.advice.num_redundant_experts, self._layout.num_redundant_experts
        advice = ""
        if advised > redundant:
            advice = f"; num_redundant_experts={advised} would allow {plan.advice.planned:.3f}"
        elif advised < redundant:
            advice = f"; num_redundant_experts={advised} would do as well, with {plan.advice.planned:.3f}"
        _log.info("%s: balancedness %.3f measured in %d steps; expected of their load in one sum: %.3f now, %.3f with "
                  "the plan, at most %.3f with num_redundant_experts=%d%s", self._model, self._window_balancedness,
                  self.load_steps, plan.before, plan.after, plan.feasible, redundant, advice)  # fmt: skip

    def set_out(self) -> None:
        """A rebalance begins to move rows."""
        self._start_rows, self._start_least = self.moved_rows, self.least_rows

    def layer_committed(self, least_rows: int, seconds: float) -> None:
        """One layer of it is done; fewer than `least_rows` could not have brought it about."""
        self.least_rows += least_rows
        self.load, self.load_steps = np.zeros_like(self.load), 0  # it was that of other slots
        self._listener.layer_committed(self._model, seconds)

    def arrived(self, plan: Plan | None, layers: int, seconds: float) -> None:
        """It has reached its goal, a plan's or an imported one."""
        rows, least = self.moved_rows - self._start_rows, self.least_rows - self._start_least
        self._ended("committed" if layers else "skipped")
        if not self._logs:
            return
        if layers:
            gain = "an imported placement" if plan is None else (
                f"balancedness expected {plan.before:.3f} -> {plan.after:.3f}, measured before "
                f"{self._window_balancedness:.3f}")  # fmt: skip
            _log.info("%s: rebalanced: %s, %d layers, %d rows moved (least: %d), %.1f s", self._model, gain, layers,
                      rows, least, seconds)  # fmt: skip
        else:
            reason = "the imported placement serves already" if plan is None else "too little to gain"
            _log.info("%s: nothing moves: %s", self._model, reason)

    def abandoned(self, reason: str, wait_steps: int) -> None:
        """It was given up. `wait_steps` to the next plan, 0: there will be none."""
        self.last_failure = reason
        then = f"the next plan comes in {wait_steps} steps" if wait_steps else (
            "that was one too many in a row: rebalancing is disabled until it is resumed")  # fmt: skip
        _log.warning("%s: rebalance given up: %s; %s", self._model, reason, then)
        self._ended("abandoned")
        self._listener.disabled(self._model, not wait_steps)

    def resumed(self) -> None:
        """It is not disabled any more, if it was."""
        self._listener.disabled(self._model, False)

    def _ended(self, result: str) -> None:
        rows = self.moved_rows - self._start_rows
        self.set_out()  # what comes next counts from here
        self.rebalances[result] += 1
        self._listener.rebalanced(self._model, result, rows, rows * self._row_bytes)

    def _measured(self, balancedness: float) -> None:
        if not balancedness:  # no row was routed
            return
        self.balancedness = balancedness
        self._listener.balancedness(self._model, balancedness, self.feasible)
        if self._logs_balancedness:
            _log.info("%s: balancedness %.3f", self._model, balancedness)
