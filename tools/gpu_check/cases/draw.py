"""Random inputs, drawn on the device: page pools and tables, FP4 and FP8 bytes, lists of chosen numbers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32, UInt8

from widemesh.pallas_kernels.layout import PageLayout

_GRID = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # magnitudes of E2M1; their root mean square is 2.9
# Many pages repeat so few: offsets past 32 bits do not fall on the same one, as this number is a prime.
_DISTINCT_PAGES = 4093


def normal(
    key: Array, *shape: int, scale: float = 1.0, mean: float = 0.0, dtype: DTypeLike = jnp.float32
) -> Float[Array, "..."]:
    """Normal values."""
    return (mean + scale * jax.random.normal(key, shape, jnp.float32)).astype(dtype)


def octets(key: Array, *shape: int) -> UInt8[Array, "..."]:
    """Any bytes: pairs of E2M1 codes."""
    return jax.random.bits(key, shape, jnp.uint8)


def between(key: Array, low: int, high: int, *shape: int, dtype: DTypeLike = jnp.int32) -> Int32[Array, "..."]:
    """Integers in [low, high)."""
    return jax.random.randint(key, shape, low, high).astype(dtype)


def fp4_values(key: Array, *shape: int, dtype: DTypeLike = jnp.bfloat16) -> Float[Array, "... J"]:
    """Values that MXFP4 holds exactly: E2M1 times 1/2, 1 or 2 per group of 32."""
    values, signs, powers = jax.random.split(key, 3)
    grid = jnp.asarray(_GRID)[between(values, 0, 8, *shape)] * (2 * between(signs, 0, 2, *shape) - 1)
    scale = jnp.exp2(between(powers, -1, 2, *shape[:-1], shape[-1] // 32).astype(jnp.float32))
    return (grid * jnp.repeat(scale, 32, axis=-1)).astype(dtype)


def pages(key: Array, layout: PageLayout, count: int) -> UInt8[Array, "count page_bytes"]:
    """Packed pages: rows of values near 1, keys of values near 3 whose sums are exact in f32."""
    distinct = min(count, _DISTINCT_PAGES)
    parts: list[Array] = []
    for source in layout.sources:
        key, codes, scales = jax.random.split(key, 3)
        row = source.row
        values = octets(codes, distinct, source.rows, row.value_bytes)
        steps = between(scales, 0x20, 0x39, distinct, source.rows, row.scale_bytes, dtype=jnp.uint8)  # E4M3, 1/8 .. 1
        parts.append(jnp.concatenate([values, steps], axis=-1).reshape(distinct, -1))
    for source in layout.sources:
        key, codes, scales = jax.random.split(key, 3)
        parts.append(octets(codes, distinct, source.rows * source.key.value_bytes))
        steps = between(scales, 126, 129, distinct, source.rows * source.key.scale_bytes, dtype=jnp.uint8)  # 1/2 .. 2
        parts.append(steps)
    pool = jnp.concatenate(parts, axis=-1)
    return pool if count == distinct else pool[jnp.arange(count) % distinct]


def table(key: Array, requests: int, pages_per_request: int, count: int) -> Int32[Array, "B P"]:
    """Page tables that share no page, in a shuffled order."""
    order = jax.random.permutation(key, count)[: requests * pages_per_request]
    return order.reshape(requests, pages_per_request).astype(jnp.int32)


def lengths(key: Array, low: int, high: int, *shape: int) -> Int32[Array, "..."]:
    """Tokens that requests have: mostly in [low, high), a sixth of them very few."""
    few, some, which = jax.random.split(key, 3)
    short = between(few, 0, max(low // 8, 2), *shape)
    return jnp.where(jax.random.uniform(which, shape) < 1 / 6, short, between(some, low, high, *shape))


def chosen(key: Array, visible: Int32[Array, "*T"], k: int) -> Int32[Array, "*T k"]:
    """k different numbers below `visible`, ascending and spread; all of them and then -1 where there are fewer."""
    place = jnp.arange(k)
    spread = (place + jax.random.uniform(key, (*visible.shape, k))) * (visible[..., None] / max(k, 1))
    spread = jnp.minimum(spread.astype(jnp.int32), visible[..., None] - 1)
    few = jnp.where(place < visible[..., None], place, -1)
    return jnp.where(visible[..., None] >= 2 * k, spread, few).astype(jnp.int32)
