"""Rows of a ring: the row of position p is p mod the number of rows, so there is nothing to allocate or free."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Int32, Shaped


def read_ring(ring: Shaped[Array, "B open ..."], position: Int32[Array, "B M"]) -> Shaped[Array, "B M ..."]:
    """Rows at positions (any integers)."""
    place = (position % ring.shape[1]).reshape(*position.shape, *[1] * (ring.ndim - 2))
    return jnp.take_along_axis(ring, place, axis=1)


def write_ring(
    ring: Shaped[Array, "B open ..."], rows: Shaped[Array, "B S ..."], start: Int32[Array, "B"],
    length: Int32[Array, "B"],
) -> Shaped[Array, "B open ..."]:  # fmt: skip
    """`rows` at positions start and on; of the first `length` only the newest min(length, ring rows) stay."""
    capacity = ring.shape[1]
    row = jnp.arange(rows.shape[1])
    kept = (row < length[:, None]) & (row >= length[:, None] - capacity)
    place = jnp.where(kept, (start[:, None] + row) % max(capacity, 1), capacity)  # past the end = dropped
    return ring.at[jnp.arange(ring.shape[0])[:, None], place].set(rows, mode="drop")
