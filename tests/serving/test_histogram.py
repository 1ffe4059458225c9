"""Values land below the right bound."""

from __future__ import annotations

import bisect
import math
import threading
import time

import numpy as np
import pytest

from widemesh.serving.histogram import Histogram, one_two_five


def test_a_value_equal_to_a_bound_is_at_most_that_bound() -> None:
    histogram = Histogram((1.0, 2.0, 5.0))
    for value in (0.0, 1.0, 1.5, 2.0, 5.0, 5.5, 1e9):
        histogram.add(value)
    counts = [(1.0, 2), (2.0, 4), (5.0, 5), (math.inf, 7)]
    assert histogram.read() == (counts, 0.0 + 1.0 + 1.5 + 2.0 + 5.0 + 5.5 + 1e9)


def test_random_values() -> None:
    bounds = (0.001, 0.01, 0.1, 1.0)
    values = sorted(np.random.default_rng(0).exponential(0.1, 500).tolist())
    histogram = Histogram(bounds)
    for value in values:
        histogram.add(value)
    want = [(bound, bisect.bisect_right(values, bound)) for bound in (*bounds, math.inf)]
    assert histogram.read()[0] == want


def test_counts_and_sum_are_of_the_same_values() -> None:
    """Read while a value is being added: the reader waits until it is counted and summed."""
    histogram = Histogram((1.0,))
    seen: list[tuple[list[tuple[float, int]], float]] = []
    reader = threading.Thread(target=lambda: seen.append(histogram.read()))

    class Slow(float):
        """Between count and sum, somebody reads."""

        def __mul__(self, other: float) -> float:
            reader.start()
            time.sleep(0.1)
            assert not seen
            return float(self) * other

    histogram.add(0.5)
    histogram.add(Slow(0.25))
    reader.join(10)
    assert seen == [([(1.0, 2), (math.inf, 2)], 0.75)]


@pytest.mark.parametrize(("limit", "bounds"), [
    (0, ()), (1, (1,)), (4, (1, 2)), (100, (1, 2, 5, 10, 20, 50, 100)), (999, (1, 2, 5, 10, 20, 50, 100, 200, 500)),
])  # fmt: skip
def test_one_two_five(limit: int, bounds: tuple[int, ...]) -> None:
    assert one_two_five(limit) == bounds
