"""Grouped mixture of experts, the specification: every expert on every row, unselected rows weighted out.

T rows, K experts per row, X expert slots held here, D hidden, F expert width. Formula: docs/model.md, "Experts".
Also what runs for few rows: it reads each expert's weights once.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from widemesh.pallas_kernels.grouped_moe.expert import ExpertMath


def moe_dense(
    x: Float[Array, "T D"],
    slots: Int32[Array, "T K"],
    weights: Float[Array, "T K"],
    w1: Float[Array, "X F D"],
    w3: Float[Array, "X F D"],
    w2: Float[Array, "X D F"],
    math: ExpertMath,
) -> Float[Array, "T D"]:
    """Sum over the selected experts held here, f32, in slot order. Slots outside 0..X-1 add nothing."""
    held = jnp.arange(w1.shape[0])
    chosen = slots[:, :, None] == held  # [T, K, X]
    weight = jnp.sum(jnp.where(chosen, weights[:, :, None], 0.0), axis=1)  # [T, X]
    xq = math.quantise(x)
    gate = jnp.einsum("td,xfd->xtf", xq, w1)
    up = jnp.einsum("td,xfd->xtf", xq, w3)
    hidden = math.activate(gate, up) * weight.T[:, :, None]
    out = math.finish(jnp.einsum("xtf,xdf->xtd", math.quantise(math.round(hidden)), w2))
    return jnp.sum(out, axis=0)
