"""Grouping of rows into blocks: every pair has one place, in a block of its expert, in order."""

import functools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from widemesh.pallas_kernels.grouped_moe.grouping import group_rows, num_blocks

T, K, X, BLOCK = 13, 2, 3, 4
WEIGHTS = np.random.default_rng(0).random((T, K), np.float32) + 0.5


@functools.cache
def program():
    return jax.jit(functools.partial(group_rows, held=X, block_rows=BLOCK))


def check(slots):
    found = jax.tree.map(np.asarray, program()(slots, WEIGHTS))
    blocks = len(found.block_expert)
    assert blocks == num_blocks(T * K, X, BLOCK) and len(found.rows) == len(found.weights) == blocks * BLOCK
    held = (slots >= 0) & (slots < X)
    counts = np.bincount(slots[held], minlength=X)
    np.testing.assert_array_equal(found.counts, counts)
    assert found.used == sum(-(-count // BLOCK) for count in counts) <= blocks
    assert (np.diff(found.block_expert) >= 0).all() and (found.block_expert < X).all()
    assert (found.place[~held] == blocks * BLOCK).all()
    filled = found.place[held]
    assert len(set(filled.tolist())) == len(filled) and (filled < found.used * BLOCK).all()
    for expert in range(X):
        rows, columns = np.nonzero(slots == expert)
        places = found.place[rows, columns]
        assert (np.diff(places) == 1).all(), "in order of row, without gaps"
        assert not len(places) or places[0] % BLOCK == 0
        assert (found.block_expert[places // BLOCK] == expert).all()
        np.testing.assert_array_equal(found.rows[places], rows)
        np.testing.assert_array_equal(found.weights[places], WEIGHTS[rows, columns])
    padding = np.setdiff1d(np.arange(blocks * BLOCK), filled)
    assert not found.rows[padding].any() and not found.weights[padding].any()


@pytest.mark.parametrize("slots", [
    np.full((T, K), -1),
    np.full((T, K), X),
    np.zeros((T, K)),
    np.tile([X - 1, -1], (T, 1)),
    np.arange(T * K).reshape(T, K) % (X + 1),
], ids=["none", "out of range", "all pairs on one", "all rows on the last", "mixed"])  # fmt: skip
def test_cases(slots):
    check(slots.astype(np.int32))


@settings(deadline=None, max_examples=50)
@given(slots=hnp.arrays(np.int32, (T, K), elements=st.integers(-2, X + 1)))
def test_any_routing(slots):
    check(slots)


@pytest.mark.parametrize(
    ("pairs", "held", "block", "blocks"), [(1, 48, 8, 1), (7, 2, 8, 2), (16, 2, 8, 4), (8, 1, 8, 2)]
)
def test_bound_on_the_blocks(pairs, held, block, blocks):
    assert num_blocks(pairs, held, block) == blocks
