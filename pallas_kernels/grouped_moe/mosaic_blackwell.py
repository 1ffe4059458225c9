"""Grouped products with FP4 matrices on Blackwell: y = W x with W decoded into shared memory, sums in tensor memory.

    block b = up to N rows of one expert          tile t = 128 output features

    codes (u8) --warpgroups 0, 1: decode 64 features each--> W [128, step] bf16, shared memory, `decoded` buffers
    rows [N, step] bf16, shared memory --------------------> tcgen05 (issued by warpgroup 3) --> sums [128, N] f32, TMEM
    copies of codes, rows and scales: warpgroup 2, `stages` stages ahead

The matrices are the M side of the instruction (128 features), so a block of 16 rows costs 16 and not 128. Columns keep
their order. When a tile is done, warpgroups 0 and 1 read half the rows' sums each and finish them as on Hopper: a warp
reads 32 consecutive features, which is one FP8 group. The down product takes its features by parity instead, because a
row of its scales, 72 bytes, cannot be copied alone; `partial` is then apart by parity as on Hopper.

The block-scaled form (FP4 cast to FP8, scales multiplied by the tensor core) would halve the decoding and the shared
memory traffic. It is not used: the interpreter cannot run it, so no check here would see a wrong scale layout.

Floor: as on Hopper; bound by bytes up to about 80 pairs an expert (2250e12 / 7.7e12 FLOP a byte * 17/64 B a weight).
"""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float

from widemesh.pallas_kernels.gpu import is_interpreted, swap
from widemesh.pallas_kernels.gpu.store import store
from widemesh.pallas_kernels.grouped_moe import dequantise
from widemesh.pallas_kernels.grouped_moe.expert import ExpertMath
from widemesh.pallas_kernels.grouped_moe.grouping import Grouping
from widemesh.pallas_kernels.grouped_moe.packed import PackedMatrix
from widemesh.pallas_kernels.grouped_moe.quantise_tile import quantise_with, warp_largest
from widemesh.pallas_kernels.grouped_moe.staging import SIDE, Staging, tiled
from widemesh.pallas_kernels.grouped_moe.tiles import FEATURES, Tile

PARTS = 1  # the rows' columns in order
HIDDEN_UNIT = 512  # columns whose scales, 16 bytes, can be copied for one row
_COPYING, _MULTIPLYING = 2, 3  # warpgroups
_KERNEL = "grouped_moe_packed (Blackwell)"

swap(
    kernel=_KERNEL,
    missing="FP4 decoding in 32-bit registers (inline_mgpu), the values times 2^-63 and the sums times 2^63",
    staged="array operations; the register arithmetic is tested on NumPy words",
)
swap(
    kernel=_KERNEL,
    missing="largest magnitude of a warp's rows by shuffles (inline_mgpu)",
    staged="array operations",
)


def product(
    rows: BFloat16[Array, "1 places K"],
    matrices: tuple[PackedMatrix, ...],
    grouping: Grouping,
    tile: Tile,
    math: ExpertMath,
    *,
    ctas: int,
) -> Float[Array, "parts places O/parts"]:
    """Output features of every used place: in order (parts 1) for two matrices, by parity (parts 2) for one.

    Two matrices: gate and up, result `quantise(weight * activate(gate, up))` in bfloat16. One: its product, rounded as
    `math` says, bfloat16 if it is to be rounded, else f32. Places of unused blocks are not written.
    """
    staging = Staging(rows, matrices, grouping, tile, math, ctas=ctas, by_parity=len(matrices) == 1)
    parts = 2 if staging.by_parity else 1
    itemsize = jnp.dtype(staging.out_dtype).itemsize
    scratch = staging.scratch() | {
        "decoded": plgpu.SMEM((tile.decoded, FEATURES, tile.step), jnp.bfloat16, transforms=tiled(128, 2)),
        "sums": [plgpu.TMEM((FEATURES, tile.rows), jnp.float32)] * staging.mats,
        "out_tiles": plgpu.SMEM((2, _chunk(tile), FEATURES), staging.out_dtype, transforms=tiled(128, itemsize)),
        "free": plgpu.Barrier(num_arrivals=1, num_barriers=tile.stages, orders_tensor_core=True),
        "ready": plgpu.Barrier(num_arrivals=2, num_barriers=tile.decoded),
        "multiplied": plgpu.Barrier(num_arrivals=1, num_barriers=tile.decoded, orders_tensor_core=True),
        "sums_full": plgpu.Barrier(num_arrivals=1, orders_tensor_core=True),
        "sums_free": plgpu.Barrier(num_arrivals=2, orders_tensor_core=True),
    }

    def body(cta: Array, mine: Array, warpgroup: Array, arguments: Any, out: Any, memory: Any) -> None:
        def each(run: Any) -> None:
            lax.fori_loop(0, mine, lambda i, _: run(i, *staging.work(cta, i)), None)

        @pl.when(warpgroup == _COPYING)
        def _copy() -> None:
            plgpu.set_max_registers(40, action="decrease")
            each(lambda i, block, tile: staging.copy_tile(i, block, tile, arguments, memory))

        @pl.when(warpgroup == _MULTIPLYING)
        def _multiply() -> None:
            plgpu.set_max_registers(40, action="decrease")
            each(lambda i, block, tile: _multiply_tile(staging, i, memory))

        @pl.when(warpgroup < _COPYING)
        def _compute() -> None:
            plgpu.set_max_registers(208, action="increase")

            def one(i: Array, block: Array, tile: Array) -> None:
                _decode_tile(staging, i, warpgroup, memory)
                _finish_tile(staging, block, tile, warpgroup, arguments, out, memory)

            each(one)
            plgpu.wait_smem_to_gmem(0)

    shape = (parts, staging.places, staging.features // parts)
    return staging.launch(body, shape, warpgroups=4, scratch=scratch)


def _decode_tile(staging: Staging, i: Array, side: Array, memory: Any) -> None:
    """One warpgroup's 64 features of every stage, into the decoded buffers."""
    cut = staging.tile
    buffer = lax.rem(i, jnp.int32(cut.scale_buffers))
    plgpu.barrier_wait(memory["scales_full"].at[buffer])

    def stage(k: Array, _: None) -> None:
        count = i * staging.steps + k
        slot = lax.rem(count, jnp.int32(cut.stages))
        plgpu.barrier_wait(memory["full"].at[slot])
        for m in range(staging.mats):
            turn = count * staging.mats + m
            place = lax.rem(turn, jnp.int32(cut.decoded))
            codes = plgpu.load(memory["code_stages"].at[slot, m, side], layout=plgpu.Layout.WGMMA, optimized=False)
            scales = staging.scales_of(m, side, k, buffer, memory)
            if is_interpreted():
                values = jnp.stack(dequantise.decode_arrays(codes, scales), axis=-1).reshape(SIDE, cut.step)
            else:
                values = dequantise.decode_registers_in_order(codes, scales)

            pl.when(turn >= cut.decoded)(functools.partial(plgpu.barrier_wait, memory["multiplied"].at[place]))
            target = memory["decoded"].at[place, pl.ds(side * SIDE, SIDE)]
            store(target, values, optimized=False)
            plgpu.commit_smem()
            plgpu.barrier_arrive(memory["ready"].at[place])

    lax.fori_loop(0, staging.steps, stage, None)
    plgpu.barrier_arrive(memory["scales_free"].at[buffer])


def _multiply_tile(staging: Staging, i: Array, memory: Any) -> None:
    """Issues a tile's matrix instructions as its operands get ready."""

    @pl.when(i > 0)
    def _reuse() -> None:
        plgpu.barrier_wait(memory["sums_free"])

    def stage(k: Array, _: None) -> None:
        count = i * staging.steps + k
        slot = lax.rem(count, jnp.int32(staging.tile.stages))
        for m in range(staging.mats):
            place = lax.rem(count * staging.mats + m, jnp.int32(staging.tile.decoded))
            plgpu.barrier_wait(memory["ready"].at[place])
            plgpu.tcgen05_mma(
                memory["sums"][m],
                memory["decoded"].at[place],
                memory["row_stages"].at[slot, 0].T,
                memory["multiplied"].at[place],
                accumulate=k > 0,
            )
        plgpu.tcgen05_commit_arrive(memory["free"].at[slot])

    lax.fori_loop(0, staging.steps, stage, None)
    plgpu.tcgen05_commit_arrive(memory["sums_full"])


def _finish_tile(
    staging: Staging, block: Array, tile: Array, half: Array, arguments: Any, out: Any, memory: Any
) -> None:
    """All 128 features of one half of the block's rows, `_chunk` rows at a time."""
    plgpu.barrier_wait(memory["sums_full"])
    layout, rows, chunk = plgpu.Layout.TCGEN05, staging.tile.rows // 2, _chunk(staging.tile)
    for start in range(0, rows, chunk):
        columns = pl.ds(half * rows + start, chunk)
        sums = tuple(plgpu.async_load_tmem(total.at[:, columns], layout=layout) for total in memory["sums"])
        if start + chunk == rows:
            plgpu.wait_load_tmem()
            plgpu.barrier_arrive(memory["sums_free"])
        if not is_interpreted():
            sums = tuple(total * dequantise.RESIDUE for total in sums)
        first = block * staging.tile.rows + half * rows + start
        result = sums[0]
        if staging.is_into:
            weight = plgpu.load(arguments[2].at[pl.ds(first, chunk)], layout=layout.reduce(0), optimized=False)
            result = staging.hidden(sums, weight, layout)
            if staging.math.act_quant:
                result = quantise_with(result, warp_largest(result, layout))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        staged = memory["out_tiles"].at[half]
        staged.T[...] = plgpu.layout_cast(result.astype(staging.out_dtype), plgpu.Layout.TCGEN05_TRANSPOSED)
        plgpu.commit_smem()
        _write(staging, staged, out, first, tile)


def _write(staging: Staging, staged: Any, out: Any, first: Array, tile: Array) -> None:
    """Copies the staged results [chunk, 128] of the places from `first` on."""
    chunk = staged.shape[0]
    if not staging.by_parity:
        plgpu.copy_smem_to_gmem(staged, out.at[0, pl.ds(first, chunk), pl.ds(tile * FEATURES, FEATURES)])
        return
    for parity in range(2):
        for row in range(0, chunk, 8):  # 8 rows of one side are what lies together in swizzled memory
            source = staged.at[pl.ds(row, 8), pl.ds(parity * SIDE, SIDE)]
            plgpu.copy_smem_to_gmem(source, out.at[parity, pl.ds(first + row, 8), pl.ds(tile * SIDE, SIDE)])


def _chunk(tile: Tile) -> int:
    """Rows that a warpgroup finishes at a time: bounds registers and the staging memory."""
    return min(tile.rows // 2, 32)
