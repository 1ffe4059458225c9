"""Quantise and dequantise in one go: what a value is after a trip through a packed cache or a quantised linear.

Each function equals its codec's decode(encode(x)), zero signs included, and is elementwise arithmetic around one
maximum per group, so that it fuses into the program that calls it. Every result is exact in bfloat16 (an E4M3 value
times a power of two has 4 significant bits, an E2M1 value times an E4M3 scale at most 6), so the dtype is kept.
"""

from __future__ import annotations

from typing import cast

from jaxtyping import Array, Float

from widemesh.pallas_kernels.formats.bits import (
    MAGNITUDE_BITS,
    SIGN_BIT,
    AnyArray,
    as_float32,
    from_bits,
    join_groups,
    split_groups,
    to_bits,
)
from widemesh.pallas_kernels.formats.fp4 import MXFP4_GROUP, NVFP4_GROUP, nvfp4_magnitude_code
from widemesh.pallas_kernels.formats.fp8 import FP8_GROUP
from widemesh.pallas_kernels.formats.scales import (
    fp8_scale,
    group_amax_bits,
    mxfp4_scale,
    nvfp4_scale,
    power_reciprocal,
)
from widemesh.pallas_kernels.formats.small_float import E2M1, E4M3


def fake_quant_fp8(x: Float[Array, "*G D"]) -> Float[Array, "*G D"]:
    """`x` rounded to E4M3 with a power-of-two scale per 32 values of the last axis. Same dtype as `x`."""
    bits = to_bits(split_groups(as_float32(x), FP8_GROUP))
    magnitudes = bits & MAGNITUDE_BITS
    scale = fp8_scale(from_bits(group_amax_bits(magnitudes)))
    rounded = E4M3.round_magnitude(from_bits(magnitudes) * power_reciprocal(scale))
    return _signed(rounded * scale, bits, x)


def fake_quant_mxfp4(x: Float[Array, "*G D"]) -> Float[Array, "*G D"]:
    """`x` rounded to E2M1 with a power-of-two scale per 32 values of the last axis. Same dtype as `x`."""
    bits = to_bits(split_groups(as_float32(x), MXFP4_GROUP))
    magnitudes = bits & MAGNITUDE_BITS
    scale = mxfp4_scale(from_bits(group_amax_bits(magnitudes)))
    rounded = E2M1.round_magnitude(from_bits(magnitudes) * power_reciprocal(scale))
    return _signed(rounded * scale, bits, x)


def fake_quant_nvfp4(x: Float[Array, "*G D"]) -> Float[Array, "*G D"]:
    """`x` rounded to E2M1 with an E4M3 scale per 16 values of the last axis. Same dtype as `x`."""
    bits = to_bits(split_groups(as_float32(x), NVFP4_GROUP))
    magnitudes = bits & MAGNITUDE_BITS
    scale = nvfp4_scale(from_bits(group_amax_bits(magnitudes)))
    return _signed(E2M1.magnitude(nvfp4_magnitude_code(from_bits(magnitudes), scale)) * scale, bits, x)


def _signed(magnitude: AnyArray, bits: AnyArray, x: Array) -> Array:
    """Give the grouped magnitudes their signs back, and `x`'s shape and dtype."""
    signed = from_bits(to_bits(magnitude) | (bits & SIGN_BIT))
    return cast(Array, join_groups(signed, x.shape[-1]).astype(x.dtype))
