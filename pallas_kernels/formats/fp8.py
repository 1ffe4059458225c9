"""FP8: E4M3 values with one E8M0 scale per 32 values of a row, or per 32 x 32 block of a matrix.

Rows of 32 hold activations, window KV and Engram tables; blocks hold dense weights. Edge groups and blocks may be
partial. Formulas: docs/model.md, "Quantised caches" and "Weight storage".
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Float32, UInt8

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
    encode_e8m0,
    fp8_scale,
    group_amax_bits,
    power_reciprocal,
)
from widemesh.pallas_kernels.formats.small_float import E4M3

FP8_GROUP = 32


def encode_fp8_rows(x: Float[AnyArray, "*G D"]) -> tuple[UInt8[AnyArray, "*G D"], UInt8[AnyArray, "*G groups"]]:
    """E4M3 codes and E8M0 scale bytes, one scale per 32 values of the last axis (a short last group as if zero-padded).

    A group that holds NaN or infinity gets the scale 255 and decodes to NaN.
    """
    groups = split_groups(as_float32(x), FP8_GROUP)
    codes, scale = _encode(groups, from_bits(group_amax_bits(to_bits(groups) & MAGNITUDE_BITS)))
    return join_groups(codes, x.shape[-1]), encode_e8m0(scale[..., 0])


def decode_fp8_rows(
    codes: UInt8[AnyArray, "*G D"], scales: UInt8[AnyArray, "*G groups"]
) -> Float32[AnyArray, "*G D"]:
    """Values of `encode_fp8_rows`."""
    values = E4M3.decode(split_groups(codes, FP8_GROUP)) * decode_e8m0(scales)[..., None]
    return join_groups(values, codes.shape[-1])


def encode_fp8_blocks(w: Float[AnyArray, "O I"]) -> tuple[UInt8[AnyArray, "O I"], UInt8[AnyArray, "bo bi"]]:
    """E4M3 codes and E8M0 scale bytes, one scale per 32 x 32 block; blocks at the far edges may be partial."""
    groups = split_groups(as_float32(w), FP8_GROUP)  # [O, bi, 32]
    row_amax = from_bits(group_amax_bits(to_bits(groups) & MAGNITUDE_BITS))[..., 0]
    block_amax = from_bits(group_amax_bits(to_bits(split_groups(row_amax.T, FP8_GROUP))))[..., 0].T  # [bo, bi]
    codes, _ = _encode(groups, _per_row(block_amax, w.shape[0])[..., None])
    return join_groups(codes, w.shape[1]), encode_e8m0(fp8_scale(block_amax))


def decode_fp8_blocks(codes: UInt8[AnyArray, "O I"], scales: UInt8[AnyArray, "bo bi"]) -> Float32[AnyArray, "O I"]:
    """Values of `encode_fp8_blocks`."""
    row_scale = _per_row(decode_e8m0(scales), codes.shape[0])
    values = E4M3.decode(split_groups(codes, FP8_GROUP)) * row_scale[..., None]
    return join_groups(values, codes.shape[1])


def _encode(
    groups: Float32[AnyArray, "*G size"], amax: Float32[AnyArray, "*G 1"]
) -> tuple[UInt8[AnyArray, "*G size"], Float32[AnyArray, "*G 1"]]:
    bits = to_bits(groups)
    scale = fp8_scale(amax)
    rounded = E4M3.round_magnitude(from_bits(bits & MAGNITUDE_BITS) * power_reciprocal(scale))
    return (E4M3.magnitude_code(rounded) | E4M3.sign_code(bits)).astype(np.uint8), scale


def _per_row(blocks: AnyArray, rows: int) -> AnyArray:
    """[bo, bi] values of blocks -> [rows, bi], the value of each row's block."""
    return namespace(blocks).repeat(blocks, FP8_GROUP, axis=0)[:rows]
