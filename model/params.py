"""Parameters: described once, in the module that uses them, by shape and logical axes.

A module holds abstract parameters; loading, sharding and random initialisation are maps over that description. A
parameter's path in the module tree is its tensor name in a released checkpoint (`layers.3.attn.wq_a.weight`);
expert matrices are stacked over the experts on a leading axis (`layers.3.ffn.experts.w1`).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx


def param(*dims: tuple[int, str | None]) -> nnx.Param:
    """An abstract f32 parameter from (size, logical axis) pairs."""
    shape = tuple(size for size, _ in dims)
    return nnx.Param(jax.ShapeDtypeStruct(shape, jnp.float32), axes=tuple(axis for _, axis in dims))


def value(p: nnx.Param) -> jax.Array:
    """The array of a parameter."""
    return p[...]
