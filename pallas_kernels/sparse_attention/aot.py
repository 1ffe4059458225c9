"""Cases to compile ahead of time, with the bytes that they move by arithmetic."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from widemesh.pallas_kernels.gpu import TARGETS
from widemesh.pallas_kernels.gpu.aot_case import TCGEN05, WGMMA, AotCase
from widemesh.pallas_kernels.sparse_attention.packed_op import attend_packed
from widemesh.pallas_kernels.sparse_attention.places import BLOCK, window_blocks
from widemesh.pallas_kernels.sparse_attention.producer import HEADS
from widemesh.pallas_kernels.sparse_attention.shapes import DECODE, PREFILL, VERIFY, AttendShape
from widemesh.pallas_kernels.sparse_attention.tiles import choose_tiles


def _arguments(shape: AttendShape) -> tuple[jax.ShapeDtypeStruct, ...]:
    b, layout = shape.requests, shape.layout
    per_request = jax.ShapeDtypeStruct((b,), jnp.int32)
    return (
        jax.ShapeDtypeStruct((b, shape.rows, shape.heads, shape.dim), jnp.bfloat16),
        jax.ShapeDtypeStruct((b, shape.kept, layout.window.num_bytes), jnp.uint8),
        per_request,
        per_request,
        per_request,
        jax.ShapeDtypeStruct((b * shape.pages_per_request, layout.page_bytes), jnp.uint8),
        jax.ShapeDtypeStruct((b, shape.pages_per_request), jnp.int32),
        jax.ShapeDtypeStruct((b, shape.rows, shape.k), jnp.int32),
        jax.ShapeDtypeStruct((shape.heads,), jnp.float32),
    )


def floor_bytes(shape: AttendShape) -> int:
    """The keys of every row once (rows select different ones), q in and the result out in bfloat16, indices."""
    layout = shape.layout
    keys = shape.window * layout.window.num_bytes + shape.k * shape.source.row.num_bytes
    return shape.requests * shape.rows * (keys + 4 * shape.heads * shape.dim + 4 * shape.k)


def floor_flops(shape: AttendShape) -> int:
    """Two products with every key."""
    return 4 * shape.requests * shape.rows * shape.heads * shape.dim * (shape.window + shape.k)


def moved_bytes(shape: AttendShape) -> int:
    """What the kernel and what surrounds it move on an H200, if nothing stays in the second-level cache.

    Window rows are fetched in two pieces that overlap by 16 bytes; q is made float16 first (written and read); lists
    are written and read; parts of splits are written and read as float32.
    """
    rows = shape.requests * shape.rows
    blocks = window_blocks(shape.window) + -(-shape.k // BLOCK)
    splits = choose_tiles(TARGETS["H200"], rows=rows * shape.heads // HEADS, blocks=blocks).splits
    values = shape.heads * shape.dim
    extra = 16 * shape.window + 2 * 2 * values + 2 * 4 * blocks * BLOCK
    parts = 2 * 4 * splits * (values + 2 * shape.heads) if splits > 1 else 0
    return floor_bytes(shape) + rows * (extra + parts)


def _case(name: str, shape: AttendShape) -> AotCase:
    function = functools.partial(
        attend_packed,
        source=shape.source,
        window_layout=shape.layout.window,
        window=shape.window,
        implementation="mosaic",
    )
    return AotCase(
        name=name,
        op="sparse_attention",
        shape=shape.name,
        function=function,
        args=_arguments(shape),
        floor_bytes=floor_bytes(shape),
        floor_flops=floor_flops(shape),
        moved_bytes=moved_bytes(shape),
        mma={"sm_90a": WGMMA, "sm_100a": TCGEN05},
    )


KERNELS = (_case("decode", DECODE), _case("verify", VERIFY), _case("prefill", PREFILL))
