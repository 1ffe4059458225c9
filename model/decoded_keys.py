"""Keys as f32 values: caches are decoded, and attention reads entries by mask or gathered by index (see `keys.Keys`).

What a CPU runs. B requests, S rows, H head dim, J index dim, I index heads, L entries that a table has room for.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

from widemesh.model import cache
from widemesh.model.params import value
from widemesh.model.rope import rotate
from widemesh.model.shared import Shared
from widemesh.model.step import StepContext
from widemesh.pallas_kernels.indexer_scores import indexer_scores
from widemesh.pallas_kernels.paged_cache import fake_quant, gather_rows, read_keys, read_rows, write_source
from widemesh.pallas_kernels.select_topk import candidate_mask, select_indices, select_mask_causal
from widemesh.pallas_kernels.sparse_attention import (
    SelectedIndices,
    SelectedMask,
    Selection,
    empty_selection,
    sparse_attention,
    visible_entries,
)

if TYPE_CHECKING:
    from widemesh.model.attention import Attention
    from widemesh.model.indexer import Indexer


def write_window(
    attention: Attention, kv: Float[Array, "B S H"], ring: UInt8[Array, "B ring row_bytes"], shared: Shared,
    step: StepContext,
) -> tuple[Float[Array, "B WS H"], UInt8[Array, "B ring row_bytes"]]:  # fmt: skip
    """Window rows are those at positions start - (window - 1) .. start + S - 1, this step's as they are stored."""
    rows, layout = step.rows, shared.layout.window
    before = cache.window_before(ring, rows.start, rows.first, attention.config.sliding_window, layout)
    near = jnp.concatenate([before, fake_quant(kv, layout)], axis=1)
    return near, cache.write_window(ring, kv, rows.start, rows.length, layout)


def extend_source(
    attention: Attention, x: Float[Array, "B S D"], ring: Float[Array, "B open 2 H"], shared: Shared,
    step: StepContext,
) -> tuple[Shared, Float[Array, "B open 2 H"]]:  # fmt: skip
    """An entry's position is that of its group's first token; the index key is taken before the entry's rotation."""
    num, rows, layout, ratio = step.numerics, step.rows, shared.layout.sources[attention.source], attention.role.ratio
    new, ring = attention.compressor(x, ring, step)
    positions, rope = new.index * ratio, attention.rope(step)
    entry = num.round(rotate(new.latent, positions, rope))
    key = num.round(rotate(attention.indexer.keys(new.latent, step), positions, rope))
    step.record("compressed_kv", fake_quant(entry, layout.row))
    step.record("index_keys", fake_quant(key, layout.key))
    is_new = new.valid & (positions >= rows.write_from[:, None])
    pages = write_source(shared.pages, shared.table, new.index, is_new, entry, key, layout)
    return view(attention, dataclasses.replace(shared, pages=pages), step), ring


def view(attention: Attention, shared: Shared, step: StepContext) -> Shared:
    """Decode the index keys, and the entries too for attention by mask."""
    layout, ratio = shared.layout.sources[attention.source], attention.role.ratio
    tokens = step.rows.start + step.rows.length
    index_keys = cache.written_entries(read_keys(shared.pages, shared.table, layout), tokens, ratio)
    entries, candidates = shared.entries, shared.candidates
    if step.settings.selection == "mask":
        entries = cache.written_entries(read_rows(shared.pages, shared.table, layout), tokens, ratio)
    if candidates.shape[-1] != index_keys.shape[1]:  # of another ratio, hence before the candidate source
        candidates = jnp.ones((*candidates.shape[:2], index_keys.shape[1]), bool)
    return dataclasses.replace(shared, entries=entries, index_keys=index_keys, candidates=candidates)


def select(
    indexer: Indexer, queries: Float[Array, "B S I J"], weights: Float[Array, "B S I"], shared: Shared,
    step: StepContext,
) -> Shared:  # fmt: skip
    """Score every entry, narrow to the candidates, take the best."""
    config, role, num = indexer.config, indexer.role, step.numerics
    scores = indexer_scores(
        queries, weights, shared.index_keys, ratio=role.ratio, start_bound=step.settings.start_bound,
        bf16_operands=num.cache_quant, bf16_rounding=num.bf16_rounding,
    )  # fmt: skip
    visible = visible_entries(step.rows.start, queries.shape[1], scores.shape[-1], role.ratio)
    scores = jnp.where(visible, scores, -jnp.inf)
    step.record("indexer_scores", scores)
    candidates = shared.candidates
    if role.writes_candidates:
        count = (step.rows.positions + 1) // role.ratio
        candidates = visible & candidate_mask(
            scores, count, block=config.candidate_block_size, top_blocks=config.candidate_topk_blocks
        )
        step.record("candidates", candidates)
    if role.reads_candidates:
        scores = jnp.where(candidates, scores, -jnp.inf)
    return dataclasses.replace(shared, selection=_best(indexer, scores, step), candidates=candidates)


def _best(indexer: Indexer, scores: Float[Array, "B S L"], step: StepContext) -> Selection:
    """The top entries in the form this program uses."""
    if step.settings.selection == "mask":
        mask = select_mask_causal(scores, indexer.config.index_topk, ratio=indexer.role.ratio,
                                  start_bound=step.settings.start_bound)  # fmt: skip
        step.record("topk_mask", mask)
        return SelectedMask(mask)
    indices = select_indices(scores, indexer.config.index_topk)
    step.record("topk_indices", indices)
    return SelectedIndices(indices)


def attend(
    attention: Attention, q: Float[Array, "B S N H"], near: Float[Array, "B WS H"], shared: Shared, step: StepContext
) -> Float[Array, "B S N H"]:
    """Attention over decoded rows."""
    return sparse_attention(
        q, near, step.rows.start, step.rows.first, *_compressed(attention, shared, step), value(attention.attn_sink),
        window=attention.config.sliding_window, ratio=attention.role.ratio, start_bound=step.settings.start_bound,
        bf16_rounding=step.numerics.bf16_rounding,
    )  # fmt: skip


def _compressed(attention: Attention, shared: Shared, step: StepContext) -> tuple[Float[Array, "B ..."], Selection]:
    """The compressed entries that a layer attends to, in the form of its selection, and the selection."""
    b, s = step.rows.tokens.shape
    if not attention.role.ratio:
        nothing = empty_selection(step.settings.selection, b, s)
        shape = (b, 0) if isinstance(nothing, SelectedMask) else (b, s, 0)
        return jnp.zeros((*shape, attention.config.head_dim)), nothing
    if isinstance(shared.selection, SelectedMask):
        return shared.entries, shared.selection
    layout = shared.layout.sources[attention.source]
    return gather_rows(shared.pages, shared.table, shared.selection.indices, layout), shared.selection
