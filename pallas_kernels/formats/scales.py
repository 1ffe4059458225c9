"""Group scales: powers of two stored as E8M0 bytes, and their values from a group's largest magnitude.

An E8M0 byte is a float32 exponent field: byte b means 2^(b - 127), and 255 means NaN. It is never a number to be
converted: an integer cast of an E8M0 array destroys it. Formulas: docs/model.md, "Quantised caches".
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float32, Int32, UInt8

from widemesh.pallas_kernels.formats.bits import AnyArray, from_bits, namespace, to_bits
from widemesh.pallas_kernels.formats.small_float import E4M3

FP8_AMAX_FLOOR = np.float32(1e-4)
MXFP4_AMAX_FLOOR = np.float32(6 * 2.0**-126)
NVFP4_AMAX_FLOOR = np.float32(6 * 2.0**-9)

_LARGEST_POWER = np.int32(254 << 23)  # bits of 2^127
_NAN = np.int32(0x7FC00000)


def pow2ceil(v: Float32[AnyArray, "*G"]) -> Float32[AnyArray, "*G"]:
    """The smallest power of two >= v, by exponent bits; a logarithm would misround at exact powers.

    Values in (0, 2^-126) give 2^-126 and zero gives zero. Infinity, NaN and values above 2^127 give NaN.
    """
    bits = to_bits(v)
    up = (bits + np.int32(0x007FFFFF)) & np.int32(0x7F800000)
    return from_bits(namespace(v).where(bits > _LARGEST_POWER, _NAN, up))


def encode_e8m0(scale: Float32[AnyArray, "*G"]) -> UInt8[AnyArray, "*G"]:
    """The byte of each power of two in [2^-127, 2^127]; 255 for NaN and infinity. Other values lose their mantissa."""
    return (to_bits(scale) >> 23).astype(np.uint8)


def decode_e8m0(byte: UInt8[AnyArray, "*G"]) -> Float32[AnyArray, "*G"]:
    """2^(byte - 127), NaN for 255. Byte 0 is subnormal: XLA arithmetic takes it for zero, NumPy does not."""
    wide = byte.astype(np.int32)
    xp = namespace(byte)
    bits = xp.where(wide == 0, np.int32(1 << 22), wide << 23)
    return from_bits(xp.where(wide == 255, _NAN, bits))


def power_reciprocal(scale: Float32[AnyArray, "*G"]) -> Float32[AnyArray, "*G"]:
    """1 / scale, exact, for powers of two in [2^-126, 2^126]; 0 for NaN."""
    return from_bits(namespace(scale).maximum(_LARGEST_POWER - to_bits(scale), np.int32(0)))


def fp8_scale(amax: Float32[AnyArray, "*G"]) -> Float32[AnyArray, "*G"]:
    """Power-of-two scale of an E4M3 group: pow2ceil(max(amax, 1e-4) / 448), so that amax / scale <= 448."""
    return pow2ceil(namespace(amax).maximum(amax, FP8_AMAX_FLOOR) * np.float32(1 / 448))


def mxfp4_scale(amax: Float32[AnyArray, "*G"]) -> Float32[AnyArray, "*G"]:
    """Power-of-two scale of an E2M1 group: pow2ceil(max(amax, 6 * 2^-126) / 6), so that amax / scale <= 6."""
    return pow2ceil(namespace(amax).maximum(amax, MXFP4_AMAX_FLOOR) * np.float32(1 / 6))


def nvfp4_scale(amax: Float32[AnyArray, "*G"]) -> Float32[AnyArray, "*G"]:
    """E4M3 scale of an E2M1 group: max(amax, 6 * 2^-9) / 6 rounded to E4M3, at most 448; NaN for a NaN amax.

    The smallest is 2^-9. An amax above 2784 saturates, and values beyond 6 * 448 with it.
    """
    xp = namespace(amax)
    ratio = divide_by_six(xp.clip(amax, NVFP4_AMAX_FLOOR, np.float32(6 * 448)))
    return xp.where(amax != amax, np.float32(np.nan), E4M3.round_magnitude(ratio))


def encode_e4m3_scale(scale: Float32[AnyArray, "*G"]) -> UInt8[AnyArray, "*G"]:
    """The byte of scales that `nvfp4_scale` made."""
    return namespace(scale).where(scale != scale, np.int32(127), E4M3.magnitude_code(scale)).astype(np.uint8)


def divide_by_six(v: Float32[AnyArray, "*G"]) -> Float32[AnyArray, "*G"]:
    """v / 6 correctly rounded, for normal v, without a division.

    A compiler may turn `v / 6` into `v * (1/6)`, which is off by one bit for a third of all inputs and then breaks
    ties in the rounding to E4M3. Here the remainder v - 6q of that first guess is exact (each difference is of two
    numbers within a factor of two), and adding its sixth rounds once.
    """
    sixth = np.float32(1 / 6)
    guess = v * sixth
    remainder = (v - guess * np.float32(4)) - guess * np.float32(2)
    return guess + remainder * sixth


def group_amax_bits(bits: Int32[AnyArray, "*G size"]) -> Int32[AnyArray, "*G 1"]:
    """Bits of the largest magnitude along the last axis, from magnitude bits; a NaN wins over everything."""
    return bits.max(axis=-1, keepdims=True)
