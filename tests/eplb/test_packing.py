"""Packing and copying, beside the same steps in plain Python."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from widemesh.eplb.packing import pack, replicate
from widemesh.tools.bench.eplb_plain import pack_plainly, replicate_plainly

UNLIMITED = 10**6


@settings(max_examples=60, deadline=None)
@given(data=st.data(), bins=st.integers(1, 6), quota=st.integers(1, 5), rows=st.integers(1, 3))
def test_packing_is_the_plain_one(data, bins, quota, rows):
    items = st.lists(st.sampled_from([0, 1, 1, 2, 3, 7, 100]), min_size=bins * quota, max_size=bins * quota)
    load = np.array(data.draw(st.lists(items, min_size=rows, max_size=rows)), float)
    bin_of, place_of = pack(load, bins)
    for row in range(rows):
        assert (bin_of[row].tolist(), place_of[row].tolist()) == pack_plainly(load[row].tolist(), bins)
        places = sorted(zip(bin_of[row], place_of[row], strict=True))
        assert places == [(b, p) for b in range(bins) for p in range(quota)]


@settings(max_examples=60, deadline=None)
@given(load=st.lists(st.integers(0, 9), min_size=1, max_size=8), more=st.integers(0, 9))
def test_copying_is_the_plain_one(load, more):
    owner = replicate(np.array([load], float), len(load) + more, UNLIMITED)
    assert owner[0].tolist() == replicate_plainly(load, len(load) + more)


def test_copies_have_a_limit():
    load = np.array([[100.0, 3, 2, 1], [0, 0, 0, 0]])
    assert replicate(load, 8, 3).tolist() == [[0, 1, 2, 3, 0, 0, 1, 2], [0, 1, 2, 3, 0, 0, 1, 1]]
    assert replicate(load, 4, 1).tolist() == [[0, 1, 2, 3]] * 2


def test_one_item_per_bin_stays():
    bin_of, place_of = pack(np.array([[1.0, 5, 3]]), 3)
    assert bin_of.tolist() == [[0, 1, 2]] and place_of.tolist() == [[0, 0, 0]]
