"""The packed grouped MoE at the released sizes, for compiling ahead of time."""

from __future__ import annotations

import functools

from widemesh.pallas_kernels.gpu import TARGETS
from widemesh.pallas_kernels.gpu.aot_case import TCGEN05, WGMMA, AotCase
from widemesh.pallas_kernels.grouped_moe.expert import ExpertMath
from widemesh.pallas_kernels.grouped_moe.packed_op import grouped_moe_packed
from widemesh.pallas_kernels.grouped_moe.shapes import DECODE, PREFILL, VERIFY, MoeShape
from widemesh.pallas_kernels.grouped_moe.tiles import choose_tiles

_MATH = ExpertMath(limit=10.0, act_quant=True, bf16_rounding=True)


def _case(shape: MoeShape) -> AotCase:
    pairs = shape.rows * shape.per_token
    tiles = choose_tiles(TARGETS["H200"], rows=shape.rows, pairs=pairs, held=shape.held)
    return AotCase(
        name=shape.name,
        op="grouped_moe",
        shape=f"T {shape.rows}, K {shape.per_token}, X {shape.held}, D {shape.hidden}, F {shape.width}",
        function=functools.partial(grouped_moe_packed, math=_MATH, implementation="mosaic"),
        args=shape.arguments(),
        floor_bytes=shape.floor_bytes,
        floor_flops=shape.floor_flops,
        moved_bytes=shape.moved_bytes(tiles.into.rows),
        mma={"sm_90a": WGMMA, "sm_100a": TCGEN05},
    )


KERNELS: tuple[AotCase, ...] = tuple(_case(shape) for shape in (DECODE, VERIFY, PREFILL))
