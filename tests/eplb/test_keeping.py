"""What stays of an earlier placement."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from widemesh.eplb.keeping import keep_ranks, keep_slots


def test_experts_that_stay_on_a_rank_keep_their_slots():
    old = np.array([[[0, 1, 2, 3], [4, 5, 5, -1]]], np.int32)
    new = np.array([[[3, 7, 0, 6], [5, 4, -1, 5]]], np.int32)
    assert keep_slots(new, old).tolist() == [[[0, 7, 6, 3], [4, 5, 5, -1]]]


def test_each_copy_keeps_one_slot():
    assert keep_slots(np.array([[[5, 5, 5]]], np.int32), np.array([[[1, 5, 2]]], np.int32)).tolist() == [[[5, 5, 5]]]
    assert keep_slots(np.array([[[5, 1, 2]]], np.int32), np.array([[[5, 5, 5]]], np.int32)).tolist() == [[[5, 1, 2]]]


def test_sets_of_experts_go_where_they_are():
    old = np.array([[[0, 1], [2, 3], [4, 5], [6, 7]]], np.int32)
    moved = old[:, [2, 3, 1, 0]]
    assert keep_ranks(moved, old, 8).tolist() == old.tolist()
    # Within nodes of two ranks, only the order inside each pair is free.
    assert keep_ranks(moved, old, 8, nodes=2).tolist() == moved.tolist()
    assert keep_ranks(old[:, [1, 0, 3, 2]], old, 8, nodes=2).tolist() == old.tolist()


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), ranks=st.integers(1, 5), quota=st.integers(1, 5))
def test_no_rank_gets_other_experts_and_nothing_stays_by_chance_only(seed, ranks, quota):
    rng = np.random.default_rng(seed)
    old, new = rng.integers(-1, 8, (2, 3, ranks, quota)).astype(np.int32)
    kept = keep_slots(new, old)
    assert np.array_equal(np.sort(kept), np.sort(new))
    for layer in range(3):
        for rank in range(ranks):
            both = [min((old[layer, rank] == e).sum(), (new[layer, rank] == e).sum()) for e in range(-1, 8)]
            assert (kept[layer, rank] == old[layer, rank]).sum() == sum(both)
    named = keep_ranks(new, old, 8)
    for layer in range(3):
        assert sorted(map(sorted, named[layer].tolist())) == sorted(map(sorted, new[layer].tolist()))
