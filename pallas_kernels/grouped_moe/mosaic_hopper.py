"""Grouped products with FP4 matrices on Hopper: y = W x with W decoded into registers and the rows as the narrow side.

    block b = up to N rows of one expert          tile t = 128 output features, 64 even and 64 odd
                                                   (even ones: warpgroup 0, odd ones: warpgroup 1)
            K (step a stage)
          +------------------+
    codes | 64 x step/2 bytes|  -> low nibbles  [64, step/2] bf16 = even columns --wgmma--> acc [64, N] f32
    (u8)  |                  |  -> high nibbles [64, step/2] bf16 = odd columns  --wgmma-->  "
          +------------------+
    rows, shared memory: even columns [N, step/2], odd columns [N, step/2] (B operand, read by both warpgroups)

A byte holds an even and an odd column, so splitting the K axis of the activations into its even and its odd half lets a
byte be decoded where it is loaded, without moving a value between threads. A third warpgroup keeps `stages` stages of
copies in flight. The grid is persistent: a block walks the tiles of the used blocks, whose number is a value in memory.

The matrices are the M side of the instruction (64 features), so a block of 8 rows costs 8 and not 64.

Into (gate and up): per tile 2 matrices; the epilogue clamps, gates, weights, rounds to FP8 and writes the two halves
that the next product reads. Out (down): one matrix; writes partial results, one row per pair.

Floor, released sizes (D 5120, F 2304): an expert touched is read once, 3 * D * F * 17/32 B = 18.8 MB; 6 * D * F FLOP a
pair. Bound by bytes up to about 100 pairs an expert (H100: 989e12 / 3.35e12 FLOP a byte * 17/64 B a weight = 78).
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float

from widemesh.pallas_kernels.gpu import is_interpreted, swap
from widemesh.pallas_kernels.gpu.wgmma import wgmma
from widemesh.pallas_kernels.grouped_moe import dequantise
from widemesh.pallas_kernels.grouped_moe.expert import ExpertMath
from widemesh.pallas_kernels.grouped_moe.grouping import Grouping
from widemesh.pallas_kernels.grouped_moe.packed import PackedMatrix
from widemesh.pallas_kernels.grouped_moe.quantise_tile import (
    WARPS,
    load_warps,
    quantise_with,
    store_warps,
    warp_largest,
)
from widemesh.pallas_kernels.grouped_moe.staging import SIDE, Staging, tiled
from widemesh.pallas_kernels.grouped_moe.tiles import Tile

PARTS = 2  # even and odd columns of the rows lie apart
HIDDEN_UNIT = 256  # columns: the longest stage, and what the scales of an even and an odd row are copied by
_WGMMA = plgpu.Layout.WGMMA
_COPYING = 2  # the warpgroup that only copies
_KERNEL = "grouped_moe_packed (Hopper)"

swap(
    kernel=_KERNEL,
    missing="wgmma with its first operand in registers",
    staged="operand written to shared memory first",
)
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
swap(
    kernel=_KERNEL,
    missing="largest magnitudes to and from shared memory, a pair a thread (inline_mgpu)",
    staged="assignment and load of the whole array [4, rows] in the same shared memory, between the same barriers",
)


def product(
    rows: BFloat16[Array, "2 places K/2"],
    matrices: tuple[PackedMatrix, ...],
    grouping: Grouping,
    tile: Tile,
    math: ExpertMath,
    *,
    ctas: int,
) -> Float[Array, "2 places O/2"]:
    """Even and odd output features of every used place.

    Two matrices: gate and up, result `quantise(weight * activate(gate, up))` in bfloat16. One: its product, rounded as
    `math` says, bfloat16 if it is to be rounded, else f32. Places of unused blocks are not written.
    """
    staging = Staging(rows, matrices, grouping, tile, math, ctas=ctas, by_parity=True)
    buffers = tile.scale_buffers
    scratch = staging.scratch() | {
        "out_tiles": plgpu.SMEM(
            (2, tile.rows, SIDE), staging.out_dtype, transforms=tiled(128, jnp.dtype(staging.out_dtype).itemsize)
        ),
        "free": plgpu.Barrier(num_arrivals=2, num_barriers=tile.stages),
    }
    if staging.is_into and math.act_quant:
        # One more buffer than tiles whose scales can be loaded: a warpgroup that writes tile i + buffers + 1 has seen
        # the other one release the scales of tile i + 1, after it read tile i.
        scratch["largest"] = plgpu.SMEM((buffers + 1, 2, WARPS, tile.rows), jnp.float32)
        scratch["exchange"] = plgpu.Barrier(num_arrivals=2)
    if is_interpreted():
        scratch["operand"] = plgpu.SMEM((2, SIDE, tile.step // 2), jnp.bfloat16, transforms=tiled(128, 2))

    def body(cta: Array, mine: Array, warpgroup: Array, arguments: Any, out: Any, memory: Any) -> None:
        @pl.when(warpgroup == _COPYING)
        def _copy() -> None:
            plgpu.set_max_registers(40, action="decrease")

            def one(i: Array, _: None) -> None:
                staging.copy_tile(i, *staging.work(cta, i), arguments, memory)

            lax.fori_loop(0, mine, one, None)

        @pl.when(warpgroup != _COPYING)
        def _compute() -> None:
            plgpu.set_max_registers(232, action="increase")

            def one(i: Array, _: None) -> None:
                _compute_tile(staging, i, *staging.work(cta, i), warpgroup, arguments, out, memory)

            lax.fori_loop(0, mine, one, None)
            plgpu.wait_smem_to_gmem(0)

    return staging.launch(body, (2, staging.places, staging.features // 2), warpgroups=3, scratch=scratch)


def _compute_tile(
    staging: Staging, i: Array, block: Array, tile: Array, side: Array, arguments: Any, out: Any, memory: Any
) -> None:
    """One warpgroup's 64 features of a tile."""
    cut = staging.tile
    buffer = lax.rem(i, jnp.int32(cut.scale_buffers))
    plgpu.barrier_wait(memory["scales_full"].at[buffer])

    def accumulate(*sums: Any) -> tuple[Array, ...]:
        def stage(k: Array, _: None) -> None:
            slot = lax.rem(i * staging.steps + k, jnp.int32(cut.stages))
            plgpu.barrier_wait(memory["full"].at[slot])
            for m in range(staging.mats):  # the second matrix is decoded while the first one is multiplied
                codes = plgpu.load(memory["code_stages"].at[slot, m, side], layout=_WGMMA, optimized=False)
                scales = staging.scales_of(m, side, k, buffer, memory)
                _multiply(sums[m], codes, scales, memory["row_stages"].at[slot], side, memory)
            plgpu.wgmma_wait(0)
            plgpu.commit_smem()  # codes and scales were read by plain loads; what overwrites them is a bulk copy
            plgpu.barrier_arrive(memory["free"].at[slot])

        lax.fori_loop(0, staging.steps, stage, None)
        return tuple(total[...] for total in sums)

    sums = pl.run_scoped(accumulate, *[plgpu.ACC((SIDE, cut.rows), jnp.float32)] * staging.mats)
    plgpu.barrier_arrive(memory["scales_free"].at[buffer])
    if not is_interpreted():
        sums = tuple(total * dequantise.RESIDUE for total in sums)
    places = pl.ds(block * cut.rows, cut.rows)
    result = sums[0]
    if staging.is_into:
        weight = plgpu.load(arguments[2].at[places], layout=_WGMMA.reduce(0), optimized=False)
        result = staging.hidden(sums, weight, _WGMMA)
        if staging.math.act_quant:
            result = _quantise(result, memory["largest"].at[lax.rem(i, jnp.int32(cut.scale_buffers + 1))], side, memory)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    staged = memory["out_tiles"].at[side]
    staged.T[...] = plgpu.layout_cast(result.astype(staging.out_dtype), plgpu.Layout.WGMMA_TRANSPOSED)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(staged, out.at[side, places, pl.ds(tile * SIDE, SIDE)])


def _multiply(total: Any, codes: Array, scales: list[Array], rows: Any, side: Array, memory: Any) -> None:
    """total += the decoded codes [64, step] times the rows of a stage."""
    if not is_interpreted():
        for parity, values in enumerate(dequantise.decode_registers(codes, scales)):
            wgmma(total, values, rows.at[parity].T)
        return
    operand = memory["operand"].at[side]
    for parity, values in enumerate(dequantise.decode_arrays(codes, scales)):
        operand[...] = values
        plgpu.commit_smem()
        wgmma(total, operand, rows.at[parity].T)
        plgpu.wgmma_wait(0)


def _quantise(hidden: Array, largest: Any, side: Array, memory: Any) -> Array:
    """FP8 rounding of a tile. A group of 32 features is the 16 rows of a warp in both warpgroups."""
    mine = warp_largest(hidden, _WGMMA)
    store_warps(largest.at[side], mine)
    plgpu.barrier_arrive(memory["exchange"])
    plgpu.barrier_wait(memory["exchange"])
    return quantise_with(hidden, jnp.maximum(mine, load_warps(largest.at[1 - side], hidden)))
