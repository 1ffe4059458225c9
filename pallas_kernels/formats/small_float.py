"""E4M3 and E2M1: rounding to the nearest representable value, codes and values.

A magnitude is rounded by adding and subtracting 1.5 * 2^23 steps, where a step is the distance of neighbours at that
magnitude: float32 addition then does the rounding to nearest, ties to even. There is no table in the arithmetic, so
it vectorises and fuses.
"""

from __future__ import annotations

import dataclasses
from functools import cached_property

import jax
import numpy as np
from jaxtyping import Float32, Int32, UInt8

from widemesh.pallas_kernels.formats.bits import AnyArray, from_bits, namespace, to_bits

_EXPONENT_FIELD = np.int32(0x7F800000)
_HALF = np.int32(1 << 22)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SmallFloat:
    """A sign-magnitude float of at most 8 bits without infinities (OCP Microscaling Formats v1.0, section 5.3)."""

    exponent_bits: int
    mantissa_bits: int
    bias: int
    largest: float  # largest finite magnitude
    has_nan: bool  # the all-ones code is NaN

    @property
    def sign_shift(self) -> int:
        """Position of the sign bit in a code."""
        return self.exponent_bits + self.mantissa_bits

    @property
    def smallest_normal(self) -> float:
        """Below it, neighbours are `2^(1 - bias - mantissa_bits)` apart."""
        return 2.0 ** (1 - self.bias)

    def round_magnitude(self, y: Float32[AnyArray, "*G"]) -> Float32[AnyArray, "*G"]:
        """The representable magnitude nearest to each `0 <= y <= largest`, ties to even. Does not saturate."""
        exponent = namespace(y).maximum(to_bits(y) & _EXPONENT_FIELD, np.int32((128 - self.bias) << 23))
        magic = from_bits(exponent + (np.int32((23 - self.mantissa_bits) << 23) | _HALF))
        return (y + magic) - magic

    def magnitude_code(self, y: Float32[AnyArray, "*G"]) -> Int32[AnyArray, "*G"]:
        """The code, sign bit clear, of magnitudes that are representable."""
        normal = (to_bits(y) >> (23 - self.mantissa_bits)) - np.int32((127 - self.bias) << self.mantissa_bits)
        unit_exponent = 24 - self.bias - self.mantissa_bits  # float32 values from 2^this on are a subnormal step apart
        subnormal = to_bits(y + np.float32(2.0**unit_exponent)) - np.int32((127 + unit_exponent) << 23)
        return namespace(y).where(y < np.float32(self.smallest_normal), subnormal, normal)

    def magnitude(self, code: Int32[AnyArray, "*G"]) -> Float32[AnyArray, "*G"]:
        """The magnitude of each code, sign bit clear. The NaN code is not looked at."""
        normal = from_bits((code << (23 - self.mantissa_bits)) + np.int32((127 - self.bias) << 23))
        subnormal = code.astype(np.float32) * np.float32(2.0 ** (1 - self.bias - self.mantissa_bits))
        return namespace(code).where(code < np.int32(1 << self.mantissa_bits), subnormal, normal)

    def sign_code(self, bits: Int32[AnyArray, "*G"]) -> Int32[AnyArray, "*G"]:
        """The code's sign bit for float32 `bits`; that of -0 is kept."""
        return namespace(bits).where(bits < 0, np.int32(1 << self.sign_shift), np.int32(0))

    def decode(self, codes: UInt8[AnyArray, "*G"]) -> Float32[AnyArray, "*G"]:
        """The signed value of each code, exact."""
        if not isinstance(codes, jax.Array):
            return self.table[codes]
        return self._decode(codes)

    @cached_property
    def table(self) -> Float32[np.ndarray, "num_codes"]:
        """The value of every code, for reading large arrays on the host."""
        return np.asarray(self._decode(np.arange(2 << self.sign_shift, dtype=np.uint8)))

    def _decode(self, codes: UInt8[AnyArray, "*G"]) -> Float32[AnyArray, "*G"]:
        wide = codes.astype(np.int32)
        ones = np.int32((1 << self.sign_shift) - 1)
        sign = (wide >> self.sign_shift) << 31
        values = from_bits(to_bits(self.magnitude(wide & ones)) | sign)
        if self.has_nan:
            values = namespace(codes).where((wide & ones) == ones, np.float32(np.nan), values)
        return values


E4M3 = SmallFloat(exponent_bits=4, mantissa_bits=3, bias=7, largest=448.0, has_nan=True)
E2M1 = SmallFloat(exponent_bits=2, mantissa_bits=1, bias=1, largest=6.0, has_nan=False)
