"""Window rings, rings of open groups, and the structure of a cache."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from widemesh.model.cache import (
    RING_MULTIPLE,
    init_cache,
    page_layout,
    private_pages,
    read_ring,
    ring_rows,
    window_before,
    write_ring,
    write_window,
    written_entries,
)
from widemesh.model.numerics import NUMERICS
from widemesh.model.presets import PRESETS
from widemesh.pallas_kernels.layout import VectorLayout

WINDOW, RING, CHUNK = 6, 8, 5
F32 = VectorLayout(code="f32", dim=1)
write = jax.jit(write_window, static_argnames="layout")
before = jax.jit(window_before, static_argnames=("window", "layout"))


def ring_of(value, slots=1, rows=RING):
    """A window ring of one-value f32 rows."""
    return jnp.asarray(np.full((slots, rows), value, np.float32).view(np.uint8).reshape(slots, rows, 4))


@pytest.mark.parametrize("drafts", [0, 5])
@pytest.mark.parametrize("name", PRESETS)
def test_ring_holds_the_window_and_the_rows_being_written(name, drafts):
    rows = ring_rows(PRESETS[name], drafts)
    needed = PRESETS[name].sliding_window + 1 + drafts
    assert needed <= rows < needed + RING_MULTIPLE and rows % RING_MULTIPLE == 0


@settings(deadline=None, max_examples=50)
@given(lengths=st.lists(st.tuples(st.integers(0, CHUNK), st.integers(0, CHUNK)), min_size=1, max_size=8))
def test_ring_gives_back_the_rows_before(lengths):
    """Two slots fed chunks of any valid length: the window before each chunk is the last WINDOW - 1 rows written, and
    zeros before position 0, whatever an earlier request left there."""
    ring = ring_of(np.nan, slots=2)
    start = np.zeros(2, np.int32)
    for chunk in lengths:
        length = np.array(chunk, np.int32)
        found = np.asarray(before(ring, start, np.zeros(2, np.int32), window=WINDOW, layout=F32))[:, :, 0]
        positions = start[:, None] - (WINDOW - 1) + np.arange(WINDOW - 1)
        wanted = np.where(positions >= 0, positions + 100.0 * np.arange(2)[:, None], 0.0)
        assert np.array_equal(found, wanted)
        rows = start[:, None] + np.arange(CHUNK) + 100.0 * np.arange(2)[:, None]
        ring = write(ring, rows[:, :, None].astype(np.float32), start, length, layout=F32)
        start = start + length


def test_rows_before_a_run_began_are_zero():
    """A run that began at position 3 sees nothing of positions 1 and 2, although rows lie there."""
    ring = write(ring_of(-1.0), jnp.arange(6.0)[None, :, None], np.zeros(1, np.int32), np.array([6]), layout=F32)
    found = before(ring, np.array([6]), np.array([3]), window=WINDOW, layout=F32)
    assert np.asarray(found)[0, :, 0].tolist() == [0, 0, 3, 4, 5]


@settings(deadline=None, max_examples=30)
@given(steps=st.lists(st.integers(0, 3), min_size=1, max_size=12))
def test_going_back_over_rejected_drafts_is_starting_earlier(steps):
    """Steps of 1 + 3 rows of which the last `rejected` are wrong: the window before each step is that of the
    accepted rows alone."""
    capacity, accepted, drafts = 16, [], 3  # a window of 6, one row and three drafts, rounded up
    ring, start = ring_of(np.nan, rows=capacity), 0
    for rejected in steps:
        found = np.asarray(before(ring, np.array([start]), np.zeros(1, np.int32), window=WINDOW, layout=F32))[0, :, 0]
        assert found.tolist() == ([0.0] * (WINDOW - 1) + accepted)[-(WINDOW - 1) :]
        rows = np.full((1, 1 + drafts, 1), -7.0, np.float32)
        right = 1 + drafts - rejected
        rows[0, :right, 0] = np.arange(start, start + right) + 0.5
        ring = write(ring, rows, np.array([start]), np.array([1 + drafts]), layout=F32)
        accepted += rows[0, :right, 0].tolist()
        start += right


def test_chunk_longer_than_the_ring_keeps_its_newest_rows():
    kv = jnp.arange(20.0)[None, :, None]
    ring = write(ring_of(-1.0), kv, np.array([3], np.int32), np.array([17], np.int32), layout=F32)
    found = before(ring, np.array([20], np.int32), np.zeros(1, np.int32), window=WINDOW, layout=F32)
    assert np.asarray(found)[0, :, 0].tolist() == [12, 13, 14, 15, 16]  # rows of positions 15 to 19


def test_write_ring_of_an_idle_slot_changes_nothing():
    ring = jnp.arange(16.0).reshape(2, 8, 1)
    rows = jnp.full((2, 3, 1), 99.0)
    found = np.asarray(write_ring(ring, rows, np.array([5, 0], np.int32), np.array([0, 2], np.int32)))[:, :, 0]
    assert np.array_equal(found[0], np.arange(8))
    assert found[1].tolist() == [99, 99, 10, 11, 12, 13, 14, 15]


def test_read_ring_takes_any_position():
    ring = jnp.arange(4.0).reshape(1, 4, 1)
    assert np.asarray(read_ring(ring, np.array([[-1, 0, 5, 8]])))[0, :, 0].tolist() == [3, 0, 1, 0]


def test_entries_past_the_tokens_so_far_are_zero():
    """Three tokens of ratio 2 make one entry."""
    found = np.asarray(written_entries(jnp.full((3, 3, 1), jnp.nan).at[:, 0].set(1.0), np.array([0, 3, 2]), 2))
    assert found[:, :, 0].tolist() == [[0, 0, 0], [1, 0, 0], [1, 0, 0]]


@pytest.mark.parametrize("drafts", [0, 2])
@pytest.mark.parametrize("numerics", ["plain", "kvq"])
@pytest.mark.parametrize("name", ["tiny-structure", "tiny-geometry", "tiny-mesh"])
def test_structure_follows_the_roles(name, numerics, drafts):
    """Every byte of every array is accounted for by the sizes of the records."""
    config = PRESETS[name]
    layout = page_layout(config, NUMERICS[numerics], 16)
    cache = init_cache(config, layout, slots=3, pages=10, table_pages=5, max_drafts=drafts)
    d, j = config.head_dim, config.index_head_dim
    per_entry = 4 * (d + j) if numerics == "plain" else d // 2 + -(-d // 16) + j // 2 + -(-j // 32)
    row = 4 * d if numerics == "plain" else d + -(-d // 32)
    entries = sum(16 // role.ratio for role in config.roles if role.owns_kv)
    assert cache.pages.shape == (10, entries * per_entry) and cache.pages.dtype == jnp.uint8
    assert cache.table.shape == (3, 5) and not cache.table.any()
    for role, layer in zip(config.roles, cache.layers, strict=True):
        assert layer.window.shape == (3, ring_rows(config, drafts), row) and layer.window.dtype == jnp.uint8
        rows = role.ratio - 1 + drafts if role.ratio > 1 else 0
        assert [x.shape for x in layer.open_group] == [(3, rows, 2, d)] * role.owns_kv
    assert all(not leaf.any() for leaf in jax.tree.leaves(cache))


def test_private_pages_share_nothing():
    config = PRESETS["tiny-mesh"]
    layout = page_layout(config, NUMERICS["kvq"], 16)
    cache = private_pages(init_cache(config, layout, slots=3, pages=1 + 12, table_pages=4))
    assert sorted(np.asarray(cache.table).ravel().tolist()) == list(range(1, 13))
    assert dataclasses.replace(cache, table=cache.table * 0).layout == layout
