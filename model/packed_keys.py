"""Keys as the bytes that the caches hold: nothing is decoded but inside the ops (see `keys.Keys`).

What a GPU runs. Candidates travel as block numbers [B, S, blocks], never as masks over all entries. B requests, S rows,
M window rows at hand.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, UInt8

from widemesh.model import packed_ops
from widemesh.model.params import value
from widemesh.model.shared import Shared
from widemesh.model.step import StepContext
from widemesh.pallas_kernels.compress.ring import read_ring, write_ring
from widemesh.pallas_kernels.paged_cache import encode_vectors
from widemesh.pallas_kernels.sparse_attention import SelectedIndices

if TYPE_CHECKING:
    from widemesh.model.attention import Attention
    from widemesh.model.indexer import Indexer


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NearRows:
    """Window rows of a step: the one of position p lies at (p - origin) mod M. Later rows of a step read them too."""

    rows: UInt8[Array, "B M row_bytes"]
    origin: Int32[Array, "B"]


def write_window(
    attention: Attention, kv: Float[Array, "B S H"], ring: UInt8[Array, "B ring row_bytes"], shared: Shared,
    step: StepContext,
) -> tuple[NearRows, UInt8[Array, "B ring row_bytes"]]:  # fmt: skip
    """The ring itself where it holds all that the rows see together, as in decode; else the rows before and these."""
    rows, window = step.rows, attention.config.sliding_window
    records = encode_vectors(kv.astype(jnp.float32), shared.layout.window)
    written = write_ring(ring, records, rows.start, rows.length)
    if window - 1 + kv.shape[1] <= ring.shape[1]:
        return NearRows(written, jnp.zeros_like(rows.start)), written
    origin = rows.start - (window - 1)
    before = read_ring(ring, origin[:, None] + jnp.arange(window - 1, dtype=jnp.int32))
    return NearRows(jnp.concatenate([before, records], axis=1), origin), written


def extend_source(
    attention: Attention, x: Float[Array, "B S D"], ring: Float[Array, "B open 2 H"], shared: Shared,
    step: StepContext,
) -> tuple[Shared, Float[Array, "B open 2 H"]]:  # fmt: skip
    """Pooling, norms, rotation, both encodings and the way into the pages are one op behind the projections."""
    rows, rope, compressor, indexer = step.rows, attention.rope(step), attention.compressor, attention.indexer
    values, gates = compressor.project(x, step.numerics)
    pages, ring = packed_ops.compress_and_store(
        values.astype(jnp.float32), gates, ring, value(compressor.norm.weight), value(indexer.wk.weight),
        value(indexer.k_norm.weight), rope.cos, rope.sin, rows.start, rows.length, rows.write_from, shared.pages,
        shared.table, source=shared.layout.sources[attention.source], eps=attention.config.rms_norm_eps,
        bf16_rounding=step.numerics.bf16_rounding, implementation=step.settings.kernels,
    )  # fmt: skip
    return dataclasses.replace(shared, pages=pages), ring


def view(attention: Attention, shared: Shared, step: StepContext) -> Shared:
    """Nothing to do: the ops read the pages."""
    return shared


def select(
    indexer: Indexer, queries: Float[Array, "B S I J"], weights: Float[Array, "B S I"], shared: Shared,
    step: StepContext,
) -> Shared:  # fmt: skip
    """Scores and choice are one op. Padding rows see no entry: what lies there may be another request's."""
    config, role = indexer.config, indexer.role
    chosen = packed_ops.select_entries(
        queries, weights.astype(jnp.float32), shared.pages, shared.table,
        jnp.where(step.rows.valid, (step.rows.positions + 1) // role.ratio, 0),
        shared.candidates if role.reads_candidates else None,
        source=shared.layout.sources[indexer.source], k=config.index_topk, block=config.candidate_block_size,
        top_blocks=config.candidate_topk_blocks if role.writes_candidates else None,
        implementation=step.settings.kernels,
    )  # fmt: skip
    step.record("topk_indices", chosen.indices)
    candidates = shared.candidates if chosen.blocks is None else chosen.blocks
    return dataclasses.replace(shared, selection=SelectedIndices(chosen.indices), candidates=candidates)


def attend(
    attention: Attention, q: Float[Array, "B S N H"], near: NearRows, shared: Shared, step: StepContext
) -> Float[Array, "B S N H"]:
    """Attention over packed rows."""
    b, s = step.rows.tokens.shape
    source = shared.layout.sources[attention.source] if attention.role.ratio else None
    assert isinstance(shared.selection, SelectedIndices)
    indices = shared.selection.indices if source else jnp.zeros((b, s, 0), jnp.int32)
    return packed_ops.attend_packed(
        q, near.rows, near.origin, step.rows.start, step.rows.first, shared.pages, shared.table, indices,
        value(attention.attn_sink), source=source, window_layout=shared.layout.window,
        window=attention.config.sliding_window, implementation=step.settings.kernels,
    )  # fmt: skip
