"""Balancedness, and load by slot, expert and rank."""

from __future__ import annotations

import numpy as np
import pytest

from widemesh.eplb import balancedness, expected_slot_load, fold_slots, rank_loads


def test_balancedness_is_a_ratio_of_sums():
    load = np.array([[4, 0, 0, 0], [1, 1, 1, 1]])  # rank loads 4, 0 and 2, 2
    assert balancedness(load, 2) == pytest.approx((2 + 2) / (4 + 2))  # not the mean of 1/2 and 1
    assert balancedness(np.stack([load, np.zeros_like(load)]), 2) == pytest.approx(4 / 6)  # an idle step adds nothing
    assert balancedness(np.zeros((2, 4), int), 2) == 0.0
    assert rank_loads(load, 2).tolist() == [[4, 0], [2, 2]]


def test_slots_fold_into_experts_and_back():
    owner = np.array([[0, 2, 1, 0], [1, -1, 0, 2]], np.int32)
    steps = np.array([[[1, 2, 3, 4], [5, 0, 6, 7]], [[10, 0, 0, 1], [0, 0, 0, 1]]], np.int32)
    folded = fold_slots(steps, owner, 3)
    assert folded.dtype == np.int64
    assert folded.tolist() == [[[5, 3, 2], [6, 5, 7]], [[11, 0, 0], [0, 0, 1]]]
    assert fold_slots(steps.sum(0), owner, 3).tolist() == folded.sum(0).tolist()
    assert expected_slot_load(folded[0], owner).tolist() == [[2.5, 2, 3, 2.5], [5, 0, 6, 7]]


def test_sums_of_a_window_do_not_overflow():
    full = np.full((1, 2), 2**31 - 1, np.int32)
    assert fold_slots(full, np.zeros((1, 2), np.int32), 1).tolist() == [[2 * (2**31 - 1)]]
