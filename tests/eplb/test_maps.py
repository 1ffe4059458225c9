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


def turns(rows, positions, expert, copies):
    """Which of its copies serves each row of one expert."""
    shape = np.broadcast_shapes(np.shape(rows), np.shape(positions))
    rows, positions = (np.broadcast_to(x, shape).reshape(-1) for x in (rows, positions))
    slots = np.tile(np.arange(8, dtype=np.int32), (expert + 1, 1))
    return choose_slot(rows, positions, np.full(rows.shape, expert), slots, np.full(expert + 1, copies))


@pytest.mark.parametrize("copies", range(1, 9))
@pytest.mark.parametrize("stride", [1, 2, 8, 64, 100])
@pytest.mark.parametrize("expert", [0, 7, 383])
def test_rows_spread_over_copies(copies, stride, expert):
    """At any distance, the one of the first slots of all ranks included: within five deviations of an even share."""
    count = np.bincount(turns(np.arange(4096) * stride, 17, expert, copies), minlength=copies)
    even = 4096 / copies
    assert np.abs(count - even).max() <= 5 * np.sqrt(even * (1 - 1 / copies))


def test_a_request_does_not_keep_to_one_copy():
    count = np.bincount(turns(5, np.arange(4096), 3, 4), minlength=4)
    assert np.abs(count - 1024).max() <= 5 * np.sqrt(1024 * 3 / 4)


def test_experts_of_a_row_choose_independently():
    """Two experts of two copies each: all four pairs are met equally often."""
    rows = np.arange(4096)
    pair = 2 * turns(rows, 9, 3, 2) + turns(rows, 9, 4, 2)
    assert np.abs(np.bincount(pair, minlength=4) - 1024).max() <= 5 * np.sqrt(1024 * 3 / 4)


def test_padding_and_single_slots():
    two = np.arange(2)
    assert choose_slot(two, two, np.array([-1, 0]), np.array([[7]]), np.array([1])).tolist() == [-1, 7]
