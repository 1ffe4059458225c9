"""The k best of what a block of threads holds in registers, compacted into a list: shared by all kernels of the op.

The k-th largest score is found by bisection on the bits of the scores, from the sign down: up to 32 passes of compare
and count over registers (fewer when a pass leaves exactly k), with no exchange of data but one sum per pass. Equal
scores at the edge are decided by a bisection on their positions. What is chosen is compacted by a prefix sum over the
threads, in no particular order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float, Int32

from widemesh.pallas_kernels.gpu import is_interpreted, swap

THREADS = 128
_LOWEST = -(2**31)

swap(
    kernel="select_entries",
    missing="inline lane code (compaction by a prefix sum over threads)",
    staged="the same list by a cumulative sum and a scatter",
)


def strided(size: int) -> Any:
    """Layout of a vector over the threads of a block; `size` is a multiple of 128."""
    return plgpu.Layout.WG_STRIDED((size,), vec_size=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Piece:
    """Scores that compete, in registers."""

    scores: Float[Array, "n"]
    positions: Int32[Array, "n"]
    live: Bool[Array, "n"]  # false: neither score nor position is looked at


def choose_best(pieces: Sequence[Piece], k: int, position_bits: int) -> list[Int32[Array, "n"]]:
    """Per piece 1 for each of the k best live scores above -inf (all of them if there are fewer), else 0.

    Equal scores go to the lower position; positions are below 2^position_bits.
    """
    keys = [_ordered(piece) for piece in pieces]
    total = _count([key > _LOWEST for key in keys])

    def raise_threshold(state: tuple[Array, Array]) -> tuple[Array, Array]:
        bit, found = state
        trial = found + lax.shift_left(jnp.int32(1), bit)  # wraps from the lowest to 0 on the sign bit
        count = _count([key >= trial for key in keys])
        # k scores and no more are at or above: no lower bit matters.
        return jnp.where(count == k, -1, bit - 1), jnp.where(count >= k, trial, found)

    begin = jnp.where(total > k, 31, -1).astype(jnp.int32)
    _, threshold = lax.while_loop(lambda state: state[0] >= 0, raise_threshold, (begin, jnp.int32(_LOWEST)))
    room = k - _count([key > threshold for key in keys])
    equal = [(key == threshold) & (key > _LOWEST) for key in keys]

    def raise_bound(step: Int32[Array, ""], bound: Int32[Array, ""]) -> Int32[Array, ""]:
        trial = bound + lax.shift_left(jnp.int32(1), position_bits - 1 - step)
        lower = [mask & (piece.positions < trial) for mask, piece in zip(equal, pieces, strict=True)]
        return jnp.where(_count(lower) <= room, trial, bound)

    crowded = _count(equal) > room
    steps = jnp.where(crowded, position_bits, 0)
    bound = lax.fori_loop(0, steps, raise_bound, jnp.where(crowded, 0, 2**31 - 1).astype(jnp.int32))
    return [
        ((key > threshold) | (mask & (piece.positions < bound))).astype(jnp.int32)
        for key, mask, piece in zip(keys, equal, pieces, strict=True)
    ]


def _ordered(piece: Piece) -> Int32[Array, "n"]:
    """int32 that orders as the scores do, the lowest one for what is not live or -inf; both zeros are equal."""
    scores = piece.scores
    bits = lax.bitcast_convert_type(jnp.where(scores == 0.0, 0.0, scores), jnp.int32)
    keys = jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)
    return jnp.where(piece.live & (scores > -jnp.inf), keys, jnp.int32(_LOWEST))


def _count(masks: Sequence[Bool[Array, "n"]]) -> Int32[Array, ""]:
    total, *others = (jnp.sum(mask.astype(jnp.int32), dtype=jnp.int32) for mask in masks)
    for other in others:
        total = total + other
    return total


def compact(pieces: Sequence[Piece], chosen: Sequence[Int32[Array, "n"]], lists: tuple[Any, Any], sums: Any) -> None:
    """Writes the chosen scores and positions to the front of two SMEM lists, -inf and -1 behind them.

    `lists` are f32 and int32 of a multiple of 128 places and may be what a piece was loaded from; `sums` is int32
    scratch of 4.
    """
    score_list, position_list = lists
    (size,) = score_list.shape
    if is_interpreted():
        flags, scores, positions = (
            jnp.concatenate(parts) for parts in (chosen, [p.scores for p in pieces], [p.positions for p in pieces])
        )
        place = jnp.where(flags > 0, jnp.cumsum(flags) - 1, size)
        score_list[...] = jnp.full((size,), -jnp.inf, jnp.float32).at[place].set(scores, mode="drop")
        position_list[...] = jnp.full((size,), -1, jnp.int32).at[place].set(positions, mode="drop")
        return
    empty_lists(lists)
    arrays = [x for flags, p in zip(chosen, pieces, strict=True) for x in (flags, p.scores, p.positions)]
    layouts = tuple(strided(x.shape[0]) for x in arrays)
    plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * 3 + layouts)(_scatter)(score_list, position_list, sums, *arrays)


def empty_lists(lists: tuple[Any, Any]) -> None:
    """-inf and -1 in all places."""
    for ref, value in zip(lists, (-jnp.inf, -1), strict=True):
        ref[...] = plgpu.layout_cast(jnp.full(ref.shape, value, ref.dtype), strided(ref.shape[0]))


def _scatter(_: Any, score_list: Any, position_list: Any, sums: Any, *arrays: Any) -> None:
    """Lane code: each thread writes its chosen elements behind those of the threads before it.

    `arrays` are flags, scores and positions of each piece in turn.
    """
    from jax.experimental.mosaic.gpu import utils
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, memref, nvvm, vector

    i32, index = ir.IntegerType.get_signless(32), ir.IndexType.get()

    def elements(array: Any) -> list[Any]:
        registers = list(array.registers.flat)
        if not isinstance(registers[0].type, ir.VectorType):
            return registers
        take = [ir.DenseI64ArrayAttr.get([i]) for i in range(ir.VectorType(registers[0].type).shape[0])]
        return [vector.extract(r, dynamic_position=[], static_position=i) for r in registers for i in take]

    flags, scores, positions = ([x for array in arrays[i::3] for x in elements(array)] for i in range(3))
    count = flags[0]
    for flag in flags[1:]:
        count = arith.addi(count, flag)
    thread = arith.remui(utils.thread_idx(), utils.c(THREADS, i32))
    lane, warp = arith.remui(thread, utils.c(32, i32)), arith.divui(thread, utils.c(32, i32))
    through = count  # of the lanes of this warp up to this one
    for distance in (1, 2, 4, 8, 16):
        before = nvvm.shfl_sync(
            utils.c(0xFFFFFFFF, i32), through, utils.c(distance, i32), utils.c(0, i32), nvvm.ShflKind.up
        )
        has_lane = arith.cmpi(arith.CmpIPredicate.uge, lane, utils.c(distance, i32))
        through = arith.addi(through, arith.select(has_lane, before, utils.c(0, i32)))
    with utils.when(arith.cmpi(arith.CmpIPredicate.eq, lane, utils.c(31, i32))):
        memref.store(through, sums, [arith.index_cast(index, warp)])
    utils.warpgroup_barrier()
    place = arith.subi(through, count)
    for other in range(3):
        earlier = arith.cmpi(arith.CmpIPredicate.ugt, warp, utils.c(other, i32))
        total = memref.load(sums, [utils.c(other, index)])
        place = arith.addi(place, arith.select(earlier, total, utils.c(0, i32)))
    for flag, score, position in zip(flags, scores, positions, strict=True):
        with utils.when(arith.cmpi(arith.CmpIPredicate.ne, flag, utils.c(0, i32))):
            at = [arith.index_cast(index, place)]
            memref.store(score, score_list, at)
            memref.store(position, position_list, at)
        place = arith.addi(place, flag)
    utils.warpgroup_barrier()
