"""Looked-up rows of an Engram table, dequantised. One kernel for Hopper and Blackwell, no tensor core.

    block = (row of T, a few columns)     id ── 256 B of codes + 8 B of scales ──> registers ──> 256 bfloat16

A row of 264 B is no multiple of the 16 B that the copy engine wants between rows, so threads load it: 2 codes each,
16 threads to a scale, the rows of all columns of a block in flight at once. HBM reads sectors of 32 B: a row touches
9 or 10 of them, 297 B on average, 1.13 times its bytes. Floor: 264 B read and 512 B written per looked-up row; bytes
bound it. A table in host memory is read over the bus, once per row.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32, UInt8

from widemesh.pallas_kernels.engram_gate.rows import row_dim
from widemesh.pallas_kernels.formats import E4M3, FP8_GROUP, decode_e8m0
from widemesh.pallas_kernels.gpu import is_interpreted, kernel_options, swap
from widemesh.pallas_kernels.gpu.store import store

_SPAN = 256  # values that the 128 threads decode at once: 8 groups
_COLUMNS = 8  # at most, of a block


def engram_rows(
    table: UInt8[Array, "rows row_bytes"], ids: Int32[Array, "T columns"], *, dtype: DTypeLike
) -> Float[Array, "T columns*dim"]:
    """See `op.engram_rows`. Raises ValueError for rows whose values are no multiple of 256."""
    (num_rows, row_bytes), (t, columns) = table.shape, ids.shape
    dim = row_dim(row_bytes)
    if dim % _SPAN:
        near = max(round(dim / _SPAN), 1) * _SPAN
        raise ValueError(
            f"rows of {dim} values must be a multiple of {_SPAN} for the GPU kernel; the nearest is {near}"
        )
    if ids.size == 0:
        return jnp.zeros((t, columns * dim), dtype)
    per_block = max(n for n in range(1, min(columns, _COLUMNS) + 1) if columns % n == 0)
    spans, groups = dim // _SPAN, _SPAN // FP8_GROUP
    # 4 warps by 2 groups, 16 threads to a group, 2 values to a thread.
    layout = plgpu.Layout.TILED(
        plgpu.Tiling(((groups, FP8_GROUP), (2, FP8_GROUP), (2,))), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1
    )

    def engram_gate_rows(table_ref, ids_ref, out_ref):  # type: ignore[no-untyped-def]
        row, block = lax.axis_index("row"), lax.axis_index("block")
        loaded = []
        for n in range(per_block):
            source = jnp.clip(ids_ref[row, block * per_block + n], 0, num_rows - 1)
            for i in range(spans):
                codes = _grouped(table_ref.at[source, pl.ds(i * _SPAN, _SPAN)], groups, layout)
                scales = table_ref.at[source, pl.ds(dim + i * groups, groups)]
                loaded.append((n, i, codes, plgpu.load(scales, layout=layout.reduce(1), optimized=False)))
        for n, i, codes, scales in loaded:  # after all loads, which then wait together
            values = E4M3.decode(codes)
            scale = plgpu.layout_cast(lax.broadcast_in_dim(decode_e8m0(scales), values.shape, (0,)), layout)
            out = out_ref.at[row, block * per_block + n, i]
            store(out, (values * scale).astype(dtype), optimized=False)

    kernel = plgpu.kernel(
        engram_gate_rows,
        out_type=jax.ShapeDtypeStruct((t, columns, spans, groups, FP8_GROUP), dtype),
        grid=(t, columns // per_block),
        grid_names=("row", "block"),
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        **kernel_options(),
    )
    return kernel(table, ids).reshape(t, columns * dim)


def _grouped(codes: Any, groups: int, layout: Any) -> UInt8[Array, "groups size"]:
    """Codes [groups * size] in memory as an array with a row per group."""
    if is_interpreted():
        return plgpu.load(codes).reshape(groups, FP8_GROUP)
    return plgpu.load(codes.reshape(groups, FP8_GROUP), layout=layout, optimized=False)


swap(
    kernel="engram_gate_rows",
    missing="reshape of a reference",
    staged="reshape of the array loaded from it",
)
