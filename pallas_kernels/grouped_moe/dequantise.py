"""FP4 codes to bfloat16 values in registers, a byte at a time: the even column is its low nibble, the odd its high.

Two forms. `nibble_values` is array code that runs anywhere. `decode_registers` is the same in 32-bit registers, two
values an instruction: 9 instructions for 4 values. The array code, whose 16-bit steps the compiler takes one value at a
time, needs about 40 for them, and a kernel that reads weights at full bandwidth would wait for its arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector
from jaxtyping import Array, BFloat16, UInt8

_COLUMNS = 16  # bytes under one scale
_HALF_BITS = np.int16(126 << 7)  # 0.5 in bfloat16
_WGMMA = plgpu.Layout.WGMMA

# `decode_registers` leaves this power of two out of its values: codes used as bfloat16 bits are 2^126 too small, and
# 2^126 times a scale would overflow. With 2^63 left for the f32 sums, every scale in 2^-62..2^64 is exact.
RESIDUE = 2.0**63
_BIAS = 63
_LARGEST_SCALE = 255 - _BIAS


def nibble_values(codes: Array, *, high: bool) -> Array:
    """The E2M1 values, bfloat16, of the low or high nibbles of bytes that were widened to int16.

    Codes 2..7 are their own exponent and mantissa bits above a bias of 126; 0 and 1 (0.5) are set apart, since the same
    bits would make them subnormal, and XLA on a CPU flushes those.
    """
    code = lax.shift_right_logical(codes, np.int16(4)) if high else codes
    magnitude = code & np.int16(7)
    bits = lax.shift_left(magnitude, np.int16(6)) + _HALF_BITS
    bits = jnp.where(magnitude == 1, _HALF_BITS, bits)
    bits = jnp.where(magnitude == 0, np.int16(0), bits)
    sign = lax.shift_left(code & np.int16(8), np.int16(12))
    return lax.bitcast_convert_type(bits | sign, jnp.bfloat16)


def scale_values(scales: UInt8[Array, "O"]) -> BFloat16[Array, "O"]:
    """2^(byte - 127): an E8M0 byte is the exponent field of a bfloat16. Byte 0 gives 0, byte 255 infinity."""
    return lax.bitcast_convert_type(lax.shift_left(scales.astype(jnp.int16), np.int16(7)), jnp.bfloat16)


def decode_arrays(codes: UInt8[Array, "64 C"], scales: list[Array]) -> tuple[Array, Array]:
    """`decode_registers` by array operations, for the interpreter: the values themselves."""
    factors = jnp.repeat(jnp.stack([scale_values(scale) for scale in scales], axis=1), _COLUMNS, axis=1)
    low, high = (nibble_values(codes.astype(jnp.int16), high=high) * factors for high in (False, True))
    return low, high


def pair_bits(word: Any, *, high: bool) -> Any:
    """Bits of two bfloat16, value times 2^-126 each, from two bytes in the halves of a 32-bit word.

    The product puts a nibble s e e m at bit 12, whose s is then bit 15, and at bit 6, whose e e m are then bits 8..6;
    the mask keeps those four. No carry crosses a half: 15 * 0x1040 < 2^16.
    """
    nibbles, factor = (0x00F000F0, 0x0104) if high else (0x000F000F, 0x1040)
    return ((word & nibbles) * factor) & 0x81C081C0


def pair_scale(byte: Any) -> Any:
    """Bits of 2^(byte - 127) * 2^63 in bfloat16, in both halves of a 32-bit word; `byte` at most 192."""
    return (byte + _BIAS) * 0x00800080


def decode_registers(codes: UInt8[Array, "64 C"], scales: list[Array]) -> tuple[Array, Array]:
    """Low and high nibbles of bytes in the layout WGMMA, as scaled bfloat16 in the same; 2^-63 of their values.

    `scales` holds one u8[64] per 16 byte columns, layout WGMMA.reduce(1). Scales above 2^64 count as infinity.
    """
    out = plgpu.ShapeDtypeStruct(codes.shape, jnp.dtype(jnp.bfloat16), layout=_WGMMA)

    @plgpu.inline_mgpu(arg_types=(_WGMMA, [_WGMMA.reduce(1)] * len(scales)), return_type=(out, out))
    def decode(_: Any, raw: mgpu.FragmentedArray, factors: list[mgpu.FragmentedArray]) -> tuple[Any, Any]:
        halves = (np.empty_like(raw.registers), np.empty_like(raw.registers))
        for index, low, high in _decoded(raw, factors):
            halves[0][index], halves[1][index] = low, high
        first, second = (mgpu.FragmentedArray(_registers=half, _layout=raw.layout, _is_signed=None) for half in halves)
        return first, second

    low, high = decode(codes, scales)
    return low, high


def decode_registers_in_order(codes: UInt8[Array, "64 C"], scales: list[Array]) -> Array:
    """As `decode_registers`, the columns in order: bfloat16 [64, 2 C] in the layout WGMMA_8BIT."""
    layout = plgpu.Layout.WGMMA_8BIT
    out = plgpu.ShapeDtypeStruct((codes.shape[0], 2 * codes.shape[1]), jnp.dtype(jnp.bfloat16), layout=layout)

    @plgpu.inline_mgpu(arg_types=(_WGMMA, [_WGMMA.reduce(1)] * len(scales)), return_type=out)
    def decode(_: Any, raw: mgpu.FragmentedArray, factors: list[mgpu.FragmentedArray]) -> mgpu.FragmentedArray:
        # A thread's 2 bytes of 8 columns are its 4 values of 16: both layouts count columns and rows alike.
        registers = np.empty_like(raw.registers)
        for index, low, high in _decoded(raw, factors):
            registers[index] = vector.shuffle(low, high, [0, 2, 1, 3])
        return mgpu.FragmentedArray(_registers=registers, _layout=layout.to_mgpu(), _is_signed=None)

    return decode(codes, scales)  # type: ignore[no-any-return]


def _decoded(
    raw: mgpu.FragmentedArray, scales: list[mgpu.FragmentedArray]
) -> Iterator[tuple[tuple[int, ...], ir.Value, ir.Value]]:
    """Index, low and high pair of values of every register. In it axis 1 counts columns of 8 and axis 4 rows by 8."""
    word_type, pair_type = ir.IntegerType.get_signless(32), ir.VectorType.get((2,), ir.BF16Type.get())
    factors = [[mgpu.utils.bitcast(_factor(byte).value, pair_type) for byte in s.registers.flat] for s in scales]
    for index, register in np.ndenumerate(raw.registers):
        wide = arith.extui(word_type, mgpu.utils.bitcast(register, ir.IntegerType.get_signless(16)))
        word = _Word(mgpu.utils.prmt(wide, _constant(0), _constant(0x4140)))  # byte, 0, next byte, 0
        factor = factors[8 * index[1] // _COLUMNS][index[4]]
        low, high = (mgpu.utils.bitcast(pair_bits(word, high=high).value, pair_type) for high in (False, True))
        yield index, arith.mulf(low, factor), arith.mulf(high, factor)


def _factor(byte: ir.Value) -> _Word:
    """`pair_scale` of a register with one byte."""
    wide = arith.extui(ir.IntegerType.get_signless(32), mgpu.utils.bitcast(byte, ir.IntegerType.get_signless(8)))
    return pair_scale(_Word(arith.minui(wide, _constant(_LARGEST_SCALE))))


def _constant(value: int) -> ir.Value:
    word = ir.IntegerType.get_signless(32)
    return mgpu.c(value - (1 << 32) if value >= 1 << 31 else value, word)


class _Word:
    """A 32-bit integer register under Python's operators, so that the bit tricks are written once and run on NumPy."""

    def __init__(self, value: ir.Value):
        self.value = value

    def __and__(self, mask: int) -> _Word:
        return _Word(arith.andi(self.value, _constant(mask)))

    def __mul__(self, factor: int) -> _Word:
        return _Word(arith.muli(self.value, _constant(factor)))

    def __add__(self, other: int) -> _Word:
        return _Word(arith.addi(self.value, _constant(other)))
