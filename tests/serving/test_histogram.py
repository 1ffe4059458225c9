"""Values land below the right bound."""

from __future__ import annotations

import bisect
import math

import numpy as np
import pytest

from widemesh.serving.histogram import Histogram, one_two_five


def test_a_value_equal_to_a_bound_is_at_most_that_bound() -> None:
    histogram = Histogram((1.0, 2.0, 5.0))
    for value in (0.0, 1.0, 1.5, 2.0, 5.0, 5.5, 1e9):
        histogram.add(value)
    assert histogram.cumulative() == [(1.0, 2), (2.0, 4), (5.0, 5), (math.inf, 7)]
    assert histogram.sum == 0.0 + 1.0 + 1.5 + 2.0 + 5.0 + 5.5 + 1e9


def test_random_values() -> None:
    bounds = (0.001, 0.01, 0.1, 1.0)
    values = sorted(np.random.default_rng(0).exponential(0.1, 500).tolist())
    histogram = Histogram(bounds)
    for value in values:
        histogram.add(value)
    want = [(bound, bisect.bisect_right(values, bound)) for bound in (*bounds, math.inf)]
    assert histogram.cumulative() == want


@pytest.mark.parametrize(("limit", "bounds"), [
    (0, ()), (1, (1,)), (4, (1, 2)), (100, (1, 2, 5, 10, 20, 50, 100)), (999, (1, 2, 5, 10, 20, 50, 100, 200, 500)),
])  # fmt: skip
def test_one_two_five(limit: int, bounds: tuple[int, ...]) -> None:
    assert one_two_five(limit) == bounds
