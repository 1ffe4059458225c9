"""FP8 rounding of a tile whose features are the rows of an accumulator, in groups of 32 features.

A group lies within the rows of one warp, or of the same warp of two warpgroups (16 rows of each). Its largest magnitude
is found by three shuffles within each warp and, in the second case, one exchange through shared memory.
"""

from __future__ import annotations

from typing import Any, cast

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector
from jaxlib.mlir.dialects import math as mlir_math
from jaxtyping import Array, Float32

from widemesh.pallas_kernels.formats.bits import MAGNITUDE_BITS, SIGN_BIT, from_bits, to_bits
from widemesh.pallas_kernels.formats.scales import fp8_scale, power_reciprocal
from widemesh.pallas_kernels.formats.small_float import E4M3
from widemesh.pallas_kernels.gpu import is_interpreted

WARPS = 4  # of a warpgroup; each holds a quarter of an accumulator's rows


def quantise_with(x: Float32[Array, "R N"], largest: Float32[Array, "R N"]) -> Float32[Array, "R N"]:
    """`x` rounded to E4M3 with the power-of-two scale of its group's largest magnitude, as `fake_quant_fp8` does."""
    bits = to_bits(x)
    scale = fp8_scale(largest)
    rounded = E4M3.round_magnitude(from_bits(bits & MAGNITUDE_BITS) * power_reciprocal(scale)) * scale
    return cast(Array, from_bits(to_bits(rounded) | (bits & SIGN_BIT)))


def warp_largest(x: Float32[Array, "R N"], layout: plgpu.Layout) -> Float32[Array, "R N"]:
    """Per column, the largest magnitude of each warp's rows, repeated over them.

    `layout` is that of `x`: WGMMA (64 rows, 16 a warp) or TCGEN05 (128 rows, 32 a warp).
    """
    if is_interpreted():
        largest = jnp.max(jnp.abs(x).reshape(WARPS, -1, x.shape[1]), axis=1)
        return jnp.repeat(largest, x.shape[0] // WARPS, axis=0)

    @plgpu.inline_mgpu(arg_types=(layout,), return_type=_tile(x.shape, layout))
    def reduce(_: Any, values: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        registers = np.empty_like(values.registers)
        for column in range(registers.shape[1]):
            indices = _rows_of(registers.shape, column)
            largest = mlir_math.absf(values.registers[indices[0]])
            for index in indices[1:]:
                largest = arith.maximumf(largest, mlir_math.absf(values.registers[index]))
            for distance in (4, 8, 16):  # threads of a warp that hold the same columns of other rows
                others = [mgpu.utils.shfl_bfly(_element(largest, i), distance) for i in range(2)]
                largest = arith.maximumf(largest, vector.from_elements(_pair_type(), others))
            for index in indices:
                registers[index] = largest
        return mgpu.FragmentedArray(_registers=registers, _layout=values.layout, _is_signed=None)

    return reduce(x)  # type: ignore[no-any-return]


def store_warps(ref: Any, largest: Float32[Array, "64 N"]) -> None:
    """Writes what `warp_largest` found, layout WGMMA, to `ref` (f32 [4, N] in shared memory)."""
    if is_interpreted():
        ref[...] = largest[:: largest.shape[0] // WARPS]
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA))
    def store(_: Any, memory: ir.Value, values: mgpu.FragmentedArray) -> None:
        for column in range(values.registers.shape[1]):
            index = _rows_of(values.registers.shape, column)[0]
            vector.store(values.registers[index], memory, _position(column))

    store(ref, largest)


def load_warps(ref: Any, like: Float32[Array, "64 N"]) -> Float32[Array, "64 N"]:
    """What `store_warps` wrote, repeated over each warp's rows; shape and layout of `like`."""
    if is_interpreted():
        return jnp.repeat(ref[...], like.shape[0] // WARPS, axis=0)
    layout = plgpu.Layout.WGMMA

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout), return_type=_tile(like.shape, layout))
    def load(_: Any, memory: ir.Value, values: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        registers = np.empty_like(values.registers)
        for column in range(registers.shape[1]):
            largest = vector.load(_pair_type(), memory, _position(column))
            for index in _rows_of(registers.shape, column):
                registers[index] = largest
        return mgpu.FragmentedArray(_registers=registers, _layout=values.layout, _is_signed=None)

    return load(ref, like)  # type: ignore[no-any-return]


def _tile(shape: tuple[int, ...], layout: plgpu.Layout) -> plgpu.ShapeDtypeStruct:
    return plgpu.ShapeDtypeStruct(shape, jnp.dtype(jnp.float32), layout=layout)


def _rows_of(shape: tuple[int, ...], column: int) -> list[tuple[int, ...]]:
    """The registers of 8 columns: in both layouts axis 1 counts columns of 8 and axis 4 a warp's rows by 8."""
    return [(0, column, 0, 0, row, *[0] * (len(shape) - 5)) for row in range(shape[4])]


def _position(column: int) -> list[ir.Value]:
    """[warp, column] of a thread's pair of values. The 8 threads of a warp that hold it name one place alike."""
    word = ir.IntegerType.get_signless(32)

    def number(value: int) -> ir.Value:
        return mgpu.c(value, word)

    thread = arith.remui(mgpu.utils.thread_idx(), number(32 * WARPS))
    pair = arith.muli(arith.remui(thread, number(4)), number(2))
    place = (arith.divui(thread, number(32)), arith.addi(pair, number(8 * column)))
    return [arith.index_cast(ir.IndexType.get(), value) for value in place]


def _element(pair: ir.Value, i: int) -> ir.Value:
    return vector.extract(pair, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([i]))


def _pair_type() -> ir.Type:
    return ir.VectorType.get((2,), ir.F32Type.get())
