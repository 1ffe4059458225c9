"""Pooling of a group of tokens into one compressed latent: a channelwise softmax over the group."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def pool_group(values: Float[Array, "*M r H"], gates: Float[Array, "*M r H"]) -> Float[Array, "*M H"]:
    """Sum over the r tokens of a group, weighted per channel by the softmax of the gates over those tokens (f32).

    Formula: docs/model.md, "Compressor".
    """
    return jnp.sum(jax.nn.softmax(gates, axis=-2) * values, axis=-2)
