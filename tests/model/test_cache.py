"""Window rings, compressed rows and the structure of a cache."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from widemesh.model.cache import (
    RING_MULTIPLE,
    init_cache,
    ring_rows,
    window_before,
    write_entries,
    write_window,
    written_entries,
)
from widemesh.model.presets import PRESETS

WINDOW, RING, CHUNK = 6, 8, 5
write = jax.jit(write_window)
before = jax.jit(window_before, static_argnums=2)


@pytest.mark.parametrize("name", PRESETS)
def test_ring_holds_the_window_and_the_row_being_written(name):
    rows = ring_rows(PRESETS[name])
    assert PRESETS[name].sliding_window < rows <= PRESETS[name].sliding_window + RING_MULTIPLE
    assert rows % RING_MULTIPLE == 0


@settings(deadline=None, max_examples=50)
@given(lengths=st.lists(st.tuples(st.integers(0, CHUNK), st.integers(0, CHUNK)), min_size=1, max_size=8))
def test_ring_gives_back_the_rows_before(lengths):
    """Two slots fed chunks of any valid length: the window before each chunk is the last WINDOW - 1 rows written, and
    zeros before position 0, whatever an earlier request left there."""
    ring = jnp.full((2, RING, 1), jnp.nan)
    start = np.zeros(2, np.int32)
    for chunk in lengths:
        length = np.array(chunk, np.int32)
        found = np.asarray(before(ring, start, WINDOW))[:, :, 0]
        positions = start[:, None] - (WINDOW - 1) + np.arange(WINDOW - 1)
        wanted = np.where(positions >= 0, positions + 100.0 * np.arange(2)[:, None], 0.0)
        assert np.array_equal(found, wanted)
        rows = start[:, None] + np.arange(CHUNK) + 100.0 * np.arange(2)[:, None]
        ring = write(ring, rows[:, :, None].astype(np.float32), start, length)
        start = start + length


def test_chunk_longer_than_the_ring_keeps_its_newest_rows():
    kv = jnp.arange(20.0)[None, :, None]
    ring = write(jnp.full((1, RING, 1), -1.0), kv, np.array([3], np.int32), np.array([17], np.int32))
    found = np.asarray(before(ring, np.array([20], np.int32), WINDOW))[0, :, 0]
    assert found.tolist() == [12, 13, 14, 15, 16]  # rows of positions 15 to 19


def test_write_window_of_an_idle_slot_changes_nothing():
    ring = jnp.arange(16.0).reshape(2, 8, 1)
    kv = jnp.full((2, 3, 1), 99.0)
    found = np.asarray(write(ring, kv, np.array([5, 0], np.int32), np.array([0, 2], np.int32)))[:, :, 0]
    assert np.array_equal(found[0], np.arange(8))
    assert found[1].tolist() == [99, 99, 10, 11, 12, 13, 14, 15]


def test_write_entries_drops_the_invalid_and_the_far():
    store = jnp.zeros((2, 4, 1))
    new = jnp.array([[[1.0], [2.0], [3.0]], [[4.0], [5.0], [6.0]]])
    index = np.array([[0, 1, 2], [2, 3, 4]])
    valid = np.array([[True, False, True], [True, True, True]])
    found = np.asarray(write_entries(store, new, index, valid))[:, :, 0]
    assert found.tolist() == [[1, 0, 3, 0], [0, 0, 4, 5]]


def test_entries_past_the_tokens_so_far_are_zero():
    """Three tokens of ratio 2 make one entry."""
    found = np.asarray(written_entries(jnp.full((3, 3, 1), jnp.nan).at[:, 0].set(1.0), np.array([0, 3, 2]), 2))
    assert found[:, :, 0].tolist() == [[0, 0, 0], [1, 0, 0], [1, 0, 0]]


@pytest.mark.parametrize("name", ["tiny-structure", "tiny-geometry", "tiny-mesh"])
def test_structure_follows_the_roles(name):
    config = PRESETS[name]
    cache = init_cache(config, 3, 50)
    for role, layer in zip(config.roles, cache, strict=True):
        assert layer.window.shape == (3, ring_rows(config), config.head_dim)
        assert len(layer.source) == int(role.owns_kv)
        for source in layer.source:
            assert source.entries.shape == (3, 50 // role.ratio, config.head_dim)
            assert source.index_keys.shape == (3, 50 // role.ratio, config.index_head_dim)
            assert source.pending.shape == (3, role.ratio - 1, 2, config.head_dim)
    assert all(leaf.dtype == jnp.float32 and not leaf.any() for leaf in jax.tree.leaves(cache))
