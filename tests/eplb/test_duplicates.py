"""Copies that share a rank are found and parted."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from widemesh.eplb.duplicates import find_duplicates, spread_duplicates


def test_found_from_the_second_on():
    owner = np.array([[[3, 1, 3, 3], [-1, -1, 1, 2]]], np.int32)
    assert find_duplicates(owner).tolist() == [[[False, False, True, True], [False] * 4]]


@settings(max_examples=80, deadline=None)
@given(ranks=st.integers(2, 6), quota=st.integers(1, 5), seed=st.integers(0, 2**32 - 1), empty=st.integers(0, 3))
def test_parted_whenever_ranks_are_enough(ranks, quota, seed, empty):
    rng = np.random.default_rng(seed)
    slots = ranks * quota
    owner = np.empty((2, slots), np.int32)
    for layer in owner:  # copies of each expert at once, up to one per rank, in any order of slots
        copies = np.repeat(np.arange(slots), rng.integers(1, ranks + 1, slots))[:slots]
        copies[slots - min(empty, slots - 1) :] = -1
        layer[:] = rng.permutation(copies)
    before, weight = owner.copy(), rng.random(slots)
    load = np.where(owner < 0, 0.0, weight[owner])
    owner, load = owner.reshape(2, ranks, quota), load.reshape(2, ranks, quota)
    spread_duplicates(owner, load)
    assert not find_duplicates(owner).any()
    assert np.array_equal(np.sort(owner.reshape(2, -1)), np.sort(before))
    assert np.array_equal(load, np.where(owner < 0, 0.0, weight[owner]))


def test_the_maximum_stays_where_a_swap_allows():
    owner = np.array([[[0, 0], [1, 2], [3, 4]]], np.int32)
    load = np.array([[[3.0, 3.0], [1.0, 5.0], [2.0, 3.0]]])
    spread_duplicates(owner, load)
    assert owner.tolist() == [[[0, 3], [1, 2], [0, 4]]]
    assert load.sum(2).tolist() == [[5, 6, 6]]


def test_more_copies_than_ranks_cannot_be_parted():
    with pytest.raises(ValueError, match="expert 0 has more copies than there are ranks; they cannot be spread over 2"):
        spread_duplicates(np.array([[[0, 0], [0, 1]]], np.int32), np.ones((1, 2, 2)))
