"""How one tensor is stored: dtypes and shapes on disk, and the way between them and float32 values.

A quantised weight has a partner, its E8M0 scales, named like it with the final `.weight` replaced by `.scale`.
Formulas: docs/model.md, "Weight storage".
"""

from __future__ import annotations

from typing import Literal, get_args

import ml_dtypes
import numpy as np
from jaxtyping import Float, Float32, Shaped

from widemesh.model.checkpoint.table import Kind, TensorSpec
from widemesh.pallas_kernels.formats import (
    FP8_GROUP,
    MXFP4_GROUP,
    decode_fp8_blocks,
    decode_fp8_rows,
    decode_mxfp4,
    encode_fp8_blocks,
    encode_fp8_rows,
    encode_mxfp4,
)

Form = Literal["plain", "quantized"]

BF16 = np.dtype(ml_dtypes.bfloat16)
F32 = np.dtype(np.float32)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)
PACKED_FP4 = np.dtype(np.int8)

_PLAIN: dict[Kind, np.dtype] = {"bf16": BF16, "f32": F32, "fp8": BF16, "fp4": BF16, "engram": BF16}
_QUANTIZED: dict[Kind, np.dtype] = {**_PLAIN, "fp8": E4M3, "fp4": PACKED_FP4, "engram": E4M3}


def check_form(form: str) -> None:
    """Raises ValueError for anything but a `Form`."""
    if form not in get_args(Form):
        raise ValueError(f"form={form!r} must be one of {', '.join(map(repr, get_args(Form)))}")


def stored_dtype(kind: Kind, form: Form) -> np.dtype:
    """The dtype in which `form` stores a tensor of `kind`. E4M3 and int8 weights come with scales."""
    return _PLAIN[kind] if form == "plain" else _QUANTIZED[kind]


def has_scale(dtype: np.dtype) -> bool:
    """Whether weights of this dtype have a scale partner."""
    return dtype in (E4M3, PACKED_FP4)


def scale_name(name: str) -> str:
    """The name of a quantised weight's scales."""
    return name.removesuffix(".weight") + ".scale"


def stored_shape(spec: TensorSpec, dtype: np.dtype) -> tuple[int, ...]:
    """Shape of the weight on disk: the logical one, with two columns to a byte when it is packed FP4."""
    return (*spec.shape[:-1], spec.shape[-1] // 2) if dtype == PACKED_FP4 else spec.shape


def scale_shape(spec: TensorSpec) -> tuple[int, ...]:
    """Shape of the scales of a quantised weight [O, I]; edge groups may be partial."""
    rows, columns = spec.shape
    if spec.kind == "fp8":
        return -(-rows // FP8_GROUP), -(-columns // FP8_GROUP)
    return rows, -(-columns // (MXFP4_GROUP if spec.kind == "fp4" else FP8_GROUP))


def decode(
    kind: Kind, weight: Shaped[np.ndarray, "*S"], scale: Shaped[np.ndarray, "a b"] | None
) -> Float32[np.ndarray, "*S"]:
    """Logical values of a stored tensor. `scale` is looked at for quantised weights only."""
    if not has_scale(weight.dtype):
        return np.asarray(weight, F32)
    assert scale is not None, "the reader checks that quantised weights have scales"
    codes, scales = weight.view(np.uint8), scale.view(np.uint8)
    if kind == "fp4":
        return np.asarray(decode_mxfp4(codes, scales))
    return np.asarray(decode_fp8_blocks(codes, scales) if kind == "fp8" else decode_fp8_rows(codes, scales))


def encode(spec: TensorSpec, values: Float[np.ndarray, "*S"], form: Form) -> list[tuple[str, np.ndarray]]:
    """The tensors, one or two, that store `values`: name and array of the stored dtype.

    Raises ValueError for a width that FP4 cannot pack.
    """
    dtype = stored_dtype(spec.kind, form)
    if not has_scale(dtype):
        return [(spec.name, np.ascontiguousarray(values.astype(dtype)))]
    if spec.kind == "fp4":
        codes, scales = encode_mxfp4(values)
    else:
        codes, scales = encode_fp8_blocks(values) if spec.kind == "fp8" else encode_fp8_rows(values)
    return [
        (spec.name, np.ascontiguousarray(codes).view(dtype)),
        (scale_name(spec.name), np.ascontiguousarray(scales).view(E8M0)),
    ]


def quantise(
    spec: TensorSpec, values: Float[np.ndarray, "*S"]
) -> tuple[Shaped[np.ndarray, "*S"], Shaped[np.ndarray, "a b"] | None]:
    """The quantised form of logical values: weight, and scales if its kind has some. Raises like `encode`."""
    (_, weight), *rest = encode(spec, values, "quantized")
    return weight, rest[0][1] if rest else None
