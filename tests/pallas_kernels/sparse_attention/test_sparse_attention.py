"""Attention over window and selected entries: by indices, by mask, and with the released roundings."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from widemesh.pallas_kernels.sparse_attention import (
    SelectedIndices,
    SelectedMask,
    dense,
    empty_selection,
    sparse_attention,
    visible_entries,
)

B, S, N, H, W, L = 2, 7, 3, 8, 4, 10


def arguments(seed=0, b=B, s=S, n=N, h=H, w=W, entries=L):
    """q, window rows, entries and sinks."""
    rng = np.random.default_rng(seed)
    shapes = (b, s, n, h), (b, s + w - 1, h), (b, entries, h), (n,)
    return tuple((1.5 * rng.standard_normal(shape)).astype(np.float32) for shape in shapes)


def both_forms(mask, k):
    """The same selection as indices (ascending, then -1) and as a mask."""
    indices = np.full((*mask.shape[:2], k), -1, np.int32)
    for place in np.ndindex(mask.shape[:2]):
        chosen = np.flatnonzero(mask[place])
        indices[(*place, slice(len(chosen)))] = chosen
    return SelectedIndices(jnp.asarray(indices)), SelectedMask(jnp.asarray(mask))


def expected(q, near, start, entries, mask, sink, window, first=0):
    """One row and head at a time, in float64."""
    q, near, entries = (x.astype(np.float64) for x in (q, near, entries))
    out = np.zeros(q.shape)
    for b, s in np.ndindex(q.shape[:2]):
        own = [near[b, s + i] for i in range(window) if start[b] - (window - 1) + s + i >= first]
        keys = np.array([*own, *entries[b][mask[b, s]]]).reshape(-1, q.shape[-1])
        for n in range(q.shape[2]):
            e = np.exp(keys @ q[b, s, n] * q.shape[-1] ** -0.5)
            out[b, s, n] = e @ keys / (e.sum() + np.exp(sink[n]))
    return out


def attend(q, near, start, entries, selection, sink, *, first=0, window=W, ratio=1, **static):
    """`sparse_attention` on all entries, gathered here for indices."""
    first = jnp.broadcast_to(jnp.asarray(first, jnp.int32), start.shape)
    if isinstance(selection, SelectedIndices):
        safe = jnp.maximum(selection.indices, 0)
        entries = jnp.asarray(entries)[jnp.arange(len(start))[:, None, None], safe]
    return sparse_attention(q, near, start, first, entries, selection, sink, window=window, ratio=ratio, **static)


@jax.jit
def run(q, near, start, entries, selection, sink):
    """Both forms, for any start up to 20 and ratio 1."""
    return attend(q, near, start, entries, selection, sink, start_bound=20)


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 2**31), density=st.sampled_from([0.0, 0.2, 1.0]), start=st.tuples(*[st.integers(0, 20)] * B))
def test_both_forms_are_the_formula(seed, density, start):
    """Any selection, an empty one too, at any start: position 0 sees itself and the sink."""
    q, near, entries, sink = arguments(seed)
    start = np.array(start, np.int32)
    mask = np.random.default_rng(seed).random((B, S, L)) < density
    wanted = expected(q, near, start, entries, mask, sink, W)
    for selection in both_forms(mask, L):
        found = run(q, near, start, entries, selection, sink)
        np.testing.assert_allclose(found, wanted, rtol=2e-4, atol=2e-5)


def test_first_row_without_entries_sees_itself_and_the_sink():
    q, near, entries, sink = arguments()
    start = np.zeros(B, np.int32)
    weight = np.exp(np.einsum("bnh,bh->bn", q[:, 0], near[:, W - 1]) * H**-0.5)
    wanted = (weight / (weight + np.exp(sink)))[..., None] * near[:, None, W - 1]
    for selection in both_forms(np.zeros((B, S, L), bool), L):
        np.testing.assert_allclose(run(q, near, start, entries, selection, sink)[:, 0], wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form", ["mask", "indices"])
def test_layer_without_entries(form):
    q, near, _, sink = arguments()
    start = np.array([0, 9], np.int32)
    entries = np.zeros((B, 0, H), np.float32)
    attend_nothing = jax.jit(functools.partial(attend, ratio=0, start_bound=20))
    found = attend_nothing(q, near, start, entries, empty_selection(form, B, S), sink)
    wanted = expected(q, near, start, entries, np.zeros((B, S, 0), bool), sink, W)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("first", [0, 3])
@pytest.mark.parametrize(("block", "band", "ratio"), [(1, 1, 1), (3, 3, 2), (3, 1, 1), (4, 2, 2), (6, 2, 1), (4, 2, 0)])
def test_blocks_and_bands_of_rows_change_nothing(monkeypatch, block, band, ratio, first):
    """Several bands in a block, one, and a shorter last block; rows before `first` are not seen (some see nothing)."""
    q, near, entries, sink = arguments()
    start = np.array([0, 2], np.int32)
    position = start[:, None] + np.arange(S)
    mask = np.arange(L) < ((position + 1) // ratio)[..., None] if ratio else np.zeros((B, S, L), bool)
    selection = SelectedMask(jnp.asarray(mask))
    monkeypatch.setattr(dense, "_BLOCK_ROWS", block)
    monkeypatch.setattr(dense, "_BAND_ROWS", band)
    run = jax.jit(functools.partial(attend, ratio=ratio, start_bound=2, first=first))
    found = run(q, near, start, entries, selection, sink)
    wanted = expected(q, near, start, entries, mask, sink, W, first=first)
    np.testing.assert_allclose(found, wanted, rtol=2e-4, atol=2e-5)


def test_large_scores_and_sinks_stay_finite():
    """exp is taken below the largest score; a sink far above it leaves nothing."""
    q, near, entries, sink = arguments()
    start = np.zeros(B, np.int32)
    for selection in both_forms(np.ones((B, S, L), bool), L):
        found = np.asarray(run(q * 100, near * 100, start, entries * 100, selection, sink))
        assert np.isfinite(found).all() and np.abs(found).max() > 1
        assert np.abs(run(q, near, start, entries, selection, np.full(N, 80.0, np.float32))).max() < 1e-20


@pytest.mark.parametrize("first", [0, 4, 7, 9])
def test_window_rows_before_a_run_began_are_not_seen(first):
    """As if those rows did not exist: the formula with as many rows fewer."""
    q, near, entries, sink = arguments()
    start = np.full(B, 9, np.int32)
    mask = np.random.default_rng(1).random((B, S, L)) < 0.3
    wanted = expected(q, near, start, entries, mask, sink, W, first=first)
    for selection in both_forms(mask, L):
        found = attend(q, near, start, entries, selection, sink, first=first, start_bound=20)
        np.testing.assert_allclose(found, wanted, rtol=2e-4, atol=2e-5)


def test_visible_entries():
    found = np.asarray(visible_entries(jnp.array([0, 5]), 3, 4, 2))
    assert found.astype(int).tolist() == [
        [[0, 0, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0]],
        [[1, 1, 1, 0], [1, 1, 1, 0], [1, 1, 1, 1]],
    ]


# --- released roundings ----------------------------------------------------------------------------------------------


def bf(x):
    return x.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)


def online(q, near, entries, sink, block, *, rounded=True, rounded_sum=False):
    """One query row over window then entries, `block` slots at a time: weights are rounded relative to the largest
    score so far, their sum is not."""
    keys = np.concatenate([near, entries]).astype(np.float64)
    scores = keys @ q.astype(np.float64).T * q.shape[-1] ** -0.5  # [slots, N]
    top, total, out = np.full(len(q), -1e30), np.zeros(len(q)), np.zeros(q.shape)
    for first in range(0, len(keys), block):
        part = scores[first : first + block]
        new = np.maximum(top, part.max(0))
        weights, decay = np.exp(part - new), np.exp(top - new)
        used = bf(weights) if rounded else weights
        total = total * decay + (used if rounded_sum else weights).sum(0)
        out = out * decay[:, None] + used.T @ keys[first : first + block]
        top = new
    return out / (total + np.exp(sink - top))[:, None]


def rounded_case():
    """One row with a full window of 16 and 176 entries: three blocks of 64, the largest score in the last."""
    q, near, entries, sink = (bf(x).astype(np.float32) for x in arguments(3, b=1, s=1, n=6, h=32, w=16, entries=176))
    entries[0, -1] = q[0, 0, 0]
    selection = SelectedIndices(jnp.arange(176, dtype=jnp.int32)[None, None])
    run_rounded = jax.jit(functools.partial(attend, window=16, start_bound=500, bf16_rounding=True))
    found = run_rounded(q, near, np.array([500], np.int32), entries, selection, sink)
    return np.asarray(found)[0, 0], (q[0, 0], near[0], entries[0], sink)


def distance(found, wanted):
    return np.linalg.norm(found - wanted) / np.linalg.norm(wanted)


def test_probabilities_are_rounded_against_the_running_maximum_in_blocks_of_64():
    found, args = rounded_case()
    assert distance(found, online(*args, 64)) < 1e-6
    for block in (16, 32, 128, 192):
        assert distance(found, online(*args, block)) > 1e-5, block


def test_denominator_takes_unrounded_probabilities():
    found, args = rounded_case()
    assert distance(found, online(*args, 64, rounded_sum=True)) > 1e-5
    assert distance(found, online(*args, 64, rounded=False)) > 1e-4


def test_rounding_needs_an_order_of_slots():
    q, near, entries, sink = arguments()
    _, mask = both_forms(np.ones((B, S, L), bool), L)
    with pytest.raises(ValueError, match="bf16_rounding=True needs a selection by indices"):
        attend(q, near, np.zeros(B, np.int32), entries, mask, sink, start_bound=0, bf16_rounding=True)
