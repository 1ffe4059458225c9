"""Dispatch of the grouped mixture of experts."""

from __future__ import annotations

from jaxtyping import Array, Float, Int32

from widemesh.pallas_kernels.grouped_moe.expert import ExpertMath
from widemesh.pallas_kernels.grouped_moe.grouped import moe_grouped
from widemesh.pallas_kernels.grouped_moe.reference import moe_dense

# Below this many rows per expert the batches are mostly padding and reading every expert once is cheaper.
_GROUPED_FROM_ROWS = 2
# FLOP of the dense form that take about as long (0.3 ms on two CPU cores) as the sorting and gathering of the grouped
# one, whose program is also several times larger.
_GROUPED_FROM_FLOP = 6e7
# Rows per expert in the equal batches, relative to a perfectly even load.
_CAPACITY_FACTOR = 1.25
_CAPACITY_MULTIPLE = 16


def grouped_moe(
    x: Float[Array, "T D"],
    slots: Int32[Array, "T K"],
    weights: Float[Array, "T K"],
    w1: Float[Array, "X F D"],
    w3: Float[Array, "X F D"],
    w2: Float[Array, "X D F"],
    math: ExpertMath,
    *,
    implementation: str | None = None,
) -> Float[Array, "T D"]:
    """Weighted sum of the selected experts held here (f32, [T, D]); slots outside 0..X-1 add nothing.

    `implementation` is "dense" or "grouped"; None chooses by the amount of work. Anything else raises ValueError.
    """
    t, k = slots.shape
    even = t * k / w1.shape[0]
    if implementation is None:
        is_large = even >= _GROUPED_FROM_ROWS and t > 16 and 6 * t * w1.size >= _GROUPED_FROM_FLOP
        implementation = "grouped" if is_large else "dense"
    if implementation == "dense":
        return moe_dense(x, slots, weights, w1, w3, w2, math)
    if implementation == "grouped":
        capacity = -(-int(even * _CAPACITY_FACTOR) // _CAPACITY_MULTIPLE) * _CAPACITY_MULTIPLE
        return moe_grouped(x, slots, weights, w1, w3, w2, math, capacity=min(max(capacity, _CAPACITY_MULTIPLE), t))
    raise ValueError(f"implementation={implementation!r} is unknown; use 'dense', 'grouped' or None")
