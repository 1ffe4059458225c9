"""The first placement, what a placement must fulfil, and its hash."""

from __future__ import annotations

import struct
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from widemesh.eplb import (
    ExpertLayout,
    check_placement,
    hash_text,
    initial_placement,
    initial_slot_owner,
    placement_hash,
)
from widemesh.eplb.duplicates import find_duplicates
from widemesh.eplb.placement import as_placement
from widemesh.model.config import ConfigError

LAYOUT = ExpertLayout(num_layers=2, num_experts=4, ranks=2, num_redundant_experts=2)


@pytest.mark.parametrize(("experts", "ranks", "redundant", "owner"), [
    (4, 2, 0, [0, 1, 2, 3]),
    (9, 4, 0, [0, 1, 2, 3, 4, 5, 6, 7, 8, -1, -1, -1]),
    (3, 1, 0, [0, 1, 2]),
    (4, 3, 2, [0, 1, 2, 3, 0, 1]),
    (2, 4, 6, [0, 1, 0, 1, 0, 1, 0, 1]),
])  # fmt: skip
def test_first_placement(experts: int, ranks: int, redundant: int, owner: list[int]) -> None:
    assert initial_slot_owner(experts, ranks, redundant).tolist() == owner


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_first_placement_is_valid_and_parts_copies(draws, data):
    layout = draws.layout(data, hierarchical=False)
    owner = initial_placement(layout)
    check_placement(owner, layout)
    assert not find_duplicates(owner.reshape(layout.num_layers, layout.ranks, -1)).any()


@pytest.mark.parametrize(("owner", "words"), [
    ([[0, 1, 2, 3, 0, 1]], r"x has shape \(1, 6\); it must be \(2, 6\): 2 layers, and 6 slots for 4 experts and 2 red"),
    ([[0.0] * 6] * 2, "x: slot 0 of layer 0 holds 0.0; it must hold an expert from 0 to 3, or -1 for none, as"),
    ([[0, 1, 2, 3, 0, "1"]] * 2, "x: slot 0 of layer 0 holds '0'; it must hold an expert from 0 to 3, or -1 for"),
    (np.array([[0, 1, 2, 3, 0, 2**70]] * 2, object), "x: slot 5 of layer 0 holds 1180591620717411303424; it must hold"),
    (np.array([[0, 1, 2, 3, 0, 200]] * 2, np.uint8), "x: slot 5 of layer 0 holds 200; it must hold"),
    ([[0, 1, 2, 3, 0, 1], [0, 1, 2, 4, 0, 1]], "x: slot 3 of layer 1 holds 4; it must hold an expert from 0 to 3"),
    ([[0, 1, 2, 3, 0, -2]] * 2, "x: slot 5 of layer 0 holds -2"),
    ([[0, 1, 2, 3, 0, 1], [0, 1, 3, 3, 0, 1]], "x: no slot of layer 1 holds expert 2; every expert from 0 to 3 needs"),
    ([[0, 1, 2, 3, 0, 0]] * 2, "x: layer 0 holds expert 0 in 3 slots; it may take 1 to 2 with num_redundant_experts=2"),
])  # fmt: skip
def test_placements_that_cannot_be_run_are_refused(owner, words):
    with pytest.raises(ConfigError, match=words):
        check_placement(np.array(owner), LAYOUT, "x")


def test_a_placement_of_other_sizes_is_refused_with_what_to_do():
    with pytest.raises(ConfigError, match="; use a placement that was exported from a model with these sizes"):
        check_placement(np.zeros((1, 6), int), LAYOUT)


@pytest.mark.parametrize("given", [
    [[0, 1, 2, 3, 0, 1], [3, 2, 1, 0, -1, 0]],
    ((0, 1, 2, 3, 0, 1), (3, 2, 1, 0, -1, 0)),
    np.array([[0, 1, 2, 3, 0, 1], [3, 2, 1, 0, -1, 0]], np.int8),
])  # fmt: skip
def test_lists_and_arrays_are_placements(given):
    owner = as_placement(given, LAYOUT)
    assert owner.dtype == np.int32 and owner.tolist() == [[0, 1, 2, 3, 0, 1], [3, 2, 1, 0, -1, 0]]


@pytest.mark.parametrize(("given", "words"), [
    (None, "x is None; it must be an array of whole numbers, 2 layers of 6 slots, as the status of an engine has it"),
    ([], r"x has shape \(0,\); it must be \(2, 6\)"),
    ([[1]], r"x has shape \(1, 1\); it must be \(2, 6\)"),
    ([3, [0] * 6], "x: layer 0 is 3; it must be a list of the owners of its 6 slots"),
    ([[0] * 6, [0] * 5], "x: layer 1 has length 5; it must be 6, an owner for each slot"),
    ([[[0, 1]] * 6] * 2, r"x: slot 0 of layer 0 holds \[0, 1\]; it must hold an expert from 0 to 3, or -1 for none"),
    ([[0, 1, 2, 3, True, 1]] * 2, "x: slot 4 of layer 0 holds True; it must hold an expert"),
    ([[0, 1, 2, 3, 2**70, 1]] * 2, "x: slot 4 of layer 0 holds 1180591620717411303424; it must hold an expert"),
])  # fmt: skip
def test_what_is_no_placement_is_refused_in_one_sentence(given, words):
    with pytest.raises(ConfigError, match=words) as caught:
        as_placement(given, LAYOUT, "x")
    assert "\n" not in str(caught.value)


def test_empty_slots_and_copies_on_one_rank_can_be_run():
    check_placement(np.array([[0, 0, 1, 2, 3, -1]] * 2), LAYOUT)


def test_hash_is_the_same_everywhere_and_tells_placements_apart():
    owner = initial_placement(LAYOUT)
    as_bytes = struct.pack("<14i", 2, 6, *owner.reshape(-1).tolist())
    assert placement_hash(owner) % 2**32 == placement_hash(owner.astype(np.int64)) % 2**32 == zlib.crc32(as_bytes)
    others = [owner[:, ::-1], owner[:1], owner.reshape(1, -1), np.roll(owner, 1, 1)]
    changed = owner.copy()
    changed[1, 5] = 2
    hashes = [placement_hash(one) for one in (owner, changed, *others)]
    assert len(set(hashes)) == len(hashes) and all(-(2**31) <= one < 2**31 for one in hashes)


def test_a_hash_is_shown_as_eight_hexadecimal_digits():
    assert (hash_text(-57916389), hash_text(10)) == ("fc8c441b", "0000000a")
