"""The tables that a step reads, as a function of the placement."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from widemesh.eplb import EplbConfig, build_maps, choose_slot, initial_placement, plan_placement


def test_maps_of_a_small_placement():
    maps = build_maps(np.array([[2, 0, -1, 1, 2, -1], [0, 1, 2, 0, 1, 0]], np.int32), 3, 3)
    assert maps.expert_slots.tolist() == [[[1, -1, -1], [3, -1, -1], [0, 4, -1]], [[0, 3, 5], [1, 4, -1], [2, -1, -1]]]
    assert maps.copies.tolist() == [[1, 1, 2], [3, 2, 1]]
    assert maps.expert_slots.dtype == maps.copies.dtype == np.int32


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_maps_say_what_the_placement_says(draws, data):
    layout = draws.layout(data)
    owner = draws.placement(data, layout)
    maps = build_maps(owner, layout.num_experts, layout.max_copies)
    assert maps.expert_slots.shape == (layout.num_layers, layout.num_experts, layout.max_copies)
    for layer in range(layout.num_layers):
        for expert in range(layout.num_experts):
            slots = np.flatnonzero(owner[layer] == expert).tolist()
            count = maps.copies[layer, expert]
            assert count == len(slots) >= 1
            assert maps.expert_slots[layer, expert].tolist() == slots + [-1] * (layout.max_copies - count)


def test_ranks_that_need_rounding_index_nothing_that_is_not_there():
    """256 experts and 16 redundant ones on 16 ranks: the last rank's slots lie within the slots there are."""
    layout = EplbConfig(num_redundant_experts=16).layout(num_layers=2, num_experts=256, ranks=16)
    rng = np.random.default_rng(0)
    for owner in (initial_placement(layout), plan_placement(rng.poisson(30, (2, 256)), layout)):
        maps = build_maps(owner, 256, layout.max_copies)
        assert layout.slots_per_rank == 17 and layout.num_slots == 272
        assert maps.expert_slots.max() == 271 and maps.copies.sum(1).tolist() == [272, 272]
        last = owner[:, -17:]
        assert ((last >= 0) & (last < 256)).all()
        for layer in range(2):  # what the last rank holds is what the tables send it
            sent = {e for e in range(256) if (maps.expert_slots[layer, e] // 17 == 15).any()}
            assert sent == set(last[layer].tolist())


def test_invalid_placements_make_no_maps():
    with pytest.raises(ValueError, match="experts must have 1 to 1 slots; there are 2 to 2"):
        build_maps(np.array([[0, 0]], np.int32), 1, 1)
    with pytest.raises(ValueError, match="experts must have 1 to 1 slots; there are 0 to 1"):
        build_maps(np.array([[0, 1]], np.int32), 3, 1)


def test_rows_spread_over_copies():
    rows, expert = np.arange(4096), np.zeros(4096, np.int32)
    counts = {}
    for copies in (1, 2, 3, 4):
        chosen = choose_slot(rows, expert, np.array([[10, 11, 12, 13]]), np.array([copies]))
        counts[copies] = np.bincount(chosen - 10).tolist()
        if copies == 3:
            assert chosen[:8].tolist() == [10, 10, 12, 12, 11, 10, 10, 12]
    assert counts == {1: [4096], 2: [2048, 2048], 3: [1368, 1363, 1365], 4: [1024] * 4}
    assert choose_slot(rows[:2], np.array([-1, 0]), np.array([[7]]), np.array([1])).tolist() == [-1, 7]
