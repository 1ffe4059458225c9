"""Engram table rows inside a jitted step: the hashes of `engram_hash`, in 64-bit integers made of two uint32 words.

For steps whose token ids exist on the device only. Formulas: docs/model.md, "Engram".
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32, UInt32

from widemesh.model.config import ModelConfig
from widemesh.model.engram_hash import EngramHash


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Divisors:
    """Numbers from 2 to 2^31 - 1 to take remainders by, with the constants that make a division two products."""

    scaled: UInt32[Array, "..."]  # the divisor times 2^shift, which sets its top bit
    shift: UInt32[Array, "..."]  # 1 .. 30
    reciprocal: UInt32[Array, "..."]  # (2^64 - 1) // scaled - 2^32

    @classmethod
    def build(cls, numbers: np.ndarray) -> Divisors:
        """Constants for `numbers`, in their shape (host arrays). Raises ValueError for one outside 2 .. 2^31 - 1."""
        outside = (numbers < 2) | (numbers >= 2**31)
        if outside.any():
            raise ValueError(f"divisor {numbers[outside][0]} must lie between 2 and 2^31 - 1")
        bits = np.frexp(numbers.astype(np.float64))[1]
        shift = (32 - bits).astype(np.uint64)
        scaled = numbers.astype(np.uint64) << shift
        reciprocal = np.uint64(2**64 - 1) // scaled - np.uint64(2**32)
        parts: dict[str, Any] = {"scaled": scaled, "shift": shift, "reciprocal": reciprocal}
        return cls(**{name: part.astype(np.uint32) for name, part in parts.items()})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class EngramDeviceHash:
    """The constants of an `EngramHash` as arrays. An argument of the step, the same on every device, never baked in.

    Work per token: L·n products of 24 operations and L·columns remainders of 72, all on 32-bit integers and without a
    division, and one lookup in the token map. The released model takes about 3,700 operations (L = 2, n = 4,
    24 columns), and its arrays take 0.5 MB, almost all of it the token map.
    """

    token_map: Int32[Array, " V"]  # token id -> compressed id
    pad_compressed_id: Int32[Array, ""]
    multiplier_high: UInt32[Array, "L n"]  # newest token first
    multiplier_low: UInt32[Array, "L n"]
    primes: Divisors  # [L, columns]
    offsets: Int32[Array, "L columns"]  # first table row of each column

    @classmethod
    def build(cls, host: EngramHash) -> EngramDeviceHash:
        """The same hashes as `host`'s (host arrays)."""
        multipliers = host.multipliers.astype(np.uint64)
        parts: dict[str, Any] = {
            "token_map": host.token_map.astype(np.int32),
            "pad_compressed_id": np.int32(host.pad_compressed_id),
            "multiplier_high": (multipliers >> np.uint64(32)).astype(np.uint32),
            "multiplier_low": multipliers.astype(np.uint32),
            "offsets": host.offsets.astype(np.int32),
        }
        return cls(primes=Divisors.build(host.primes), **parts)

    @classmethod
    def abstract(cls, config: ModelConfig) -> EngramDeviceHash:
        """Shapes and dtypes of `build` for a model."""
        layers, columns = len(config.engram_layer_ids), config.num_engram_columns

        def array(*shape: int, dtype: Any = jnp.uint32) -> Any:
            return jax.ShapeDtypeStruct(shape, dtype)

        by_column = array(layers, columns)
        return cls(
            token_map=array(config.vocab_size, dtype=jnp.int32),
            pad_compressed_id=array(dtype=jnp.int32),
            multiplier_high=array(layers, config.engram_max_ngram_size),
            multiplier_low=array(layers, config.engram_max_ngram_size),
            primes=Divisors(scaled=by_column, shift=by_column, reciprocal=by_column),
            offsets=array(layers, columns, dtype=jnp.int32),
        )

    @property
    def history_len(self) -> int:
        """Tokens before the first that its longest n-gram still reads."""
        return self.multiplier_low.shape[1] - 1

    def rows(self, token_ids: Int32[Array, "B S"], tail: Int32[Array, "B h"]) -> Int32[Array, "B S L columns"]:
        """Table rows, offsets included, that each position of `token_ids` reads: those of `EngramHash.rows`.

        `tail` holds the `history_len` ids just before, oldest first. A negative id, in either array, stands for
        "before the start": from it on backwards an n-gram reads the pad id only. Other ids must lie within the
        vocabulary. Raises ValueError for a tail of another shape.
        """
        batch, length = token_ids.shape
        if tail.shape != (batch, self.history_len):
            raise ValueError(f"tail has shape {tail.shape}; give [batch, history_len] = {(batch, self.history_len)}, "
                             "filled with -1 before the start")
        ids = jnp.concatenate([tail, token_ids], axis=1)
        is_dead = ids < 0
        compressed = self.token_map[jnp.where(is_dead, 0, ids)]

        num_layers, num_columns = self.offsets.shape
        num_heads = num_columns // self.history_len
        is_cut = jnp.zeros((batch, length), bool)  # a negative id was met on the way back
        high = low = jnp.zeros((batch, length, num_layers), jnp.uint32)
        mixed: list[tuple[jax.Array, jax.Array]] = []  # of the 1-, 2-, ... grams
        for back in range(self.history_len + 1):
            start = self.history_len - back
            is_cut |= is_dead[:, start : start + length]
            token = jnp.where(is_cut, self.pad_compressed_id, compressed[:, start : start + length])
            factor_high, factor_low = self.multiplier_high[:, back], self.multiplier_low[:, back]
            word = token.astype(jnp.uint32)[:, :, None]
            high ^= word * factor_high + _high_product(word, factor_low)
            low ^= word * factor_low
            mixed.append((high, low))
        highs, lows = (jnp.stack(parts, axis=-1)[..., None] for parts in zip(*mixed[1:], strict=True))
        by_size = jax.tree.map(lambda array: array.reshape(num_layers, self.history_len, num_heads), self.primes)
        remainders = remainder(highs, lows, by_size)  # [B, S, L, n-gram size, head]
        return remainders.astype(jnp.int32).reshape(batch, length, num_layers, num_columns) + self.offsets


def next_tail(
    tail: Int32[Array, "B h"], token_ids: Int32[Array, "B S"], length: Int32[Array, "B"]
) -> Int32[Array, "B h"]:
    """The last h ids after the first `length` rows of `token_ids`, which follow `tail`. Later rows are ignored."""
    ids = jnp.concatenate([tail, token_ids], axis=1)
    return jnp.take_along_axis(ids, length[:, None] + jnp.arange(tail.shape[1], dtype=jnp.int32), axis=1)


def remainder(high: UInt32[Array, "..."], low: UInt32[Array, "..."], divisors: Divisors) -> UInt32[Array, "..."]:
    """(high·2^32 + low) mod the divisors, for every unsigned 64-bit number; shapes broadcast.

    Schoolbook division by a divisor with its top bit set: number and divisor are scaled alike, which makes the number
    three words long, and the remainder of the leading two words leads the third.
    """
    shift = divisors.shift
    rest = jnp.uint32(32) - shift
    first = _step(high >> rest, (high << shift) | (low >> rest), divisors)
    return _step(first, low << shift, divisors) >> shift


def _step(high: jax.Array, low: jax.Array, divisors: Divisors) -> jax.Array:
    """(high·2^32 + low) mod `divisors.scaled`, for high below it.

    Moeller and Granlund, "Improved division by invariant integers" (2011), algorithm 4: the reciprocal gives a
    quotient that is at most one off in either direction.
    """
    scaled, reciprocal = divisors.scaled, divisors.reciprocal
    fraction = high * reciprocal + low
    carry = (fraction < low).astype(jnp.uint32)
    quotient = _high_product(high, reciprocal) + high + carry + jnp.uint32(1)
    left = low - quotient * scaled
    left = jnp.where(left > fraction, left + scaled, left)
    return jnp.where(left >= scaled, left - scaled, left)


def _high_product(a: jax.Array, b: jax.Array) -> jax.Array:
    """Upper word of the 64-bit product, from halves: `lax.mulhi` cannot be compiled under a sharded mesh."""
    half = jnp.uint32(0xFFFF)
    a_low, a_high, b_low, b_high = a & half, a >> 16, b & half, b >> 16
    low, left, right = a_low * b_low, a_low * b_high, a_high * b_low
    carry = (low >> 16) + (left & half) + (right & half)  # below 3 * 2^16
    return a_high * b_high + (left >> 16) + (right >> 16) + (carry >> 16)
