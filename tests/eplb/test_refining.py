"""Swaps after packing."""

from __future__ import annotations

import numpy as np

from widemesh.eplb.refining import refine


def test_a_swap_evens_two_ranks_out():
    owner, load = np.array([[[0, 1], [2, 3]]], np.int32), np.array([[[5.0, 4.0], [3.0, 2.0]]])
    refine(owner, load, max_swaps=1)
    assert owner.tolist() == [[[2, 1], [0, 3]]] and load.sum(2).tolist() == [[7, 7]]


def test_no_swap_puts_an_expert_on_a_rank_twice():
    owner = np.array([[[0, 1], [0, 2]]], np.int32)
    load = np.array([[[4.0, 5.0], [4.0, 0.0]]])
    refine(owner, load, max_swaps=9)  # the one that would help, 0 for 2, would bring a second 0 to rank 1
    assert owner.tolist() == [[[0, 1], [0, 2]]]


def test_layers_stop_when_they_are_even_enough():
    owner = np.tile(np.array([[0, 1], [2, 3]], np.int32), (2, 1, 1))
    load = np.tile(np.array([[5.0, 4.0], [3.0, 2.0]]), (2, 1, 1))
    refine(owner, load, max_swaps=9, enough=np.array([9.0, 8.9]))
    assert load.sum(2).tolist() == [[9, 5], [7, 7]]
    refine(owner, load, max_swaps=0)
    assert load.sum(2).tolist() == [[9, 5], [7, 7]]
