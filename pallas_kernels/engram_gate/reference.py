"""Engram: gate a looked-up value by how well its key matches each residual stream, and add it.

    c[j]    = (sum_d h[j] * qk[j] * key[j]) * rsqrt(mean h[j]^2) * rsqrt(mean key[j]^2) / sqrt(D)
    gate[j] = sigmoid(copysign(sqrt(max(|c|, 1e-6)), c))
    h[j]   += gate[j] * value

Formula: docs/model.md, "Engram". C streams, D hidden; the statistics are per stream. All arithmetic is f32.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

MIN_MATCH = 1e-6


def engram_gate(
    streams: Float[Array, "*T C D"], key: Float[Array, "*T C D"], qk: Float[Array, "C D"], *, eps: float
) -> Float[Array, "*T C"]:
    """Gate of each stream. `qk` is the product of the query and key norm weights, the only form they act in."""
    h = streams.astype(jnp.float32)
    match = jnp.sum(h * qk * key, axis=-1)
    match = match * lax.rsqrt(jnp.mean(h * h, axis=-1) + eps) * lax.rsqrt(jnp.mean(key * key, axis=-1) + eps)
    match = match * h.shape[-1] ** -0.5
    return jax.nn.sigmoid(jnp.copysign(jnp.sqrt(jnp.maximum(jnp.abs(match), MIN_MATCH)), match))


def engram_update(
    streams: Float[Array, "*T C D"], gate: Float[Array, "*T C"], value: Float[Array, "*T D"]
) -> Float[Array, "*T C D"]:
    """Streams with the gated value added; the same value goes to every stream (f32)."""
    return streams.astype(jnp.float32) + gate[..., None] * value[..., None, :]
