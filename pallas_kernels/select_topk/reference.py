"""The k best entries of a row, as ascending indices. Ties go to the lower index; -inf is never selected."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32


def select_indices(scores: Float[Array, "*T L"], k: int) -> Int32[Array, "*T k"]:
    """Indices of the min(k, L) largest scores above -inf, ascending, then -1 for what is missing."""
    entries = scores.shape[-1]
    k = min(k, entries)
    values, indices = lax.top_k(_positive_zero(scores), k)  # stable: the lower index comes first among equals
    indices = jnp.where(values > -jnp.inf, indices, entries)
    indices = jnp.sort(indices.astype(jnp.int32), axis=-1)
    return jnp.where(indices < entries, indices, -1)


def _positive_zero(scores: Float[Array, "*T L"]) -> Float[Array, "*T L"]:
    """-0 and +0 are the same score; orderings by bits would tell them apart."""
    return jnp.where(scores == 0.0, 0.0, scores)
