"""Counts of measured values by size, cheap enough for the engine's thread."""

from __future__ import annotations

import time
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
        self._begun = self._done = 0  # additions; they differ during one

    def add(self, value: float, times: int = 1) -> None:
        """Count one value, or so many of it."""
        self._begun += 1
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times
        self._done = self._begun

    def read(self) -> tuple[list[tuple[float, int]], float]:
        """(bound, values at most that large), ending with infinity and so with the number of all; and their sum.

        Both are of the same values: a mean of what lies between two readings would show a difference.
        """
        while True:
            done = self._done
            counts, total = self._counts.copy(), self._sum
            if self._begun == done:  # nothing was added meanwhile
                return list(zip((*self._bounds, float("inf")), accumulate(counts), strict=True)), total
            time.sleep(0)  # let the other thread come to its end


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
