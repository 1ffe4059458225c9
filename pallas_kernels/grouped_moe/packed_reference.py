"""The packed grouped MoE, the specification: decode the matrices, then the grouped MoE on values."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from widemesh.pallas_kernels.grouped_moe.expert import ExpertMath
from widemesh.pallas_kernels.grouped_moe.op import grouped_moe
from widemesh.pallas_kernels.grouped_moe.packed import PackedExperts
from widemesh.pallas_kernels.route import count_rows


def moe_packed_reference(
    x: Float[Array, "T D"],
    slots: Int32[Array, "T K"],
    weights: Float32[Array, "T K"],
    experts: PackedExperts,
    math: ExpertMath,
    *,
    implementation: str | None = None,
) -> tuple[Float32[Array, "T D"], Int32[Array, "X"]]:
    """As `grouped_moe_packed`; `implementation` is that of `grouped_moe`."""
    held = experts.held
    matrices = (experts.w1.decode(), experts.w3.decode(), experts.w2.decode())
    out = grouped_moe(x.astype(jnp.float32), slots, weights, *matrices, math, implementation=implementation)
    return out, count_rows(slots, held)
