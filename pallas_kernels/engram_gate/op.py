"""Dispatch of the Engram lookup and of its gate and update."""

from __future__ import annotations

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32, UInt8

from widemesh.pallas_kernels.engram_gate import rows
from widemesh.pallas_kernels.engram_gate.reference import engram_gate, engram_update
from widemesh.pallas_kernels.formats import FP8_GROUP
from widemesh.pallas_kernels.gpu import Implementation, choose


def engram_rows(
    table: UInt8[Array, "rows row_bytes"],
    ids: Int32[Array, "T columns"],
    *,
    dtype: DTypeLike = jnp.bfloat16,
    implementation: Implementation | None = None,
) -> Float[Array, "T columns*dim"]:
    """The rows `ids` of the table, dequantised and side by side; ids outside the table read its nearest row.

    A row of the table is `dim` E4M3 codes and then dim / 32 power-of-two scales (264 B for 256 values); its values
    are exact in bfloat16. Raises ValueError for rows of another form.
    """
    if table.shape[1] % (FP8_GROUP + 1) or not table.shape[1]:
        near = max(round(table.shape[1] / (FP8_GROUP + 1)), 1) * (FP8_GROUP + 1)
        raise ValueError(f"table has rows of {table.shape[1]} bytes; they must be a multiple of 33 (32 codes and their "
                         f"scale), such as {near}")  # fmt: skip
    if choose("engram_rows", implementation) == "mosaic":
        from widemesh.pallas_kernels.engram_gate import mosaic

        return mosaic.engram_rows(table, ids, dtype=dtype)
    return rows.engram_rows(table, ids, dtype=dtype)


def engram_apply(
    streams: Float[Array, "T C D"],
    key_value: Float[Array, "T (C+1)*D"],
    q_weight: Float[Array, "C D"],
    k_weight: Float[Array, "C D"],
    *,
    eps: float,
    implementation: Implementation | None = None,
) -> Float[Array, "T C D"]:
    """Streams with the gated value added (formula: `reference`), in their own dtype.

    A row of `key_value` holds the keys of the C streams and then the one value. Raises ValueError when the shapes do
    not fit each other.
    """
    t, c, d = streams.shape
    for name, array, shape in (("key_value", key_value, (t, (c + 1) * d)), ("q_weight", q_weight, (c, d)),
                               ("k_weight", k_weight, (c, d))):  # fmt: skip
        if array.shape != shape:
            raise ValueError(f"{name} has shape {array.shape}; streams of shape {streams.shape} need {shape}")
    if choose("engram_apply", implementation) == "mosaic":
        from widemesh.pallas_kernels.engram_gate import mosaic

        return mosaic.engram_apply(streams, key_value, q_weight, k_weight, eps=eps)
    wide = key_value.astype(jnp.float32)
    key, value = wide[:, : c * d].reshape(t, c, d), wide[:, c * d :]
    gate = engram_gate(streams, key, q_weight * k_weight, eps=eps)
    return engram_update(streams, gate, value).astype(streams.dtype)
