"""The compression kernel at the released shapes, to be compiled ahead of time."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from widemesh.pallas_kernels.compress.op import compress_and_store
from widemesh.pallas_kernels.compress.shapes import RELEASED, CompressShape
from widemesh.pallas_kernels.gpu.aot_case import AotCase
from widemesh.pallas_kernels.layout import PageLayout, SourceLayout

_RATIOS = (2, 2, 2, 1)  # of the sources whose parts a page holds


def _case(shape: CompressShape) -> AotCase:
    layout = PageLayout.build(
        page_size=shape.page_size, ratios=_RATIOS, head_dim=shape.head_dim, index_dim=shape.index_dim, record="packed"
    )
    source, tokens = layout.sources[_RATIOS.index(shape.ratio)], shape.requests * shape.rows
    per_token = 4 * shape.head_dim * (2 if shape.ratio > 1 else 1)
    entry_bytes = source.row.num_bytes + source.key.num_bytes
    ring_rows = shape.requests * min(shape.rows, shape.open_rows)
    floor = tokens * per_token + tokens // shape.ratio * entry_bytes + ring_rows * per_token
    from_ring = shape.requests * (shape.ratio - 1) * per_token
    from_key = 2 * shape.index_dim * shape.head_dim
    return AotCase(
        name=shape.name,
        op="compress",
        shape=f"B={shape.requests} S={shape.rows} ratio={shape.ratio} H={shape.head_dim}",
        function=_call(source, is_gated=shape.ratio > 1),
        args=_arguments(shape, layout.page_bytes),
        floor_bytes=floor,
        floor_flops=2.0 * tokens / shape.ratio * shape.head_dim * shape.index_dim,
        moved_bytes=floor + from_ring + from_key,
    )


def _call(source: SourceLayout, *, is_gated: bool) -> Callable[..., Any]:
    def call(pages: Any, ring: Any, values: Any, gates: Any, *rest: Any) -> Any:
        *middle, table = rest
        arguments = (values, gates if is_gated else None, ring, *middle, pages, table)
        return functools.partial(
            compress_and_store, source=source, eps=1e-20, bf16_rounding=True, implementation="mosaic"
        )(*arguments)

    return jax.jit(call, donate_argnums=(0, 1) if is_gated else 0)


def _arguments(shape: CompressShape, page_bytes: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    def array(*sizes: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype)

    rows = array(shape.requests, shape.rows, shape.head_dim)
    numbers = array(shape.requests, dtype=jnp.int32)
    turn = array(shape.positions, shape.pairs)
    return (
        array(shape.pages, page_bytes, dtype=jnp.uint8),
        array(shape.requests, shape.open_rows, 2, shape.head_dim),
        rows, rows, array(shape.head_dim),
        array(shape.index_dim, shape.head_dim, dtype=jnp.bfloat16), array(shape.index_dim),
        turn, turn, numbers, numbers, numbers,
        array(shape.requests, shape.table_pages, dtype=jnp.int32),
    )  # fmt: skip


KERNELS: tuple[AotCase, ...] = tuple(_case(shape) for shape in RELEASED)
