"""Linear maps and norms. A weight is [out, in] and acts as y = x W^T; no linear of the text model has a bias."""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from widemesh.model.numerics import Numerics
from widemesh.model.params import Stored, matrix, param, value
from widemesh.sharding.tensor_parallel import TensorParallel

Kind = Literal["quantised", "bf16", "f32"]

_STORED: dict[Kind, Stored] = {"quantised": "fp8", "bf16": "bf16", "f32": "bf16"}

_WHOLE = TensorParallel()


class Linear(nnx.Module):
    """A linear of one of three kinds (docs/model.md, "Linear kinds").

    `quantised`: stored in FP8, activation quantised when the numerics say so. `bf16`: stored and computed in bf16.
    `f32`: stored in bf16, computed and returned in f32. `stored` is given where the stored form is not the kind's own.
    """

    def __init__(
        self, out: tuple[int, str | None], inp: tuple[int, str | None], *, kind: Kind, stored: Stored | None = None
    ):
        self.weight = param(out, inp, stored=stored or _STORED[kind])
        self.kind = kind

    def __call__(
        self, x: Float[Array, "... K"], numerics: Numerics, parts: TensorParallel = _WHOLE
    ) -> Float[Array, "... O"]:
        """The product, rounded. `parts` hold a part of the inputs each: their products are summed before."""
        if self.kind == "quantised":
            x = numerics.quantise_activation(x)
        y = parts.sum(product(x, matrix(self.weight), is_precise=self.kind == "f32"))
        return y if self.kind == "f32" else numerics.round(y)


def product(
    x: Float[Array, "... K"], weight: Float[Array, "O K"], *, is_precise: bool = False
) -> Float[Array, "... O"]:
    """x W^T, summed in f32 and returned in f32. Operands have the dtype of `x`, which holds the weight exactly.

    A product of two bfloat16 values is exact in f32, so bfloat16 operands are computed in f32 too; `is_precise` says
    that f32 operands must not be shortened by the device.
    """
    precision = lax.Precision.HIGHEST if is_precise and x.dtype == jnp.float32 else None
    return jnp.einsum(
        "...k,ok->...o", x, weight.astype(x.dtype), precision=precision, preferred_element_type=jnp.float32
    )


class RMSNorm(nnx.Module):
    """x / rms(x) * weight, in f32; the weight multiplies before the rounding."""

    def __init__(self, size: int, axis: str | None = None, *, eps: float):
        self.weight = param((size, axis))
        self.eps = eps

    def __call__(self, x: Float[Array, "... D"], numerics: Numerics) -> Float[Array, "... D"]:
        x = x.astype(jnp.float32)
        x = x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + self.eps)
        return numerics.round(value(self.weight) * x)
