"""Looked-up rows of an Engram table (the reference). Format: docs/model.md, "Quantised caches"."""

from __future__ import annotations

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32, UInt8

from widemesh.pallas_kernels.formats import FP8_GROUP, decode_fp8_rows


def row_dim(row_bytes: int) -> int:
    """Values of a row of this many bytes: E4M3 codes, then a power-of-two scale per 32 of them."""
    return row_bytes // (FP8_GROUP + 1) * FP8_GROUP


def engram_rows(
    table: UInt8[Array, "rows row_bytes"], ids: Int32[Array, "T columns"], *, dtype: DTypeLike
) -> Float[Array, "T columns*dim"]:
    """See `op.engram_rows`."""
    dim = row_dim(table.shape[1])
    record = table[jnp.clip(ids, 0, table.shape[0] - 1)]
    values = decode_fp8_rows(record[..., :dim], record[..., dim:])
    return jnp.asarray(values).reshape(ids.shape[0], ids.shape[1] * dim).astype(dtype)
