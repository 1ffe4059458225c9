"""FP4: E2M1 values, two to a byte, with an E8M0 scale per 32 values (MXFP4) or an E4M3 scale per 16 (NVFP4).

MXFP4 holds routed experts and the indexer's keys and queries; NVFP4, without a scale per tensor, holds compressed KV.
The low nibble is the even column. Formulas: docs/model.md, "Quantised caches" and "Weight storage".
"""

from __future__ import annotations

import jax
import numpy as np
from jaxtyping import Float, Float32, Int32, UInt8

from widemesh.pallas_kernels.formats.bits import (
    MAGNITUDE_BITS,
    AnyArray,
    as_float32,
    from_bits,
    join_groups,
    namespace,
    split_groups,
    to_bits,
)
from widemesh.pallas_kernels.formats.scales import (
    decode_e8m0,
    encode_e4m3_scale,
    encode_e8m0,
    group_amax_bits,
    mxfp4_scale,
    nvfp4_scale,
    power_reciprocal,
)
from widemesh.pallas_kernels.formats.small_float import E2M1, E4M3

MXFP4_GROUP = 32
NVFP4_GROUP = 16

# Midpoints between neighbouring E2M1 magnitudes. Midpoint i lies between codes i and i + 1, and a tie goes to the
# even code, so a magnitude at an odd midpoint counts as above it.
_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def encode_mxfp4(x: Float[AnyArray, "*G D"]) -> tuple[UInt8[AnyArray, "*G D/2"], UInt8[AnyArray, "*G groups"]]:
    """Packed E2M1 codes and E8M0 scale bytes, one scale per 32 values of the last axis, which must be even.

    A short last group is as if zero-padded. A group that holds NaN or infinity gets the scale 255 (NaN).
    """
    groups = split_groups(as_float32(x), MXFP4_GROUP)
    bits = to_bits(groups)
    magnitudes = bits & MAGNITUDE_BITS
    scale = mxfp4_scale(from_bits(group_amax_bits(magnitudes)))
    rounded = E2M1.round_magnitude(from_bits(magnitudes) * power_reciprocal(scale))
    codes = (E2M1.magnitude_code(rounded) | E2M1.sign_code(bits)).astype(np.uint8)
    return pack_nibbles(join_groups(codes, x.shape[-1])), encode_e8m0(scale[..., 0])


def decode_mxfp4(
    packed: UInt8[AnyArray, "*G D/2"], scales: UInt8[AnyArray, "*G groups"]
) -> Float32[AnyArray, "*G D"]:
    """Values of `encode_mxfp4`."""
    return _scaled(packed, decode_e8m0(scales), MXFP4_GROUP)


def encode_nvfp4(x: Float[AnyArray, "*G D"]) -> tuple[UInt8[AnyArray, "*G D/2"], UInt8[AnyArray, "*G groups"]]:
    """Packed E2M1 codes and E4M3 scale bytes, one scale per 16 values of the last axis, which must be even.

    Values are rounded as `value / scale` would be, see `nvfp4_magnitude_code`. A short last group is as if
    zero-padded. Infinity saturates; a group that holds NaN gets the scale 127 (NaN).
    """
    groups = split_groups(as_float32(x), NVFP4_GROUP)
    bits = to_bits(groups)
    magnitudes = bits & MAGNITUDE_BITS
    scale = nvfp4_scale(from_bits(group_amax_bits(magnitudes)))
    codes = (nvfp4_magnitude_code(from_bits(magnitudes), scale) | E2M1.sign_code(bits)).astype(np.uint8)
    return pack_nibbles(join_groups(codes, x.shape[-1])), encode_e4m3_scale(scale[..., 0])


def decode_nvfp4(
    packed: UInt8[AnyArray, "*G D/2"], scales: UInt8[AnyArray, "*G groups"]
) -> Float32[AnyArray, "*G D"]:
    """Values of `encode_nvfp4`."""
    return _scaled(packed, E4M3.decode(scales), NVFP4_GROUP)


def nvfp4_magnitude_code(
    magnitude: Float32[AnyArray, "*G size"], scale: Float32[AnyArray, "*G 1"]
) -> Int32[AnyArray, "*G size"]:
    """The E2M1 code of `magnitude / scale`, saturating at 6, without a division.

    The code is the number of midpoints below. A midpoint times an E4M3 scale is exact in float32, and a correctly
    rounded quotient reaches a midpoint only if the magnitude is exactly that product, so the comparisons decide as
    the true quotient does. A reciprocal would not: 0.03662109375 / 0.029296875 is a tie, its product with
    1 / 0.029296875 is above it.
    """
    code = namespace(magnitude).zeros_like(to_bits(magnitude))
    for i, midpoint in enumerate(_MIDPOINTS):
        edge = scale * np.float32(midpoint)
        above = magnitude >= edge if i % 2 else magnitude > edge
        code = code + above.astype(np.int32)
    return code


def pack_nibbles(codes: UInt8[AnyArray, "*G D"]) -> UInt8[AnyArray, "*G D/2"]:
    """Two 4-bit codes to a byte, the even column in the low nibble. Raises ValueError when D is odd."""
    if codes.shape[-1] % 2:
        raise ValueError(f"{codes.shape[-1]} values cannot be packed two to a byte; pad the last axis to an even width")
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: UInt8[AnyArray, "*G D/2"]) -> UInt8[AnyArray, "*G D"]:
    """The inverse of `pack_nibbles`."""
    pairs = namespace(packed).stack([packed & 15, packed >> 4], axis=-1)
    return pairs.reshape(*packed.shape[:-1], 2 * packed.shape[-1])


def _scaled(packed: AnyArray, scale: AnyArray, size: int) -> AnyArray:
    width = 2 * packed.shape[-1]
    if isinstance(packed, jax.Array):
        values = E2M1.decode(unpack_nibbles(packed))
    else:
        values = _BYTE_VALUES[packed].reshape(*packed.shape[:-1], width)
    return join_groups(split_groups(values, size) * scale[..., None], width)


_BYTE_VALUES = E2M1.decode(unpack_nibbles(np.arange(256, dtype=np.uint8)[:, None]))  # [256, 2], both values of a byte
