"""Attention over packed window rows and packed entries: the specification of `attend_packed`.

Everything is decoded to f32 first and handed to the exact attention. What a row does not see is decoded as zeros, so
that bytes nobody has written (a NaN among them) do no harm.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, UInt8

from widemesh.pallas_kernels.layout import SourceLayout, VectorLayout
from widemesh.pallas_kernels.paged_cache import decode_vectors, gather_rows
from widemesh.pallas_kernels.sparse_attention.reference import attend_gathered


def attend_packed_reference(
    q: Float[Array, "B S N H"],
    window_rows: UInt8[Array, "B M row_bytes"],
    origin: Int32[Array, "B"],
    start: Int32[Array, "B"],
    first: Int32[Array, "B"],
    pages: UInt8[Array, "pages page_bytes"],
    table: Int32[Array, "B P"],
    indices: Int32[Array, "B S k"],
    sink: Float[Array, "N"],
    *,
    source: SourceLayout | None,
    window_layout: VectorLayout,
    window: int,
) -> Float[Array, "B S N H"]:
    """See `attend_packed`."""
    near = _near(window_rows, origin, start, first, q.shape[1], window_layout, window)
    if source is None or indices.shape[2] == 0:
        entries = jnp.zeros((*indices.shape[:2], 0, q.shape[3]), jnp.float32)
        exists = jnp.zeros((*indices.shape[:2], 0), bool)
    else:
        entries, exists = gather_rows(pages, table, indices, source), indices >= 0
    out = attend_gathered(q.astype(jnp.float32), near, start, first, entries, exists, sink, window=window)
    return out.astype(q.dtype)


def _near(
    window_rows: UInt8[Array, "B M row_bytes"],
    origin: Int32[Array, "B"],
    start: Int32[Array, "B"],
    first: Int32[Array, "B"],
    rows: int,
    layout: VectorLayout,
    window: int,
) -> Float[Array, "B WS H"]:
    """The window rows at positions start - (window - 1) .. start + rows - 1, zeros before `first`."""
    position = start[:, None] - (window - 1) + jnp.arange(rows + window - 1)
    place = jnp.mod(position - origin[:, None], window_rows.shape[1])
    records = jnp.take_along_axis(window_rows, place[..., None], axis=1)
    return jnp.where((position >= first[:, None])[..., None], decode_vectors(records, layout), 0.0)
