"""Arguments of the op at small sizes. Their scores are exact in f32 in any order of summation."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from widemesh.pallas_kernels.layout import PageLayout
from widemesh.pallas_kernels.paged_cache import encode_vectors

GRID = np.float32([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def grid_values(rng, shape, exponents=(-1, 0, 1)):
    """Values that MXFP4 holds exactly: E2M1 times a power of two per group of 32."""
    codes = GRID[rng.integers(0, 8, shape)] * rng.choice(np.float32([-1, 1]), shape)
    scale = np.exp2(rng.choice(np.float32(exponents), (*shape[:-1], shape[-1] // 32)))
    return (codes * np.repeat(scale, 32, axis=-1)).astype(np.float32)


def arguments(*, b=2, s=1, heads=4, dim=32, pages=3, page_size=16, ratio=1, seed=0, record="packed"):
    """queries, weights, pages, table (pages in a shuffled order) and the source's layout.

    The last page of the pool is in no table; its keys decode to NaN where they are packed.
    """
    rng = np.random.default_rng(seed)
    layout = PageLayout.build(page_size=page_size, ratios=(2, ratio), head_dim=32, index_dim=dim, record=record)
    source = layout.sources[1]
    count = b * pages + 1
    data = rng.integers(0, 256, (count, layout.page_bytes), dtype=np.uint8)
    keys = grid_values(rng, (count, source.rows, dim))
    records = np.asarray(encode_vectors(jnp.asarray(keys), source.key))
    size, scale = source.key.value_bytes, source.key.scale_bytes
    for begin, part in (
        (source.key_offset, records[..., :size]), (source.key_scale_offset, records[..., size : size + scale])
    ):  # fmt: skip
        data[:, begin : begin + part[0].size] = part.reshape(count, -1)
    if scale:
        data[-1, source.key_scale_offset : source.key_scale_offset + source.rows * scale] = 255
    table = rng.permutation(count - 1).reshape(b, pages).astype(np.int32)
    queries = grid_values(rng, (b, s, heads, dim))
    weights = (rng.integers(-8, 9, (b, s, heads)) / 8).astype(np.float32)
    return queries, weights, data, table, source
