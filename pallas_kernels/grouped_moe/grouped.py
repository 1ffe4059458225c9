"""Grouped mixture of experts for many rows on a CPU: rows sorted by expert, equal batches, then the overflow.

Every expert first takes up to `capacity` of its rows in one batched product (matmul speed); what exceeds it is done
in blocks of rows, one expert at a time, as many as there are. No row is ever dropped: capacity is a speed choice.
XLA:CPU's ragged product is 10 to 20 times slower than the batched one; a loop over all blocks, which would waste no
rows, is half as fast, because it copies an expert's matrices for each.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from widemesh.pallas_kernels.grouped_moe.expert import ExpertMath

_OVERFLOW_ROWS = 64


def moe_grouped(
    x: Float[Array, "T D"],
    slots: Int32[Array, "T K"],
    weights: Float[Array, "T K"],
    w1: Float[Array, "X F D"],
    w3: Float[Array, "X F D"],
    w2: Float[Array, "X D F"],
    math: ExpertMath,
    *,
    capacity: int,
) -> Float[Array, "T D"]:
    """Sum over the selected experts held here, f32. Slots outside 0..X-1 add nothing."""
    t, k = slots.shape
    experts, d = w1.shape[0], x.shape[1]
    pairs = t * k
    flat = jnp.where((slots >= 0) & (slots < experts), slots, experts).reshape(pairs)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)  # pairs by expert, then by row
    first = jnp.sum(flat[:, None] < jnp.arange(experts + 1), axis=0, dtype=jnp.int32)  # [X + 1] into `order`
    rank = jnp.zeros(pairs, jnp.int32).at[order].set(jnp.arange(pairs, dtype=jnp.int32), unique_indices=True)
    rank = rank - first[flat]  # place of each pair among its expert's rows
    xq = math.quantise(x)
    flat_weights = weights.reshape(pairs)

    def rows_of(place: Int32[Array, "..."], end: Int32[Array, "..."]) -> tuple[Array, Array, Array]:
        """The pairs at places below `end` of `order`, their input rows and weights; past it some row of weight 0."""
        pair = jnp.where(place < end, order.at[place].get(mode="clip"), pairs)
        return pair, xq.at[pair // k].get(mode="clip"), flat_weights.at[pair].get(mode="fill", fill_value=0.0)

    _, rows, row_weights = rows_of(first[:experts, None] + jnp.arange(capacity), first[1:, None])
    stacks = {"w1": w1, "w3": w3, "w2": w2}
    out = math.run(rows, row_weights, lambda name, v: jnp.einsum("xck,xok->xco", v, stacks[name]))

    in_batch = (rank < capacity) & (flat < experts)
    source = jnp.where(in_batch, flat * capacity + rank, experts * capacity).reshape(t, k)
    flat_out = out.reshape(experts * capacity, d)
    total = flat_out.at[source[:, 0]].get(mode="fill", fill_value=0.0)
    for column in range(1, k):
        total = total + flat_out.at[source[:, column]].get(mode="fill", fill_value=0.0)
    if capacity >= t:
        return total

    excess = jnp.maximum(first[1:] - first[:experts] - capacity, 0)  # rows left over, per expert
    blocks = (excess + _OVERFLOW_ROWS - 1) // _OVERFLOW_ROWS
    ends = jnp.cumsum(blocks)

    def overflow(step: Int32[Array, ""], total: Float[Array, "T D"]) -> Float[Array, "T D"]:
        expert = jnp.sum(ends <= step, dtype=jnp.int32)
        block = step - (ends[expert] - blocks[expert])
        place = first[expert] + capacity + block * _OVERFLOW_ROWS + jnp.arange(_OVERFLOW_ROWS)
        pair, rows, row_weights = rows_of(place, first[expert + 1])
        out = math.run(rows, row_weights, lambda name, v: v @ stacks[name][expert].T)
        return total.at[pair // k].add(out, mode="drop")

    return lax.fori_loop(0, ends[-1], overflow, total)
