"""Results of the kernels: the attention itself, or parts of it that are joined afterwards."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32


def result_types(splits: int, rows: int, heads: int, dim: int, dtype: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
    """With one split the attention [1, R, N, H]; else f32 sums, maxima (base 2) and sums of weights of each split."""
    if splits == 1:
        return (jax.ShapeDtypeStruct((1, rows, heads, dim), dtype),)
    per_head = jax.ShapeDtypeStruct((splits, rows, heads), jnp.float32)
    return jax.ShapeDtypeStruct((splits, rows, heads, dim), jnp.float32), per_head, per_head


def join(
    acc: Float32[Array, "splits R N H"],
    top: Float32[Array, "splits R N"],
    total: Float32[Array, "splits R N"],
    sink: Float32[Array, "N"],
) -> Float32[Array, "R N H"]:
    """The attention from the parts of all splits; `sink` is log2(e) times the sinks. A part without keys counts 0."""
    highest = jnp.max(top, axis=0)
    share = jnp.exp2(top - highest)
    weight = jnp.sum(total * share, axis=0) + jnp.exp2(sink - highest)
    return jnp.sum(acc * share[..., None], axis=0) / weight[..., None]
