"""Counts of measured values by size, cheap enough for the engine's thread."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate


class Histogram:
    """How many values were at most each bound. One thread adds; any thread reads, without a lock.

    Bounds ascend; a value above the last one counts too.
    """

    def __init__(self, bounds: tuple[float, ...]):
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """Count one value, or so many of it."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    @property
    def sum(self) -> float:
        """Of all values."""
        return self._sum

    def cumulative(self) -> list[tuple[float, int]]:
        """(bound, values at most that large), ending with infinity and so with the number of all values."""
        return list(zip((*self._bounds, float("inf")), accumulate(self._counts.copy()), strict=True))


def one_two_five(limit: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50, ... up to `limit`."""
    found: list[float] = []
    unit = 1
    while True:
        for digit in (1, 2, 5):
            if digit * unit > limit:
                return tuple(found)
            found.append(digit * unit)
        unit *= 10
