"""The placement policy: the published vector, the same policy in plain Python, and what holds for every load."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from widemesh.eplb import ExpertLayout, balancedness, check_placement, expected_slot_load, plan_placement
from widemesh.eplb.balance import busiest_rank, count_copies
from widemesh.eplb.duplicates import find_duplicates
from widemesh.tools.bench.eplb_plain import place_plainly

# The example of DeepSeek's EPLB.
LOAD = np.array([[90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
                 [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27]])  # fmt: skip
OWNER = [[5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1], [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1]]


def _published(num_layers: int = 2) -> ExpertLayout:
    return ExpertLayout(num_layers=num_layers, num_experts=12, ranks=8, num_redundant_experts=4, num_groups=4,
                        num_nodes=2)  # fmt: skip


def test_published_vector():
    assert plan_placement(LOAD, _published()).tolist() == OWNER


def test_published_vector_in_plain_python():
    assert [place_plainly(load, 16, 4, 2, 8) for load in LOAD.tolist()] == OWNER


def test_published_balancedness():
    first = np.tile(np.arange(16) % 12, (2, 1)).astype(np.int32)
    for layer, (before, after) in enumerate([(0.48, 0.83), (0.42, 0.81)]):
        load, owner = LOAD[layer : layer + 1], np.array(OWNER[layer : layer + 1], np.int32)
        assert balancedness(expected_slot_load(load, first[:1]), 8) == pytest.approx(before, abs=0.006)
        assert balancedness(expected_slot_load(load, owner), 8) == pytest.approx(after, abs=0.006)


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_every_plan_is_valid(draws, data):
    """Every expert placed, copies exact and within their limit, none beside another on a rank, groups on one node."""
    layout = draws.layout(data)
    load, swaps = draws.load(data, layout), data.draw(st.sampled_from([0, 16]))
    owner = plan_placement(load, layout, swaps)
    check_placement(owner, layout)
    copies = count_copies(owner, layout.num_experts)
    assert (copies.sum(1) == layout.num_experts + layout.num_redundant_experts).all()
    assert (owner < 0).sum() == layout.num_layers * layout.num_slots - copies.sum()
    by_rank = owner.reshape(layout.num_layers, layout.ranks, -1)
    assert not find_duplicates(by_rank).any()
    if layout.is_hierarchical:
        by_node, size = owner.reshape(layout.num_layers, layout.num_nodes, -1), layout.num_experts // layout.num_groups
        for layer in by_node:
            groups = [set((node[node >= 0] // size).tolist()) for node in layer]
            assert sorted(group for node in groups for group in node) == list(range(layout.num_groups))
    assert np.array_equal(plan_placement(load.copy(), layout, swaps), owner)


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_the_plain_policy_wherever_copies_are_free(draws, data):
    layout = draws.layout(data)
    if layout.num_slots != layout.num_experts + layout.num_redundant_experts:
        return  # the plain policy knows no empty slots
    load = draws.load(data, layout)
    owner = plan_placement(load, layout)
    for layer in range(layout.num_layers):
        plain = place_plainly(load[layer].tolist(), layout.num_slots, layout.num_groups, layout.num_nodes, layout.ranks)
        as_array = np.array([plain], np.int32)
        crowded = find_duplicates(as_array.reshape(1, layout.ranks, -1)).any()
        if not crowded and count_copies(as_array, layout.num_experts).max() <= layout.max_copies:
            assert owner[layer].tolist() == plain


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_swaps_only_help(draws, data):
    layout = draws.layout(data)
    load = draws.load(data, layout)
    plain, swapped = (busiest_rank(load, plan_placement(load, layout, n), layout.ranks) for n in (0, 32))
    assert (swapped <= plain * (1 + 1e-12)).all()


def test_layers_do_not_touch_each_other():
    rng = np.random.default_rng(3)
    load = rng.poisson(np.exp(rng.normal(3, 2, (6, 12))))
    together = plan_placement(load, _published(6), 8)
    for layer in range(6):
        assert np.array_equal(plan_placement(load[layer : layer + 1], _published(1), 8), together[layer : layer + 1])


def test_two_copies_of_a_hot_expert_never_share_a_rank():
    """A greedy pass puts them together wherever the expert outweighs all others, or where nothing weighs anything."""
    layout = ExpertLayout(num_layers=2, num_experts=4, ranks=4, num_redundant_experts=4, max_copies_per_expert=4)
    load = np.array([[1000, 1, 1, 1], [0, 0, 0, 0]])
    plain = place_plainly(load[1].tolist(), 8, 1, 1, 4)
    assert find_duplicates(np.array([plain]).reshape(1, 4, 2)).any()
    owner = plan_placement(load, layout).reshape(2, 4, 2)
    assert not find_duplicates(owner).any()
    assert ((owner[0] == 0).sum(1) == 1).all()


@pytest.mark.parametrize(("load", "words"), [
    (np.ones((3, 12)), r"shape \(3, 12\); it must be \(2, 12\)"),
    (np.full((2, 12), -1), "finite and not negative"),
    (np.full((2, 12), np.nan), "finite and not negative"),
])  # fmt: skip
def test_bad_loads_are_refused(load, words):
    with pytest.raises(ValueError, match=words):
        plan_placement(load, _published())
