"""Packed records in shared memory to a float16 key tile, inside a kernel.

float16 holds every E2M1 value times an E4M3 scale exactly (at most 6 significant bits, 2^-10 to 2688), and an E4M3
value times its power of two exactly between 2^-14 and 65504; E4M3 converts to it in one instruction for two values.

E2M1 bits land in float16 as they are: sign to bit 15, the other three to bits 9..11, which reads as the value times
2^-14 (the code of 0.5 as a subnormal, which multiplies as any other). A byte of two codes makes one 32-bit word of two
halves with six integer instructions; Pallas has no operation that widens a register by four, hence `inline_mgpu`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from widemesh.pallas_kernels.formats import E2M1, unpack_nibbles
from widemesh.pallas_kernels.gpu import is_interpreted, swap
from widemesh.pallas_kernels.gpu.store import store

swap(
    kernel="sparse_attention.attend_packed",
    missing="inline_mgpu (E2M1 bytes to float16 pairs in registers)",
    staged="the codec's arithmetic on the same bytes",
)

SCALES = 16  # of a record, read at once: those of half an entry, or of a window row; with 32 no layout is found
CHUNK = 64  # columns of a key tile that are stored together: one swizzle row of float16
BYTES = plgpu.Layout.WGMMA  # a thread holds 2 neighbouring bytes ...
VALUES = plgpu.Layout.WGMMA_8BIT  # ... and here the 4 neighbouring values in them
ROWS = plgpu.Layout.WGMMA_8BIT.reduce(1)


def entry_scales(packed: Any, seen: jax.Array, scale_rows: Any, *, begin: int) -> None:
    """Write E4M3 scales of 64 NVFP4 records, from byte `begin` of each on, to `scale_rows` float16 [SCALES, 64].

    Unseen records get 0, and their values with it. Transposed, because a scale is read as one number per record.
    """
    byte = plgpu.load(packed.at[:, pl.ds(begin, SCALES)], layout=BYTES, optimized=False)
    _store_scales(lax.bitcast_convert_type(byte, jnp.float8_e4m3fn).astype(jnp.float16), seen, scale_rows)


def window_scales(packed: Any, seen: jax.Array, scale_rows: Any, *, begin: int) -> None:
    """The same of power-of-two scales of 64 FP8 records."""
    byte = plgpu.load(packed.at[:, pl.ds(begin, SCALES)], layout=BYTES, optimized=False).astype(jnp.int32)
    bits = lax.shift_left(byte, jnp.full_like(byte, 23))
    _store_scales(lax.bitcast_convert_type(bits, jnp.float32).astype(jnp.float16), seen, scale_rows)


def _store_scales(scale: jax.Array, seen: jax.Array, scale_rows: Any) -> None:
    scale = jnp.where(lax.broadcast_in_dim(seen, scale.shape, [0]), scale, jnp.zeros_like(scale))
    store(scale_rows.T, scale, optimized=False)


def entry_values(packed: Any, scale_rows: Any, chunk: jax.Array, *, begin: int) -> jax.Array:
    """[64, CHUNK] float16 values of NVFP4 records: chunk number `chunk` of the codes from byte `begin` on.

    `packed` u8 [64, *] holds the records, row 0 of `scale_rows` the scales of the first 16 values from `begin` on.
    References of 8 bytes a row keep the compiler's search for a layout short.
    """
    groups = []
    for group in range(CHUNK // 16):
        place = begin + chunk * (CHUNK // 2) + group * 8
        code = plgpu.load(packed.at[:, pl.ds(place, 8)], layout=BYTES, optimized=False)
        value = nibbles_to_half(code)
        scale = plgpu.load(scale_rows.at[chunk * (CHUNK // 16) + group], layout=ROWS, optimized=False)
        groups.append(value * lax.broadcast_in_dim(scale, value.shape, [0]))
    return lax.concatenate(groups, 1)


def window_values(packed: Any, scale_rows: Any, chunk: jax.Array, *, begin: int, first: int) -> jax.Array:
    """The same of FP8 records, with the scales from row `first` on.

    An unseen code may be NaN, so zero is chosen there, not multiplied by.
    """
    groups = []
    for part in range(CHUNK // 16):
        code = plgpu.load(packed.at[:, pl.ds(begin + chunk * CHUNK + part * 16, 16)], layout=VALUES, optimized=False)
        value = lax.bitcast_convert_type(code, jnp.float8_e4m3fn).astype(jnp.float16)
        scale = plgpu.load(scale_rows.at[first + chunk * (CHUNK // 32) + part // 2], layout=ROWS, optimized=False)
        scale = lax.broadcast_in_dim(scale, value.shape, [0])
        groups.append(jnp.where(scale > 0, value * scale, jnp.zeros_like(value)))
    return lax.concatenate(groups, 1)


def nibbles_to_half(codes: jax.Array) -> jax.Array:
    """E2M1 values [64, 2 C] float16 of bytes [64, C], the low nibble first."""
    if is_interpreted():
        return jnp.asarray(E2M1.decode(unpack_nibbles(codes)), jnp.float16)
    rows, columns = codes.shape
    out = plgpu.ShapeDtypeStruct((rows, 2 * columns), jnp.dtype(jnp.float16), layout=VALUES)

    @plgpu.inline_mgpu(arg_types=(BYTES,), return_type=out)
    def expand(_: Any, packed: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        words = [_pairs(register) for register in packed.registers.flat]
        layout = mgpu.fragmented_array.WGMMA_LAYOUT_8BIT
        shape = layout.registers_shape((rows, 2 * columns))
        registers = packed.registers.reshape(-1).copy()
        registers[:] = words
        return mgpu.FragmentedArray(_registers=registers.reshape(shape), _layout=layout, _is_signed=None)

    return expand(codes) * jnp.float16(2.0**14)


def half_pair[Word: Any](byte: Word, shift: Callable[[Word, int], Word], both: Callable[[Word, int], Word]) -> Word:
    """The two float16 numbers of a byte, each its E2M1 value times 2^-14, in one 32-bit word.

    Of `byte` (bits above the eighth may be anything below bit 16) the low nibble makes the low half. `shift` is to the
    left; `both` is the bitwise and. Written over any kind of word, so that a test runs it on numbers.
    """
    spread = byte | shift(byte, 12)  # the nibbles at bits 0 and 16; what lies between is masked away
    return both(shift(spread, 9), 0x0E000E00) | both(shift(spread, 12), 0x80008000)


class _Register:
    """A 32-bit register with `|`."""

    def __init__(self, value: Any):
        self.value = value

    def __or__(self, other: _Register) -> _Register:
        return _Register(arith.ori(self.value, other.value))


def _pairs(register: Any) -> Any:
    """vector<4xf16> of the E2M1 values times 2^-14 in a vector<2xi8>."""
    i16, i32, f16 = ir.IntegerType.get_signless(16), ir.IntegerType.get_signless(32), ir.F16Type.get()

    def number(value: int) -> Any:
        signed = value if value < 1 << 31 else value - (1 << 32)
        return arith.constant(i32, ir.IntegerAttr.get(i32, signed))  # type: ignore[call-arg, arg-type]

    def shift(word: _Register, bits: int) -> _Register:
        return _Register(arith.shli(word.value, number(bits)))

    def both(word: _Register, mask: int) -> _Register:
        return _Register(arith.andi(word.value, number(mask)))

    two = arith.extui(i32, vector.extract(vector.bitcast(ir.VectorType.get((1,), i16), register), [], [0]))
    bytes_ = _Register(two), _Register(arith.shrui(two, number(8)))
    words = [half_pair(byte, shift, both).value for byte in bytes_]
    return vector.bitcast(ir.VectorType.get((4,), f16), vector.from_elements(ir.VectorType.get((2,), i32), words))
