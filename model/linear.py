"""Linear maps and norms. A weight is [out, in] and acts as y = x W^T; no linear of the text model has a bias."""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from widemesh.model.numerics import Numerics
from widemesh.model.params import param, value

Kind = Literal["quantised", "bf16", "f32"]


class Linear(nnx.Module):
    """A linear of one of three kinds (docs/model.md, "Linear kinds").

    `quantised`: stored in FP8, activation quantised when the numerics say so. `bf16`: stored and computed in bf16.
    `f32`: stored in bf16, computed and returned in f32.
    """

    def __init__(self, out: tuple[int, str | None], inp: tuple[int, str | None], *, kind: Kind):
        self.weight = param(out, inp)
        self.kind = kind

    def __call__(self, x: Float[Array, "... K"], numerics: Numerics) -> Float[Array, "... O"]:
        if self.kind == "quantised":
            x = numerics.quantise_activation(x)
        precision = lax.Precision.HIGHEST if self.kind == "f32" else None
        y = jnp.einsum("...k,ok->...o", x, value(self.weight), precision=precision)
        return y if self.kind == "f32" else numerics.round(y)


class RMSNorm(nnx.Module):
    """x / rms(x) * weight, in f32; the weight multiplies before the rounding."""

    def __init__(self, size: int, axis: str | None = None, *, eps: float):
        self.weight = param((size, axis))
        self.eps = eps

    def __call__(self, x: Float[Array, "... D"], numerics: Numerics) -> Float[Array, "... D"]:
        x = x.astype(jnp.float32)
        x = x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + self.eps)
        return numerics.round(value(self.weight) * x)
