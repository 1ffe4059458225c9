"""One vector as bytes: values, then scales. The codes are those of `VectorLayout`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

from widemesh.pallas_kernels.formats import (
    decode_fp8_rows,
    decode_mxfp4,
    decode_nvfp4,
    encode_fp8_rows,
    encode_mxfp4,
    encode_nvfp4,
    fake_quant_fp8,
    fake_quant_mxfp4,
    fake_quant_nvfp4,
)
from widemesh.pallas_kernels.layout import VectorLayout

_ENCODE = {"fp8": encode_fp8_rows, "nvfp4": encode_nvfp4, "mxfp4": encode_mxfp4}
_DECODE = {"fp8": decode_fp8_rows, "nvfp4": decode_nvfp4, "mxfp4": decode_mxfp4}
_FAKE_QUANT = {"fp8": fake_quant_fp8, "nvfp4": fake_quant_nvfp4, "mxfp4": fake_quant_mxfp4}


def encode_vectors(x: Float[Array, "*G D"], layout: VectorLayout) -> UInt8[Array, "*G bytes"]:
    """Records of f32 vectors."""
    if layout.code == "f32":
        return jax.lax.bitcast_convert_type(x, jnp.uint8).reshape(*x.shape[:-1], layout.num_bytes)
    return jnp.concatenate(_ENCODE[layout.code](x), axis=-1)  # type: ignore[arg-type]


def decode_vectors(record: UInt8[Array, "*G bytes"], layout: VectorLayout) -> Float[Array, "*G D"]:
    """f32 vectors of `encode_vectors`."""
    return decode_parts(record[..., : layout.value_bytes], record[..., layout.value_bytes :], layout)


def decode_parts(
    values: UInt8[Array, "*G value_bytes"], scales: UInt8[Array, "*G scale_bytes"], layout: VectorLayout
) -> Float[Array, "*G D"]:
    """f32 vectors from values and scales that lie apart."""
    if layout.code == "f32":
        return jax.lax.bitcast_convert_type(values.reshape(*values.shape[:-1], layout.dim, 4), jnp.float32)
    return _DECODE[layout.code](values, scales)  # type: ignore[return-value]


def fake_quant(x: Float[Array, "*G D"], layout: VectorLayout) -> Float[Array, "*G D"]:
    """`decode_vectors(encode_vectors(x))`, as arithmetic that fuses: what a step sees of what it stores."""
    return x if layout.code == "f32" else _FAKE_QUANT[layout.code](x)
