"""Rows of several arrays side by side in 32-bit words, so that they travel together and every bit arrives.

N rows, W words of a row. An array whose row is not a whole number of words is filled up with zeros.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped, UInt32

_WORD = 4  # bytes


def array_words(rows: Shaped[Array, "N ..."]) -> UInt32[Array, "N W"]:
    """The words of one array, whose values have 1, 2 or 4 bytes."""
    per_word = _WORD // rows.dtype.itemsize
    flat = rows.reshape(len(rows), -1)
    if per_word > 1:
        flat = jnp.pad(flat, ((0, 0), (0, -flat.shape[1] % per_word))).reshape(len(rows), -1, per_word)
    return jax.lax.bitcast_convert_type(flat, jnp.uint32)


def to_words(rows: Any) -> UInt32[Array, "N W"]:
    """The words of a tree of arrays [N, ...], in the order of its leaves."""
    return jnp.concatenate([array_words(leaf) for leaf in jax.tree.leaves(rows)], axis=1)


def from_words(words: UInt32[Array, "N W"], like: Any) -> Any:
    """Back to a tree of arrays [N, ...] as `like` has them, whose own first axis may have any length."""
    leaves, structure = jax.tree.flatten(like)
    parts, begin = [], 0
    for leaf in leaves:
        values = math.prod(leaf.shape[1:])
        end = begin + -(-values * leaf.dtype.itemsize // _WORD)
        flat = jax.lax.bitcast_convert_type(words[:, begin:end], leaf.dtype).reshape(len(words), -1)
        parts.append(flat[:, :values].reshape(len(words), *leaf.shape[1:]))
        begin = end
    return jax.tree.unflatten(structure, parts)
