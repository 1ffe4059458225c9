"""Bit-exact FP8 and FP4 codecs, for NumPy arrays (checkpoints) and JAX arrays (programs) alike."""

from widemesh.pallas_kernels.formats.fake_quant import fake_quant_fp8, fake_quant_mxfp4, fake_quant_nvfp4
from widemesh.pallas_kernels.formats.fp4 import (
    MXFP4_GROUP,
    NVFP4_GROUP,
    decode_mxfp4,
    decode_nvfp4,
    encode_mxfp4,
    encode_nvfp4,
    pack_nibbles,
    unpack_nibbles,
)
from widemesh.pallas_kernels.formats.fp8 import (
    FP8_GROUP,
    decode_fp8_blocks,
    decode_fp8_rows,
    encode_fp8_blocks,
    encode_fp8_rows,
)
from widemesh.pallas_kernels.formats.scales import decode_e8m0, encode_e8m0, pow2ceil
from widemesh.pallas_kernels.formats.small_float import E2M1, E4M3, SmallFloat

__all__ = [
    "E2M1",
    "E4M3",
    "FP8_GROUP",
    "MXFP4_GROUP",
    "NVFP4_GROUP",
    "SmallFloat",
    "decode_e8m0",
    "decode_fp8_blocks",
    "decode_fp8_rows",
    "decode_mxfp4",
    "decode_nvfp4",
    "encode_e8m0",
    "encode_fp8_blocks",
    "encode_fp8_rows",
    "encode_mxfp4",
    "encode_nvfp4",
    "fake_quant_fp8",
    "fake_quant_mxfp4",
    "fake_quant_nvfp4",
    "pack_nibbles",
    "pow2ceil",
    "unpack_nibbles",
]
