"""Scores every entry, then sorts: the specification, and what a CPU runs."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, UInt8

from widemesh.pallas_kernels.indexer_scores import indexer_scores
from widemesh.pallas_kernels.layout import SourceLayout
from widemesh.pallas_kernels.paged_cache import read_keys
from widemesh.pallas_kernels.select_entries.selected import Selected
from widemesh.pallas_kernels.select_topk import candidate_mask, select_indices


def select_entries_reference(
    queries: Float[Array, "B S I J"],
    weights: Float[Array, "B S I"],
    pages: UInt8[Array, "pages page_bytes"],
    table: Int32[Array, "B P"],
    visible: Int32[Array, "B S"],
    blocks: Int32[Array, "B S C"] | None,
    *,
    source: SourceLayout,
    k: int,
    block: int,
    top_blocks: int | None,
) -> Selected:
    """See `op.select_entries`."""
    keys = read_keys(pages, table, source)
    entries = keys.shape[1]
    scores = indexer_scores(
        queries, weights, keys, ratio=1, start_bound=entries, bf16_operands=source.key.code == "mxfp4"
    )
    competes = jnp.arange(entries) < visible[..., None]
    if blocks is not None:
        competes &= _members(blocks, entries, block)
    scores = jnp.where(competes, scores, -jnp.inf)
    kept = None
    if top_blocks is not None:
        mask = candidate_mask(scores, visible, block=block, top_blocks=top_blocks)[..., ::block]
        kept = _pad(select_indices(jnp.where(mask, 0.0, -jnp.inf), top_blocks), top_blocks)
    return Selected(indices=_pad(select_indices(scores, k), k), blocks=kept)


def _members(blocks: Int32[Array, "B S C"], entries: int, block: int) -> Bool[Array, "B S L"]:
    """Mask of the entries in these blocks."""
    count = -(-entries // block)
    b, s, _ = blocks.shape
    place = jnp.where(blocks >= 0, blocks, count)  # past the end: dropped
    row = jnp.arange(b)[:, None, None], jnp.arange(s)[:, None]
    members = jnp.zeros((b, s, count), bool).at[*row, place].set(True, mode="drop")
    return jnp.repeat(members, block, axis=-1)[..., :entries]


def _pad(numbers: Int32[Array, "B S n"], size: int) -> Int32[Array, "B S size"]:
    """-1 behind, up to `size`."""
    return jnp.pad(numbers, [(0, 0), (0, 0), (0, size - numbers.shape[-1])], constant_values=-1)
