"""Where each key of each query row lies, as one list per row: what the kernels walk through.

A list holds the window first and the selected entries after it, each part filled up with -1 to whole blocks of
`BLOCK` keys. A place is the number of a window row (b * M + row) or of an entry among all entries of the pool
(page * rows per page + row of the page); -1 is a key that the row does not see. At k = 512 and window 128 a list is
2,560 bytes, 1.2 % of the keys that it points to, and saves the kernel a page-table look-up per key.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Int32

from widemesh.pallas_kernels.layout import SourceLayout

BLOCK = 64  # keys that are dequantised and multiplied together


def window_blocks(window: int) -> int:
    """Blocks that the window takes in every list."""
    return -(-window // BLOCK)


def key_places(
    origin: Int32[Array, "B"],
    start: Int32[Array, "B"],
    first: Int32[Array, "B"],
    table: Int32[Array, "B P"],
    indices: Int32[Array, "B S k"],
    *,
    kept: int,
    source: SourceLayout | None,
    window: int,
) -> tuple[Int32[Array, "rows blocks BLOCK"], Int32[Array, "rows"]]:
    """The lists of all B * S rows, and how many blocks of each hold anything (the window's always count).

    `kept` is M, the window rows kept per request.
    """
    requests, rows, _ = indices.shape
    position = start[:, None] + jnp.arange(rows)  # [B, S]
    seen = position[..., None] - (window - 1) + jnp.arange(window)  # [B, S, W]
    request = jnp.arange(requests)[:, None, None]
    near = request * kept + jnp.mod(seen - origin[:, None, None], kept)
    near = jnp.where(seen >= first[:, None, None], near, -1)
    parts = [_whole_blocks(near)]
    used = jnp.full((requests, rows), window_blocks(window), jnp.int32)
    if source is not None and indices.shape[2]:
        exists = indices >= 0
        safe = jnp.where(exists, indices, 0)
        page = table[request, safe // source.rows]
        parts.append(_whole_blocks(jnp.where(exists, page * source.rows + safe % source.rows, -1)))
        length = jnp.max(jnp.where(exists, jnp.arange(1, indices.shape[2] + 1), 0), axis=-1)
        used = used + -(-length // BLOCK)
    places = jnp.concatenate(parts, axis=-1).reshape(requests * rows, -1, BLOCK)
    return places.astype(jnp.int32), used.reshape(-1).astype(jnp.int32)


def _whole_blocks(places: Int32[Array, "B S keys"]) -> Int32[Array, "B S padded"]:
    return jnp.pad(places, ((0, 0), (0, 0), (0, -places.shape[2] % BLOCK)), constant_values=-1)
