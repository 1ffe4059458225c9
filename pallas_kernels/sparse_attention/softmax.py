"""The online softmax of one block of keys, and its end: the same for both kinds of tensor core.

All in base 2: scores arrive as q . k, and `scale` = log2(e) / sqrt(H) goes into the exponent. Arrays are in the layout
of a wgmma accumulator, heads by keys.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

LAYOUT = plgpu.Layout.WGMMA
HEAD = LAYOUT.reduce(1)  # of a number per head
KEY = LAYOUT.reduce(0)  # of a number per key
FLOOR = -1e30  # of the running maximum: a row without keys gives zeros, not NaN


def nothing_yet(heads: int) -> tuple[jax.Array, jax.Array]:
    """Running maximum and sum of weights before the first block."""
    return (
        plgpu.layout_cast(jnp.full((heads,), FLOOR, jnp.float32), HEAD),
        plgpu.layout_cast(jnp.zeros((heads,), jnp.float32), HEAD),
    )


def weigh_block(
    scores: jax.Array, places: Any, top: jax.Array, total: jax.Array, dim: int
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """(weights f16 [heads, keys], the factor for what was summed so far, new maximum, new sum of weights)."""
    seen = plgpu.load(places, layout=KEY, optimized=False) >= 0
    seen = lax.broadcast_in_dim(seen, scores.shape, [1])
    scores = jnp.where(seen, scores * (dim**-0.5 * math.log2(math.e)), -jnp.inf)
    new_top = jnp.maximum(top, scores.max(axis=1))
    decay = jnp.exp2(top - new_top)
    weights = jnp.exp2(scores - lax.broadcast_in_dim(new_top, scores.shape, [0]))
    return weights.astype(jnp.float16), decay, new_top, total * decay + weights.sum(axis=1)


def normalise(acc: jax.Array, top: jax.Array, total: jax.Array, sink: Any) -> jax.Array:
    """The attention from the sum over all keys; `sink` f32 [heads] is a reference to log2(e) times the sinks."""
    weight = jnp.exp2(plgpu.load(sink, layout=HEAD, optimized=False) - top)
    return acc * lax.broadcast_in_dim(1.0 / (total + weight), acc.shape, [0])
