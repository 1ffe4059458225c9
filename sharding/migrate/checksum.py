"""A checksum of each row over all its arrays: one pass, integers only, about eight operations a word.

    checksum = mix(seed) + sum over words i of mix(word[i] ^ i * C)    (mod 2^32)

`mix` is one to one on 32-bit words, so a row with one changed word, or with another seed, always has another checksum.
Words that changed places have the same one in about one case of 2^32, which is why every word's place goes into its
own `mix`: a plain or a weighted sum would let some swaps through by their form.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt32

from widemesh.sharding.migrate.words import array_words

# Odd, so that multiplying loses nothing; bits of each kind in every byte.
_PLACE, _FIRST, _SECOND = (np.uint32(x) for x in (0x9E3779B1, 0x7FEB352D, 0x846CA68B))


def row_checksums(rows: Any, seeds: UInt32[Array, "N"]) -> UInt32[Array, "N"]:
    """Of the rows of a tree of arrays [N, ...], each told apart by its seed as well."""
    total, begin = _mix(seeds), 0
    for leaf in jax.tree.leaves(rows):
        words = array_words(leaf)
        place = jnp.arange(begin, begin + words.shape[1], dtype=jnp.uint32)
        total = total + jnp.sum(_mix(words ^ (place * _PLACE)), axis=1, dtype=jnp.uint32)
        begin += words.shape[1]
    return total


def _mix(x: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    x = (x ^ (x >> 16)) * _FIRST
    x = (x ^ (x >> 15)) * _SECOND
    return x ^ (x >> 16)
