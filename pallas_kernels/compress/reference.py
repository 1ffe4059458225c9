"""Compressed entries: pooling of a group of tokens into one latent, and the whole way from projections to pages.

Formulas: docs/model.md, "Compressor", "Index keys" and "Quantised caches". B requests with S rows each, H values per
latent, J per index key. All arithmetic is f32.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32, UInt8

from widemesh.pallas_kernels.compress.ring import read_ring, write_ring
from widemesh.pallas_kernels.layout import SourceLayout
from widemesh.pallas_kernels.paged_cache import write_source
from widemesh.pallas_kernels.rounding import maybe_round_bf16


def pool_group(values: Float[Array, "*M r H"], gates: Float[Array, "*M r H"]) -> Float[Array, "*M H"]:
    """Sum over the r tokens of a group, weighted per channel by the softmax of the gates over those tokens (f32).

    Formula: docs/model.md, "Compressor".
    """
    return jnp.sum(jax.nn.softmax(gates, axis=-2) * values, axis=-2)


def num_groups(rows: int, ratio: int) -> int:
    """Groups that a step of `rows` rows touches at most: ceil((rows + ratio - 1) / ratio)."""
    return (rows + 2 * ratio - 2) // ratio


def pool_step(
    values: Float[Array, "B S H"],
    gates: Float[Array, "B S H"],
    ring: Float[Array, "B open 2 H"],
    start: Int32[Array, "B"],
    length: Int32[Array, "B"],
    *,
    ratio: int,
) -> tuple[Float[Array, "B M H"], Int32[Array, "B M"], Bool[Array, "B M"]]:
    """Pooled groups from the one that `start` is in, their entry numbers, and whether their last token is valid.

    Up to ratio - 1 tokens of the first group come from the ring.
    """
    new = jnp.stack([values, gates], axis=2)
    before = read_ring(ring, start[:, None] - (ratio - 1) + jnp.arange(ratio - 1))
    both = jnp.concatenate([before, new], axis=1)  # row q - start + ratio - 1 holds position q
    groups = num_groups(values.shape[1], ratio)
    index = (start // ratio)[:, None] + jnp.arange(groups)
    place = (index * ratio)[..., None] + jnp.arange(ratio) - start[:, None, None] + ratio - 1
    place = jnp.minimum(place, both.shape[1] - 1).reshape(values.shape[0], -1)
    grouped = jnp.take_along_axis(both, place[:, :, None, None], axis=1)
    grouped = grouped.reshape(values.shape[0], groups, ratio, 2, -1)
    pooled = pool_group(grouped[..., 0, :], grouped[..., 1, :])
    return pooled, index, (index + 1) * ratio <= (start + length)[:, None]


def compress_and_store(
    values: Float[Array, "B S H"],
    gates: Float[Array, "B S H"] | None,
    ring: Float[Array, "B open 2 H"],
    norm_weight: Float[Array, "H"],
    key_weight: Float[Array, "J H"],
    key_norm_weight: Float[Array, "J"],
    cos: Float[Array, "positions pairs"],
    sin: Float[Array, "positions pairs"],
    start: Int32[Array, "B"],
    length: Int32[Array, "B"],
    write_from: Int32[Array, "B"],
    pages: UInt8[Array, "pages page_bytes"],
    table: Int32[Array, "B P"],
    *,
    source: SourceLayout,
    eps: float,
    bf16_rounding: bool,
) -> tuple[UInt8[Array, "pages page_bytes"], Float[Array, "B open 2 H"]]:
    """See `op.compress_and_store`."""
    ratio, rows = source.ratio, jnp.arange(values.shape[1], dtype=jnp.int32)
    if gates is None:
        pooled, index, complete = values, start[:, None] + rows, rows < length[:, None]
    else:
        pooled, index, complete = pool_step(values, gates, ring, start, length, ratio=ratio)
        ring = write_ring(ring, jnp.stack([values, gates], axis=2), start, length)
    latent = rms_norm(maybe_round_bf16(pooled, bf16_rounding), norm_weight, eps, bf16_rounding)
    key = jnp.einsum("bmh,jh->bmj", latent, key_weight.astype(jnp.float32), precision=lax.Precision.HIGHEST)
    key = maybe_round_bf16(key, bf16_rounding)
    key = rms_norm(key, key_norm_weight, eps, bf16_rounding)
    position = index * ratio  # of a group's first token
    entry = maybe_round_bf16(rotate_last(latent, cos, sin, position), bf16_rounding)
    key = maybe_round_bf16(rotate_last(key, cos, sin, position), bf16_rounding)
    is_new = complete & (position >= write_from[:, None])
    return write_source(pages, table, index, is_new, entry, key, source), ring


def rms_norm(
    x: Float[Array, "*G H"], weight: Float[Array, "H"], eps: float, bf16_rounding: bool
) -> Float[Array, "*G H"]:
    """x / rms(x) * weight; the weight multiplies before the rounding."""
    x = x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    return maybe_round_bf16(weight * x, bf16_rounding)


def rotate_last(
    x: Float[Array, "B M H"],
    cos: Float[Array, "positions pairs"],
    sin: Float[Array, "positions pairs"],
    position: Int32[Array, "B M"],
) -> Float[Array, "B M H"]:
    """Turn the last 2 * pairs values of x, adjacent ones together; positions past the tables read their last row."""
    cos, sin = cos.at[position].get(mode="clip"), sin.at[position].get(mode="clip")
    dims = 2 * cos.shape[-1]
    rest, turned = x[..., :-dims], x[..., -dims:]
    even, odd = turned[..., 0::2], turned[..., 1::2]
    turned = jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1).reshape(turned.shape)
    return jnp.concatenate([rest, turned], axis=-1)
