"""E2M1 codes of quantisation groups whose values lie in separate arrays: value c of every group in array c.

The decisions are those of `pallas_kernels.formats`, by calling its functions, which are elementwise.
"""

from __future__ import annotations

from typing import Any, cast

import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

from widemesh.pallas_kernels.formats import E2M1, encode_e8m0
from widemesh.pallas_kernels.formats.bits import MAGNITUDE_BITS, from_bits, to_bits
from widemesh.pallas_kernels.formats.fp4 import nvfp4_magnitude_code
from widemesh.pallas_kernels.formats.scales import encode_e4m3_scale, mxfp4_scale, nvfp4_scale, power_reciprocal
from widemesh.pallas_kernels.gpu import is_interpreted, swap
from widemesh.pallas_kernels.rounding import round_bf16


def encode_nvfp4_columns(columns: list[Float[Array, "*G"]]) -> tuple[list[UInt8[Array, "*G"]], UInt8[Array, "*G"]]:
    """The bytes of each group, even column in the low nibble, and the byte of its E4M3 scale."""
    bits = [to_bits(value) for value in columns]
    magnitudes = [word & MAGNITUDE_BITS for word in bits]
    scale = nvfp4_scale(from_bits(_largest(magnitudes)))
    codes = [
        nvfp4_magnitude_code(from_bits(magnitude), scale) | E2M1.sign_code(word)
        for magnitude, word in zip(magnitudes, bits, strict=True)
    ]
    return _packed(codes), cast(Array, encode_e4m3_scale(scale))


def encode_mxfp4_columns(columns: list[Float[Array, "*G"]]) -> tuple[list[UInt8[Array, "*G"]], UInt8[Array, "*G"]]:
    """The bytes of each group, even column in the low nibble, and the byte of its power-of-two scale."""
    bits = [to_bits(value) for value in columns]
    magnitudes = [word & MAGNITUDE_BITS for word in bits]
    scale = mxfp4_scale(from_bits(_largest(magnitudes)))
    reciprocal = power_reciprocal(scale)
    codes = [
        E2M1.magnitude_code(E2M1.round_magnitude(from_bits(magnitude) * reciprocal)) | E2M1.sign_code(word)
        for magnitude, word in zip(magnitudes, bits, strict=True)
    ]
    return _packed(codes), cast(Array, encode_e8m0(scale))


def rounded(x: Float[Array, "*G"], is_on: bool) -> Float[Array, "*G"]:
    """Nearest bfloat16 value, in f32, behind a static switch."""
    if not is_on:
        return x
    return round_bf16(x) if is_interpreted() else x.astype(jnp.bfloat16).astype(jnp.float32)


def _largest(words: list[Any]) -> Any:
    largest = words[0]
    for word in words[1:]:
        largest = jnp.maximum(largest, word)
    return largest


def _packed(codes: list[Any]) -> list[UInt8[Array, "*G"]]:
    return [(even | (odd << 4)).astype(jnp.uint8) for even, odd in zip(codes[0::2], codes[1::2], strict=True)]


swap(
    kernel="compress_kernel",
    missing="f32 to bfloat16 and back, which XLA on a CPU may drop",
    staged="lax.reduce_precision, which Mosaic does not lower",
)
