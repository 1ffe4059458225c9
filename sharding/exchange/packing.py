"""Lists of destinations to packed send buffers: which row stands at which place, and where each went."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32, UInt32

_WORD = 4  # bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Packing:
    """T rows with up to J destinations each, in order of destination, then row, then position in the row's list."""

    counts: Int32[Array, "R"]  # of each destination
    place: Int32[Array, "T J"]  # of each entry; T * J for those that go nowhere
    entries: Int32[Array, "T*J"]  # row * J + j of the entry at each place; 0 past the last one


def pack(to: Int32[Array, "T J"], ranks: int) -> Packing:
    """Places of the entries of `to`, whose values are 0..ranks-1, or -1 for nowhere."""
    flat = to.reshape(-1)
    goes = flat[:, None] == jnp.arange(ranks, dtype=jnp.int32)
    upto = jnp.cumsum(goes, axis=0, dtype=jnp.int32)  # inclusive
    counts = jnp.sum(goes, axis=0, dtype=jnp.int32)
    begins = jnp.cumsum(counts, dtype=jnp.int32) - counts
    place = jnp.sum(jnp.where(goes, begins + upto - 1, 0), axis=1, dtype=jnp.int32)
    place = jnp.where(flat < 0, flat.size, place)
    numbers = jnp.arange(flat.size, dtype=jnp.int32)
    entries = jnp.zeros(flat.size, jnp.int32).at[place].set(numbers, mode="drop", unique_indices=True)
    return Packing(counts=counts, place=place.reshape(to.shape), entries=entries)


def distinct_ranks(slots: Int32[Array, "T K"], held: int, ranks: int) -> Int32[Array, "T J"]:
    """The ranks that hold at least one of a row's slots, ascending, each once, then -1. J = min(K, ranks)."""
    rank = jnp.where(slots < 0, -1, slots // held)
    hit = jnp.any(rank[:, :, None] == jnp.arange(ranks, dtype=jnp.int32), axis=1)  # [T, R]
    nth = jnp.cumsum(hit, axis=1, dtype=jnp.int32) - 1
    numbers = jnp.arange(min(slots.shape[1], ranks), dtype=jnp.int32)
    is_nth = hit[:, None, :] & (nth[:, None, :] == numbers[:, None])  # [T, J, R], at most one rank each
    return jnp.max(jnp.where(is_nth, jnp.arange(ranks, dtype=jnp.int32), -1), axis=2)


def to_words(
    x: Float[Array, "T D"], slots: Int32[Array, "T K"], weights: Float32[Array, "T K"]
) -> UInt32[Array, "T W"]:
    """Row, slots and weights side by side in whole words, so that they travel together.

    As integers, because no operation may take them for numbers on the way. A row of an odd number of 2-byte values is
    filled up with a zero.
    """
    per_word = _WORD // x.dtype.itemsize
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % per_word)))
    if per_word > 1:
        x = x.reshape(x.shape[0], -1, per_word)
    parts = (x, slots, weights.astype(jnp.float32))
    return jnp.concatenate([jax.lax.bitcast_convert_type(part, jnp.uint32) for part in parts], axis=1)


def from_words(
    words: UInt32[Array, "M W"], *, hidden: int, per_token: int, dtype: jnp.dtype
) -> tuple[Float[Array, "M D"], Int32[Array, "M K"], Float32[Array, "M K"]]:
    """Back to rows of `hidden` values of `dtype`, and `per_token` slots and weights."""
    values, slots, weights = jnp.split(words, (-2 * per_token, -per_token), axis=1)
    x = jax.lax.bitcast_convert_type(values, dtype).reshape(words.shape[0], -1)[:, :hidden]
    as_slots = jax.lax.bitcast_convert_type(slots, jnp.int32)
    return x, as_slots, jax.lax.bitcast_convert_type(weights, jnp.float32)
