"""When load is recorded and when a plan is due, counted in decode steps that all ranks take together."""

from __future__ import annotations

import dataclasses

from widemesh.eplb.config import EplbConfig

NOT_RECORDED, FIRST_ROW, NEXT_ROW = range(3)  # what becomes of a step's load: nothing, the ring begins anew, it goes on


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepRecord:
    """What becomes of a step's load. The same on every rank, because it follows from the number of the step."""

    ring_row: int = -1  # row of the load ring that this step writes; -1: none
    is_log_due: bool = False  # its balancedness is to be measured
    window_rows: int = 0  # not 0: a trigger; plan with the ring's first so many rows before the next step is recorded

    @property
    def is_trigger(self) -> bool:
        return self.window_rows > 0

    @property
    def code(self) -> int:
        """What the step is told: one of the three constants above."""
        if self.ring_row < 0:
            return NOT_RECORDED
        return FIRST_ROW if self.ring_row == 0 else NEXT_ROW


class LoadWindow:
    """Counts decode steps from one trigger to the next and says which of them write which row of the load ring.

    `since` is the number of steps since the last trigger. It starts at three quarters of the interval, so that the
    first plan comes after the last quarter. Steps that do not decode are none of its business: they have no load and
    do not count. Only the last `window_size` steps before a trigger are recorded, as the ring has room for no more.

    While experts move, `since` waits where recording begins: rows counted under two placements cannot be folded with
    one. So a window is always of one placement, and `since` stays between 0 and the interval whatever becomes of a
    migration.

    A migration that is given up is followed by a wait of one interval, the next in a row of two, then four, and so on;
    after `max_retries` of them `is_disabled` is set, and no step is recorded or triggers until `resume`.
    """

    def __init__(self, config: EplbConfig):
        self._config = config
        self.interval = config.step_interval  # steps to a trigger, longer after a migration that was given up
        self.since = config.step_interval * 3 // 4
        self._start = max(self.since, self.interval - config.window_size)  # recording begins when `since` is here
        self.num_steps = 0
        self.num_recorded = 0  # in this window
        self.num_abandoned = 0  # migrations, in a row
        self.is_disabled = False
        self.is_paused = False

    def step(self, *, is_migrating: bool) -> StepRecord:
        """Count one step that decodes. `is_migrating` must be the same on all ranks."""
        self.num_steps += 1
        is_log_due = self.num_steps % self._config.log_balancedness_interval == 0
        if self.is_disabled or self.is_paused:
            return StepRecord(is_log_due=is_log_due)
        records = self.since >= self._start
        if records and is_migrating:
            self.since, self.num_recorded = self._start, 0
            return StepRecord(is_log_due=is_log_due)
        ring_row = -1
        if records:
            ring_row = self.num_recorded
            self.num_recorded += 1
        self.since += 1
        window_rows = 0
        if self.since >= self.interval:
            window_rows = self.num_recorded
            self._restart()
        return StepRecord(ring_row=ring_row, is_log_due=is_log_due, window_rows=window_rows)

    def bring_forward(self, steps: int) -> None:
        """Trigger after `steps` more steps, 1 to `window_size`, and record from now on. Raises ValueError."""
        if not 1 <= steps <= self._config.window_size:
            raise ValueError(f"steps={steps} must be between 1 and window_size={self._config.window_size}")
        self.num_recorded = 0
        self.since = self._start = self.interval - steps

    def pause(self) -> None:
        """Record and trigger nothing until `resume`. What has been recorded in this window is dropped."""
        self.is_paused = True
        self.since, self.num_recorded = min(self.since, self._start), 0

    def resume(self) -> None:
        """Go on after `pause`, or after too many migrations that were given up."""
        if self.is_disabled:
            self.committed()
            self._restart()
        self.is_paused = self.is_disabled = False

    def committed(self) -> None:
        """The migration that the last trigger led to has ended well, or was not worth it."""
        self.num_abandoned, self.interval = 0, self._config.step_interval
        self._start = self.interval - self._config.window_size
        self.since, self.num_recorded = min(self.since, self._start), 0

    def abandoned(self) -> None:
        """The migration was given up. Waits begin anew, each twice as long as the last; then `is_disabled`."""
        self.num_abandoned += 1
        # Once set, it stays until `resume`: an import that went well meanwhile counts from zero again.
        self.is_disabled |= self.num_abandoned > self._config.max_retries
        most = max(0, self._config.max_retries - 1)
        self.interval = self._config.step_interval * 2 ** min(self.num_abandoned - 1, most)
        self._restart()

    def _restart(self) -> None:
        self.since = self.num_recorded = 0
        self._start = self.interval - self._config.window_size
