"""The bound on balance, and the advice made from it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from widemesh.eplb import (
    ExpertLayout,
    advise_redundancy,
    balancedness,
    expected_slot_load,
    feasible_balancedness,
    initial_placement,
    plan_placement,
)
from widemesh.eplb.duplicates import find_duplicates


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_no_placement_beats_the_bound(draws, data):
    layout = draws.layout(data)
    load = draws.load(data, layout)
    bound = feasible_balancedness(load, layout)
    for owner in (plan_placement(load, layout, 16), initial_placement(layout), draws.placement(data, layout)):
        if not find_duplicates(owner.reshape(layout.num_layers, layout.ranks, -1)).any():
            assert balancedness(expected_slot_load(load, owner), layout.ranks) <= bound + 1e-12


def test_without_copies_the_hottest_expert_and_its_company_bound_it():
    layout = ExpertLayout(num_layers=1, num_experts=4, ranks=2)
    load = np.array([[10, 1, 2, 3]])
    assert feasible_balancedness(load, layout) == pytest.approx(8 / 11)
    assert balancedness(expected_slot_load(load, plan_placement(load, layout)), 2) == pytest.approx(8 / 11)
    assert feasible_balancedness(np.zeros((1, 4)), layout) == 0.0


def test_zipf_over_32_ranks():
    """0.50 as it comes, 0.60 at the most without copies, nearly even with one redundant expert per rank."""
    layout = ExpertLayout(num_layers=8, num_experts=384, ranks=32)
    load = np.random.default_rng(0).permuted(np.tile(1e6 * np.arange(1, 385.0) ** -0.6, (8, 1)), axis=1)
    copies = dataclasses.replace(layout, num_redundant_experts=32)
    assert balancedness(expected_slot_load(load, initial_placement(layout)), 32) == pytest.approx(0.47, abs=0.05)
    assert feasible_balancedness(load, layout) == pytest.approx(0.60, abs=0.06)
    assert balancedness(expected_slot_load(load, plan_placement(load, copies)), 32) > 0.995
    advice = advise_redundancy(load, layout, max_swaps=16)
    assert advice.num_redundant_experts == 32 and advice.bound == 1.0 and advice.planned > 0.98


def test_an_even_load_needs_no_copies():
    layout = ExpertLayout(num_layers=2, num_experts=16, ranks=8, num_redundant_experts=8)
    advice = advise_redundancy(np.full((2, 16), 7), layout, max_swaps=0)
    assert (advice.num_redundant_experts, advice.bound, advice.planned) == (0, 1.0, 1.0)


def test_advice_where_copies_cannot_help():
    """One expert takes all: 8 copies on 16 ranks are the best there is, from 16 redundant experts on."""
    layout = ExpertLayout(num_layers=1, num_experts=16, ranks=16)
    load = np.zeros((1, 16))
    load[0, 3] = 100
    advice = advise_redundancy(load, layout, max_swaps=0)
    assert advice.num_redundant_experts == 16 and advice.bound == advice.planned == 0.5
    assert advise_redundancy(np.zeros((1, 16)), layout, max_swaps=0).num_redundant_experts == 0
