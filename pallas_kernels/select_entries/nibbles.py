"""E2M1 codes to bfloat16 by looking bytes up: a fraction of the instructions of shifting each value into place.

The eight magnitudes have eight high and eight low bytes. One byte permutation (`prmt`) looks up four bytes by the four
codes of two packed bytes, and another pairs high with low bytes:

    word       n3 n2 n1 n0          codes of two bytes; n0, n2 are the low nibbles (even dimensions)
    lows       l3 l2 l1 l0          low bytes of the bfloat16 values, highs alike
    even       h2 l2 h0 l0          two bfloat16 values, and their signs
    odd        h3 l3 h1 l1
"""

from __future__ import annotations

from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, UInt8

from widemesh.pallas_kernels.formats.small_float import E2M1
from widemesh.pallas_kernels.gpu import is_interpreted, swap

swap(
    kernel="select_entries",
    missing="inline lane code (E2M1 codes to bfloat16 by byte permutations)",
    staged="the same values by arithmetic",
)

_LOW_BYTES = 0xC0800000, 0xC0804000  # of 0, 0.5, 1, 1.5 and of 2, 3, 4, 6, the first in the lowest byte
_HIGH_BYTES = 0x3F3F3F00, 0x40404040
_SIGNS = 0x80008000


class Words(Protocol):
    """Operations on 32-bit words; constants are Python integers."""

    def prmt(self, a: Any, b: Any, selector: Any) -> Any:
        """Byte i of the result is byte `selector >> 4 * i & 7` of a (0 to 3) and b (4 to 7)."""

    def bit_and(self, a: Any, b: Any) -> Any:
        """a & b."""

    def bit_or(self, a: Any, b: Any) -> Any:
        """a | b."""

    def shift_left(self, a: Any, by: int) -> Any:
        """a << by."""


def decode_word(word: Any, words: Words) -> tuple[Any, Any]:
    """The two bfloat16 values of the low and of the high nibbles of a word's lower two bytes; the upper two are 0."""
    selector = words.bit_and(word, 0x7777)
    lows, highs = words.prmt(*_LOW_BYTES, selector), words.prmt(*_HIGH_BYTES, selector)
    spread = words.prmt(word, 0, 0x1404)  # each byte at the top of a half
    even = words.bit_or(words.prmt(lows, highs, 0x6240), words.bit_and(words.shift_left(spread, 4), _SIGNS))
    odd = words.bit_or(words.prmt(lows, highs, 0x7351), words.bit_and(spread, _SIGNS))
    return even, odd


def decode_nibbles(codes: UInt8[Array, "M bytes"]) -> tuple[BFloat16[Array, "M bytes"], BFloat16[Array, "M bytes"]]:
    """Values of the low and of the high nibbles. `codes` are in the layout WGMMA, and so are the results."""
    if is_interpreted():
        low, high = (jnp.asarray(E2M1.decode(nibble), jnp.bfloat16) for nibble in (codes & 15, codes >> 4))
        return low, high
    layout = plgpu.Layout.WGMMA
    result = plgpu.ShapeDtypeStruct(codes.shape, jnp.dtype(jnp.bfloat16), layout=layout)
    low, high = plgpu.inline_mgpu(arg_types=(layout,), return_type=(result, result))(_decode_registers)(codes)
    return low, high


def _decode_registers(_: Any, codes: Any) -> tuple[Any, Any]:
    """Lane code: each register of two bytes becomes two registers of two values."""
    from jax.experimental.mosaic import gpu as mgpu
    from jax.experimental.mosaic.gpu import utils
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith

    i32 = ir.IntegerType.get_signless(32)
    pair = ir.VectorType.get((2,), ir.BF16Type.get())

    def value(x: Any) -> Any:
        return utils.c(x, i32) if isinstance(x, int) else x

    class LaneWords:
        def prmt(self, a: Any, b: Any, selector: Any) -> Any:
            return utils.prmt(value(a), value(b), value(selector))

        def bit_and(self, a: Any, b: Any) -> Any:
            return arith.andi(value(a), value(b))

        def bit_or(self, a: Any, b: Any) -> Any:
            return arith.ori(value(a), value(b))

        def shift_left(self, a: Any, by: int) -> Any:
            return arith.shli(value(a), value(by))

    even, odd = np.empty_like(codes.registers), np.empty_like(codes.registers)
    for at, register in np.ndenumerate(codes.registers):
        word = arith.extui(i32, utils.bitcast(register, ir.IntegerType.get_signless(16)))
        even[at], odd[at] = (utils.bitcast(half, pair) for half in decode_word(word, LaneWords()))
    arrays = (mgpu.FragmentedArray(_registers=x, _layout=codes.layout, _is_signed=None) for x in (even, odd))
    low, high = arrays
    return low, high
