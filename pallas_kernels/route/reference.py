"""Replica lookup and load count. Both fuse into what stands around them on any device, so there is no other form.

    slot = expert_slots[expert, copy_turn(row, position, expert, copies[expert])]    (`replica_hash.py`)

A row's copy of an expert follows from its number and its position alone: no state, nothing to agree on, and a request
does not keep to one copy. T rows, K experts per row, E experts, C copies at most, X slots counted.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Int32

from widemesh.pallas_kernels import replica_hash


def choose_slots(
    experts: Int32[Array, "T K"], rows: Int32[Array, "T"], positions: Int32[Array, "T"],
    expert_slots: Int32[Array, "E C"], copies: Int32[Array, "E"],
) -> Int32[Array, "T K"]:  # fmt: skip
    """The slot that serves each row's experts; `rows` are numbers over all ranks. Expert -1 gives slot -1.

    `positions` are those of the rows in their sequences.
    """
    if expert_slots.shape[1] == 1:
        turn = jnp.zeros_like(experts)
    else:
        row, position, expert, most = (
            x.astype(jnp.uint32) for x in (rows[:, None], positions[:, None], experts, copies[experts])
        )
        turn = replica_hash.copy_turn(row, position, expert, most).astype(jnp.int32)
    return jnp.where(experts < 0, -1, expert_slots[experts, turn])


def count_rows(slots: Int32[Array, "T K"], held: int) -> Int32[Array, "X"]:
    """How many (row, k) pairs chose each of the slots 0 to held - 1; others count for nothing.

    Counted by comparing with every slot: one fused reduction, where adding in place would be a loop or atomics.
    """
    return jnp.sum(slots.reshape(-1, 1) == jnp.arange(held), axis=0, dtype=jnp.int32)
