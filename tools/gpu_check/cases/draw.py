"""Random inputs, drawn on the device: page pools and tables, FP4 and FP8 bytes, lists of chosen numbers.

A key is an uint32 scalar and every draw a hash of it and of the element's number. jax's own generators are far better
and take a GPU's compiler half a minute for the parts of a page; this one takes a tenth of a second.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32, UInt8, UInt32

from widemesh.pallas_kernels.layout import PageLayout

_GRID = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # magnitudes of E2M1; their root mean square is 2.9
# Many pages repeat so few: offsets past 32 bits do not fall on the same one, as this number is a prime.
_DISTINCT_PAGES = 4093


def split(key: UInt32[Array, ""], count: int) -> list[UInt32[Array, ""]]:
    """Keys that are different from each other and from those of other keys."""
    return [_mix(_mix(key) + jnp.uint32(i + 1)) for i in range(count)]


def bits(key: UInt32[Array, ""], *shape: int) -> UInt32[Array, "..."]:
    """Hashed numbers of the elements, of which there may be 2^32."""
    number = lax.iota(jnp.uint32, math.prod(shape))
    return _mix(_mix(number + key) ^ key).reshape(shape)


def _mix(x: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """Mixes 32 bits, without collisions: multiplications by odd numbers and shifts."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def uniform(key: UInt32[Array, ""], *shape: int) -> Float[Array, "..."]:
    """Values in (0, 1)."""
    return ((bits(key, *shape) >> 9).astype(jnp.float32) + 0.5) * np.float32(2.0**-23)


def normal(
    key: UInt32[Array, ""], *shape: int, scale: float = 1.0, mean: float = 0.0, dtype: DTypeLike = jnp.float32
) -> Float[Array, "..."]:
    """Normal values."""
    return (mean + scale * math.sqrt(2.0) * lax.erf_inv(2 * uniform(key, *shape) - 1)).astype(dtype)


def octets(key: UInt32[Array, ""], *shape: int) -> UInt8[Array, "..."]:
    """Any bytes: pairs of E2M1 codes."""
    return (bits(key, *shape) >> 24).astype(jnp.uint8)


def between(
    key: UInt32[Array, ""], low: int, high: int, *shape: int, dtype: DTypeLike = jnp.int32
) -> Int32[Array, "..."]:
    """Integers in [low, high)."""
    return (low + (bits(key, *shape) % jnp.uint32(high - low)).astype(jnp.int32)).astype(dtype)


def fp4_values(key: UInt32[Array, ""], *shape: int, dtype: DTypeLike = jnp.bfloat16) -> Float[Array, "... J"]:
    """Values that MXFP4 holds exactly: E2M1 times 1/2, 1 or 2 per group of 32."""
    values, signs, powers = split(key, 3)
    grid = jnp.asarray(_GRID)[between(values, 0, 8, *shape)] * (2 * between(signs, 0, 2, *shape) - 1)
    scale = jnp.exp2(between(powers, -1, 2, *shape[:-1], shape[-1] // 32).astype(jnp.float32))
    return (grid * jnp.repeat(scale, 32, axis=-1)).astype(dtype)


def pages(key: UInt32[Array, ""], layout: PageLayout, count: int) -> UInt8[Array, "count page_bytes"]:
    """Packed pages: rows of values near 1, keys of values near 3 whose sums are exact in f32."""
    low, many = np.zeros(layout.page_bytes, np.uint32), np.full(layout.page_bytes, 256, np.uint32)
    for source in layout.sources:
        rows = np.arange(source.rows)[:, None] * source.row.num_bytes + np.arange(source.row.scale_bytes)
        rows += source.row_offset + source.row.value_bytes
        low[rows], many[rows] = 0x20, 25  # E4M3: 1/8 .. 1
        keys = source.key_scale_offset + np.arange(source.rows * source.key.scale_bytes)
        low[keys], many[keys] = 126, 3  # E8M0: 1/2 .. 2
    drawn = bits(key, min(count, _DISTINCT_PAGES), layout.page_bytes) >> 8
    return repeated((drawn % many + low).astype(jnp.uint8), count)


def repeated(rows: UInt8[Array, "n bytes"], count: int) -> UInt8[Array, "count bytes"]:
    """The rows over and over again."""
    whole = jnp.broadcast_to(rows[None], (-(-count // len(rows)), *rows.shape))
    return whole.reshape(-1, rows.shape[1])[:count]


def table(key: UInt32[Array, ""], requests: int, pages_per_request: int, count: int) -> Int32[Array, "B P"]:
    """Page tables that share no page, in a shuffled order."""
    return shuffled(key, count)[: requests * pages_per_request].reshape(requests, pages_per_request)


def shuffled(key: UInt32[Array, ""], count: int) -> Int32[Array, "count"]:
    """0 .. count - 1: one shuffled order per count, from a place on that the key says. Nothing to sort."""
    order = jnp.asarray(np.random.default_rng(count).permutation(count).astype(np.int32))
    return order[(jnp.arange(count) + between(key, 0, count)) % count]


def lengths(key: UInt32[Array, ""], low: int, high: int, *shape: int) -> Int32[Array, "..."]:
    """Tokens that requests have: mostly in [low, high), a sixth of them very few."""
    few, some, which = split(key, 3)
    short = between(few, 0, max(low // 8, 2), *shape)
    return jnp.where(uniform(which, *shape) < 1 / 6, short, between(some, low, high, *shape))


def chosen(key: UInt32[Array, ""], visible: Int32[Array, "*T"], k: int) -> Int32[Array, "*T k"]:
    """k different numbers below `visible`, ascending and spread; all of them and then -1 where there are fewer."""
    place, size = jnp.arange(k), max(k, 1)
    visible = visible[..., None]
    low, high = place * visible // size, (place + 1) * visible // size  # a range of its own for each
    spread = low + (uniform(key, *low.shape) * (high - low)).astype(jnp.int32)
    few = jnp.where(place < visible, place, -1)
    return jnp.where(visible >= k, jnp.minimum(spread, high - 1), few).astype(jnp.int32)
