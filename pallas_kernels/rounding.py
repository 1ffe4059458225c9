"""Rounding to bfloat16 inside f32 arithmetic."""

from __future__ import annotations

from jax import lax
from jaxtyping import Array, Float


def round_bf16(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Nearest bfloat16 value, kept in f32.

    `reduce_precision` rather than a pair of converts: XLA is free to drop f32 -> bf16 -> f32 pairs.
    """
    return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)


def maybe_round_bf16(x: Float[Array, "..."], on: bool) -> Float[Array, "..."]:
    """`round_bf16` behind a static switch."""
    return round_bf16(x) if on else x
