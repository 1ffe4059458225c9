"""Compressed rows and index keys in pages: the specification, and what a CPU runs.

B requests, each with a table of P page ids; page p of a request holds its tokens p * page_size and on. Row j of a
source (`ratio` tokens each) lies in page j // rows at place j % rows. L = P * rows is what a request has room for.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32, UInt8

from widemesh.pallas_kernels.layout import SourceLayout
from widemesh.pallas_kernels.paged_cache.records import decode_parts, decode_vectors, encode_vectors


def read_rows(
    pages: UInt8[Array, "pages page_bytes"], table: Int32[Array, "B P"], layout: SourceLayout
) -> Float[Array, "B L H"]:
    """Every compressed row of the requests, whether written or not."""
    block = _windows(pages, table, layout.row_offset, layout.rows * layout.row.num_bytes)
    return decode_vectors(block.reshape(table.shape[0], -1, layout.row.num_bytes), layout.row)


def read_keys(
    pages: UInt8[Array, "pages page_bytes"], table: Int32[Array, "B P"], layout: SourceLayout
) -> Float[Array, "B L J"]:
    """Every index key of the requests, whether written or not."""
    key, requests = layout.key, table.shape[0]
    values = _windows(pages, table, layout.key_offset, layout.rows * key.value_bytes)
    scales = _windows(pages, table, layout.key_scale_offset, layout.rows * key.scale_bytes)
    shape = (requests, table.shape[1] * layout.rows)
    return decode_parts(values.reshape(*shape, key.value_bytes), scales.reshape(*shape, key.scale_bytes), key)


def gather_rows(
    pages: UInt8[Array, "pages page_bytes"],
    table: Int32[Array, "B P"],
    index: Int32[Array, "B S k"],
    layout: SourceLayout,
) -> Float[Array, "B S k H"]:
    """The compressed rows with these numbers; zeros for -1.

    Zeros rather than what lies there: attention gives unseen rows weight 0, which a NaN would survive.
    """
    exists = index >= 0
    safe = jnp.where(exists, index, 0)
    requests = jnp.arange(table.shape[0])[:, None, None]
    page = table[requests, safe // layout.rows]
    record = _windows(pages, page, layout.row_offset + safe % layout.rows * layout.row.num_bytes,
                      layout.row.num_bytes)  # fmt: skip
    return jnp.where(exists[..., None], decode_vectors(record, layout.row), 0.0)


def write_source(
    pages: UInt8[Array, "pages page_bytes"],
    table: Int32[Array, "B P"],
    index: Int32[Array, "B M"],
    valid: Bool[Array, "B M"],
    rows: Float[Array, "B M H"],
    keys: Float[Array, "B M J"],
    layout: SourceLayout,
) -> UInt8[Array, "pages page_bytes"]:
    """Encode compressed rows and index keys and store them under their numbers; invalid ones are dropped."""
    requests = jnp.arange(table.shape[0])[:, None]
    inside = valid & (index >= 0) & (index < table.shape[1] * layout.rows)
    safe = jnp.where(inside, index, 0)
    page = jnp.where(inside, table[requests, safe // layout.rows], pages.shape[0])  # past the end = dropped
    place = safe % layout.rows
    key = encode_vectors(keys, layout.key)
    size = layout.key.value_bytes
    pages = _store(pages, page, layout.row_offset + place * layout.row.num_bytes, encode_vectors(rows, layout.row))
    pages = _store(pages, page, layout.key_offset + place * size, key[..., :size])
    if layout.key.scale_bytes:
        pages = _store(pages, page, layout.key_scale_offset + place * layout.key.scale_bytes, key[..., size:])
    return pages


def _windows(
    pages: UInt8[Array, "pages page_bytes"], page: Int32[Array, "*G"], offset: Int32[Array, "*G"] | int, size: int
) -> UInt8[Array, "*G size"]:
    """`size` bytes from `offset` on of each page."""
    start = jnp.stack([page, jnp.broadcast_to(jnp.asarray(offset, jnp.int32), page.shape)], axis=-1)
    numbers = lax.GatherDimensionNumbers(
        offset_dims=(page.ndim,), collapsed_slice_dims=(0,), start_index_map=(0, 1)
    )
    return lax.gather(pages, start, numbers, (1, size), mode=lax.GatherScatterMode.CLIP)


def _store(
    pages: UInt8[Array, "pages page_bytes"],
    page: Int32[Array, "B M"],
    offset: Int32[Array, "B M"],
    record: UInt8[Array, "B M size"],
) -> UInt8[Array, "pages page_bytes"]:
    start = jnp.stack([page, offset], axis=-1)
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=(2,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0, 1)
    )
    return lax.scatter(pages, start, record, numbers, unique_indices=False, mode=lax.GatherScatterMode.FILL_OR_DROP)
