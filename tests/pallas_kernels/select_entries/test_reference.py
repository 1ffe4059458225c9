"""The op against the path by masks that it stands for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.pallas_kernels.select_entries.inputs import arguments
from widemesh.pallas_kernels.indexer_scores import indexer_scores
from widemesh.pallas_kernels.paged_cache import read_keys
from widemesh.pallas_kernels.select_entries import select_entries
from widemesh.pallas_kernels.select_topk import candidate_mask, select_indices

BLOCK = 8


def by_masks(queries, weights, pages, table, visible, candidates, *, source, k, top_blocks):
    """Selected indices and the mask of candidates, as layers hand masks on."""
    keys = read_keys(pages, table, source)
    scores = indexer_scores(queries, weights, keys, ratio=1, start_bound=999, bf16_operands=source.key.code == "mxfp4")
    seen = np.arange(keys.shape[1]) < visible[..., None]
    scores = jnp.where(seen, scores, -jnp.inf)
    if top_blocks is not None:
        candidates = seen & candidate_mask(scores, visible, block=BLOCK, top_blocks=top_blocks)
    elif candidates is not None:
        scores = jnp.where(candidates, scores, -jnp.inf)
    return np.asarray(select_indices(scores, k)), candidates


def padded(indices, k):
    return np.pad(indices, [(0, 0), (0, 0), (0, k - indices.shape[-1])], constant_values=-1)


@pytest.mark.parametrize(("k", "record"), [(5, "packed"), (12, "f32"), (100, "packed")])
def test_equals_the_path_by_masks(k, record):
    """Candidates written at one layer and read at another; k above and below what is there."""
    queries, weights, pages, table, source = arguments(s=4, record=record)
    visible = np.array([[0, 1, 7, 20], [8, 30, 47, 48]], np.int32)
    found = select_entries(queries, weights, pages, table, visible, None, source=source, k=k, block=BLOCK, top_blocks=3,
                           implementation="reference")  # fmt: skip
    wanted, mask = by_masks(queries, weights, pages, table, visible, None, source=source, k=k, top_blocks=3)
    assert np.array_equal(found.indices, padded(wanted, k))
    blocks = np.asarray(found.blocks)
    assert blocks.shape == (2, 4, 3)
    for row, kept in zip(blocks.reshape(-1, 3), np.asarray(mask).reshape(-1, mask.shape[-1]), strict=True):
        numbers = np.unique(np.flatnonzero(kept) // BLOCK)
        assert row.tolist() == numbers.tolist() + [-1] * (3 - len(numbers))

    other = arguments(s=4, record=record, seed=1)[0]
    found = select_entries(other, weights, pages, table, visible, blocks, source=source, k=k, block=BLOCK,
                           top_blocks=None, implementation="reference")  # fmt: skip
    wanted, _ = by_masks(other, weights, pages, table, visible, mask, source=source, k=k, top_blocks=None)
    assert found.blocks is None and np.array_equal(found.indices, padded(wanted, k))


def test_unrestricted_without_candidates():
    queries, weights, pages, table, source = arguments(s=2, ratio=2)
    visible = np.array([[3, 24], [11, 12]], np.int32)
    found = select_entries(queries, weights, pages, table, visible, None, source=source, k=6, block=BLOCK,
                           top_blocks=None, implementation="reference")  # fmt: skip
    wanted, _ = by_masks(queries, weights, pages, table, visible, None, source=source, k=6, top_blocks=None)
    assert found.blocks is None and np.array_equal(found.indices, wanted)
    assert np.asarray(found.indices[0, 0]).tolist() == [0, 1, 2, -1, -1, -1]


def test_ties_go_to_the_lower_index():
    queries, weights, pages, table, source = arguments(s=2)
    visible = np.full((2, 2), 40, np.int32)
    blocks = np.broadcast_to(np.int32([1, 4, -1]), (2, 2, 3))
    select = jax.jit(select_entries, static_argnames=("source", "k", "block", "top_blocks", "implementation"))
    options = {"source": source, "k": 10, "block": BLOCK, "implementation": "reference"}
    free = select(queries, 0 * weights, pages, table, visible, None, top_blocks=2, **options)
    assert (free.indices == np.arange(10)).all() and (free.blocks == np.array([0, 4])).all()
    bound = select(queries, 0 * weights, pages, table, visible, blocks, top_blocks=None, **options)
    assert (bound.indices == np.array([8, 9, 10, 11, 12, 13, 14, 15, 32, 33])).all()


def test_candidates_among_candidates_are_refused():
    queries, weights, pages, table, source = arguments()
    with pytest.raises(ValueError, match="top_blocks=2 chooses candidate blocks among all entries"):
        select_entries(queries, weights, pages, table, np.ones((2, 1), np.int32), np.zeros((2, 1, 1), np.int32),
                       source=source, k=1, block=BLOCK, top_blocks=2)  # fmt: skip
