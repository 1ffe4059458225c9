"""The Engram kernels at the released shapes, to be compiled ahead of time."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from widemesh.pallas_kernels.engram_gate.op import engram_apply, engram_rows
from widemesh.pallas_kernels.engram_gate.shapes import RELEASED, EngramShape
from widemesh.pallas_kernels.gpu.aot_case import AotCase

_SECTOR = 32  # bytes that HBM reads at once


def _array(*sizes: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def _rows(shape: EngramShape) -> AotCase:
    looked_up, row_bytes = shape.rows * shape.columns, shape.dim + shape.dim // 32
    out = 2 * looked_up * shape.dim
    # A row begins at any multiple of 8 bytes of a sector; it touches (row_bytes - 8) / 32 + 1 sectors on average.
    sectors = (row_bytes - 8) / _SECTOR + 1
    return AotCase(
        name=f"rows-{shape.name}",
        op="engram_gate",
        shape=f"T={shape.rows} columns={shape.columns} dim={shape.dim}",
        function=functools.partial(engram_rows, implementation="mosaic"),
        args=(_array(shape.table_rows, row_bytes, dtype=jnp.uint8),
              _array(shape.rows, shape.columns, dtype=jnp.int32)),
        floor_bytes=looked_up * row_bytes + out,
        floor_flops=looked_up * shape.dim,
        moved_bytes=looked_up * sectors * _SECTOR + out,
    )  # fmt: skip


def _apply(shape: EngramShape) -> AotCase:
    t, c, d = shape.rows, shape.streams, shape.hidden
    floor = 2 * t * (3 * c + 1) * d + 2 * 4 * c * d
    return AotCase(
        name=f"apply-{shape.name}",
        op="engram_gate",
        shape=f"T={t} C={c} D={d}",
        function=functools.partial(engram_apply, eps=1e-20, implementation="mosaic"),
        args=(_array(t, c, d, dtype=jnp.bfloat16), _array(t, (c + 1) * d, dtype=jnp.bfloat16), _array(c, d),
              _array(c, d)),
        floor_bytes=floor,
        floor_flops=9.0 * t * c * d,
        moved_bytes=floor + 2 * 4 * c * d,  # the product of the weights is written and read once
    )  # fmt: skip


KERNELS: tuple[AotCase, ...] = (*map(_rows, RELEASED), *map(_apply, RELEASED))
