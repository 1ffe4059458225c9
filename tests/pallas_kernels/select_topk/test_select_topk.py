"""The two forms of the top-k selection, and the candidate blocks."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from widemesh.pallas_kernels.select_topk import candidate_mask, causal, select_indices, select_mask, select_mask_causal

ENTRIES = 12
by_mask = jax.jit(select_mask, static_argnums=1)
by_indices = jax.jit(select_indices, static_argnums=1)
by_blocks = jax.jit(
    lambda scores, visible, block, top: candidate_mask(scores, visible, block=block, top_blocks=top),
    static_argnums=(2, 3),
)


def expected(row, k):
    """The k best of one row, ties to the lower index, -inf never."""
    order = sorted(np.flatnonzero(row > -np.inf), key=lambda i: (-row[i], i))
    return sorted(order[:k])


def sets_of(scores, k):
    """Both forms, as sorted lists per row; the indices must be ascending and end in -1."""
    mask, indices = np.asarray(by_mask(scores, k)), np.asarray(by_indices(scores, k))
    assert indices.shape == (*scores.shape[:-1], min(k, scores.shape[-1])) and indices.dtype == np.int32
    lists = [row[row >= 0].tolist() for row in indices.reshape(-1, indices.shape[-1])]
    for row, found in zip(indices.reshape(-1, indices.shape[-1]), lists, strict=True):
        assert row.tolist() == found + [-1] * (len(row) - len(found)) and found == sorted(found)
    return [np.flatnonzero(row).tolist() for row in mask.reshape(-1, mask.shape[-1])], lists


# Few values, so that ties abound; both zeros, both infinities, denormals.
VALUES = np.float32([-np.inf, -2.5, -1e-42, -0.0, 0.0, 1e-42, 1.0, 1.0000001, 3e38, np.inf])
SCORES = hnp.arrays(np.float32, (4, ENTRIES), elements=st.sampled_from(VALUES))


@settings(deadline=None, max_examples=100)
@given(scores=SCORES, k=st.sampled_from([1, 3, 7, ENTRIES - 1, ENTRIES, ENTRIES + 5]))
def test_both_forms_select_the_same(scores, k):
    """Denormals may count as zero (XLA:CPU flushes them), as long as both forms agree."""
    mask, indices = sets_of(scores, k)
    assert mask == indices
    flushed = np.where(np.abs(scores) < 1e-38, np.float32(0), scores)
    assert mask in ([expected(row, k) for row in scores], [expected(row, k) for row in flushed])


@pytest.mark.parametrize("k", [1, 4, ENTRIES, 100])
def test_row_without_entries(k):
    mask, indices = sets_of(np.full((3, ENTRIES), -np.inf, np.float32), k)
    assert mask == indices == [[], [], []]


def test_ties_go_to_the_lower_index():
    mask, indices = sets_of(np.zeros((1, ENTRIES), np.float32), 5)
    assert mask == indices == [[0, 1, 2, 3, 4]]


def test_zeros_of_both_signs_are_equal():
    """A sort by bits would put +0 before -0."""
    scores = np.array([[-0.0, 0.0, -0.0, 0.0, -1.0]], np.float32)
    mask, indices = sets_of(scores, 2)
    assert mask == indices == [[0, 1]]


def test_random_scores_of_any_rank():
    scores = np.random.default_rng(0).standard_normal((2, 3, 5, 40)).astype(np.float32)
    mask, indices = sets_of(scores, 9)
    assert mask == indices == [expected(row, 9) for row in scores.reshape(-1, 40)]


@pytest.mark.parametrize(("ratio", "start", "block"), [(1, 0, 4), (2, 7, 4), (1, 30, 5), (2, 0, 128)])
def test_blocks_of_rows_over_what_they_see(monkeypatch, ratio, start, block):
    """The same mask as over all entries at once."""
    monkeypatch.setattr(causal, "_BLOCK_ROWS", block)
    rng, rows, entries = np.random.default_rng(0), 21, 55
    visible = (start + np.arange(rows) + 1) // ratio
    scores = rng.integers(-3, 4, (2, rows, entries)).astype(np.float32)
    scores[:, np.arange(entries) >= visible[:, None]] = -np.inf
    found = jax.jit(lambda scores: select_mask_causal(scores, 5, ratio=ratio, start_bound=start))(scores)
    assert np.array_equal(found, by_mask(scores, 5))


# --- candidates ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("top", "block"), [(2, 8), (3, 4), (5, 8)])
def test_candidates_are_golden(micro, top, block):
    found = by_blocks(micro["candidates.scores"], micro["candidates.visible_lengths"][..., 0], block, top)
    wanted = micro[f"candidates.mask_top{top}_block{block}"]
    assert wanted.any() and not wanted.all()
    assert np.array_equal(found, wanted.astype(bool))


def candidates(scores, visible, block=2, top_blocks=2):
    scores = np.where(np.arange(len(scores)) < visible, scores, -np.inf).astype(np.float32)
    found = by_blocks(scores[None], np.array([visible]), block, top_blocks)
    return np.flatnonzero(np.asarray(found)[0]).tolist()


def test_newest_block_is_kept_and_counts():
    """Blocks score 9, 8, 7, 1: the newest displaces the second best."""
    assert candidates([9, 0, 8, 0, 7, 0, 1, 0], 7) == [0, 1, 6, 7]
    assert candidates([9, 0, 8, 0, 7, 0, 1, 0], 6) == [0, 1, 4, 5]


def test_row_that_sees_nothing_keeps_nothing():
    assert candidates([9, 0, 8, 0], 0) == []


def test_blocks_out_of_sight_are_not_kept():
    assert candidates([1, 2, 3, 4, 5, 6], 3, top_blocks=3) == [0, 1, 2, 3]


def test_short_last_block():
    assert candidates([5, 1, 0, 0, 9], 5) == [0, 1, 4]
    assert candidates([5, 1, 0, 0, -9], 5, top_blocks=1) == [4]
