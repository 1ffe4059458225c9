"""One layer on its way: its slices, then the comparison, until all its rows are staged and known to be right."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from widemesh.eplb.migration import LayerMigration, TransferSlice
from widemesh.eplb.mover import Mover, Verifying

# A step takes no longer. What lies beyond is time in which no steps were taken, such as an engine's without requests.
_LONGEST_STEP_S = 1.0


class MoveError(RuntimeError):
    """The layer cannot be committed. `str(err)` says why."""


class StepClock:
    """Seconds of stepping since it was made: of a long gap between two ticks, only `_LONGEST_STEP_S` count."""

    def __init__(self, clock: Callable[[], float]):
        self._clock = clock
        self._last_s = clock()
        self.elapsed_s = 0.0

    def tick(self) -> None:
        """Called at every step."""
        now_s = self._clock()
        self.elapsed_s += min(now_s - self._last_s, _LONGEST_STEP_S)
        self._last_s = now_s


class LayerMove:
    """The rows of one layer, from their ranks to the staging area. Each `dispatch` is the work of one step.

    A layer whose rows all stay on their ranks has nothing to stage and is ready at once.
    """

    def __init__(self, migration: LayerMigration, mover: Mover, *, slice_rows: int, deadline_s: float,
                 clock: Callable[[], float]):  # fmt: skip
        self.migration = migration
        self._mover, self._slice_rows, self._deadline_s, self._clock = mover, slice_rows, deadline_s, clock
        self.num_rows = 0  # copied so far, those that `restart` has made worthless too
        self.restart()

    def restart(self) -> None:
        """What was copied is worthless: begin anew."""
        self._mover.begin(self.migration.layer)
        self.is_staged = not len(self.migration.transfers)
        self._slices: Iterator[TransferSlice] = self.migration.slices(self._slice_rows)
        self._verifying: Verifying | None = None
        self._steps = StepClock(self._clock)

    def dispatch(self) -> None:
        """One slice; the comparison after the last one; then nothing. The same on every process."""
        self._steps.tick()
        if self.is_staged or self._verifying is not None:
            return
        part = next(self._slices, None)
        if part is None:
            self._verifying = self._mover.verify(self.migration)
            return
        self._mover.copy(self.migration.layer, part)
        self.num_rows += part.num_rows

    def poll(self) -> None:
        """See whether all is staged. Raises MoveError if a row arrived wrong, or after the deadline."""
        if self.is_staged:
            return
        if self._verifying is not None and self._verifying.is_ready():
            bad, total = self._verifying.bad_rows(), len(self.migration.transfers)
            if bad:
                raise MoveError(f"{bad} of {total} copied rows differ from what was sent")
            self.is_staged = True
        elif self._steps.elapsed_s > self._deadline_s:
            raise MoveError(f"its rows were not there after {self._deadline_s:g} s")
