"""Rows grouped by expert on the device: which expert and which rows each block of a grouped product takes.

Pairs (row, k) of an expert fill whole blocks of `block_rows` places, in order of expert, then row, then k. The number
of blocks is bounded statically by what any routing can need, so no pair is ever dropped; those in use are a value.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Grouping:
    """Blocks of places. Places past an expert's last pair, and all those of unused blocks, repeat row 0 at weight 0."""

    counts: Int32[Array, "X"]  # pairs of each expert slot
    block_expert: Int32[Array, "blocks"]  # ascending; X - 1 in unused blocks
    used: Int32[Array, "1"]  # blocks in use: the first ones
    rows: Int32[Array, "places"]  # the row that each place takes
    weights: Float32[Array, "places"]
    place: Int32[Array, "T K"]  # where each pair went; the number of places for a pair of no expert here


def num_blocks(pairs: int, held: int, block_rows: int) -> int:
    """The most blocks that `pairs` pairs on `held` experts can need: every expert may leave one block unfilled."""
    return pairs // block_rows + min(held, pairs)


def group_rows(slots: Int32[Array, "T K"], weights: Float32[Array, "T K"], *, held: int, block_rows: int) -> Grouping:
    """The blocks of the pairs whose slot is in 0..held-1. At least one pair."""
    t, k = slots.shape
    pairs = t * k
    blocks = num_blocks(pairs, held, block_rows)
    places = blocks * block_rows
    expert = jnp.where((slots >= 0) & (slots < held), slots, held).reshape(pairs)
    order = jnp.argsort(expert, stable=True).astype(jnp.int32)
    # Counted by comparing with every expert: one small fused reduction, where a search would be a loop of launches.
    start = jnp.sum(expert[:, None] < jnp.arange(held + 1), axis=0, dtype=jnp.int32)  # into `order`
    counts = start[1:] - start[:-1]
    block_end = jnp.cumsum((counts + block_rows - 1) // block_rows, dtype=jnp.int32)
    block_start = jnp.concatenate([jnp.zeros(1, jnp.int32), block_end[:-1]])

    rank = jnp.zeros(pairs, jnp.int32).at[order].set(jnp.arange(pairs, dtype=jnp.int32), unique_indices=True)
    clipped = jnp.minimum(expert, held - 1)
    place = block_start[clipped] * block_rows + rank - start[clipped]
    place = jnp.where(expert < held, place, places)
    pair_row = jnp.arange(pairs, dtype=jnp.int32) // k
    block_expert = jnp.sum(block_end <= jnp.arange(blocks)[:, None], axis=1, dtype=jnp.int32)
    return Grouping(
        counts=counts,
        block_expert=jnp.minimum(block_expert, held - 1),
        used=block_end[-1:],
        rows=jnp.zeros(places, jnp.int32).at[place].set(pair_row, mode="drop", unique_indices=True),
        weights=jnp.zeros(places, jnp.float32).at[place].set(weights.reshape(pairs), mode="drop", unique_indices=True),
        place=place.reshape(t, k),
    )
