"""The same attention as masked dense products, for many rows on a CPU.

Gathering W + k keys per row moves 64 KB per row and layer even in small models; two dense products over the whole
visible range run at matmul speed. Rows are taken in blocks so that the [rows, N, keys] scores of a block stay in
cache, and a block reads only the window rows and entries that its rows can see.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from widemesh.pallas_kernels.sparse_attention.reference import _FLOOR

_BLOCK_ROWS = 128


def attend_mask(
    q: Float[Array, "B S N H"],
    window_kv: Float[Array, "B WS H"],
    start: Int32[Array, "B"],
    entries: Float[Array, "B L H"],
    mask: Bool[Array, "B S L"],
    sink: Float[Array, "N"],
    *,
    window: int,
    ratio: int,
    start_bound: int,
) -> Float[Array, "B S N H"]:
    """Attention over all keys with the unselected ones masked. Layout of `window_kv` as in `attend_indices`.

    `start_bound` is a static bound on `start`: a block ending before row b reads (start_bound + b) // ratio entries.
    """
    b, s, n, h = q.shape
    blocks = []
    for first in range(0, s, _BLOCK_ROWS):
        last = min(first + _BLOCK_ROWS, s)
        rows = last - first
        limit = min(entries.shape[1], (start_bound + last) // ratio) if ratio else 0
        near = window_kv[:, first : last + window - 1]
        column = jnp.arange(rows + window - 1)
        row = jnp.arange(rows)[:, None]
        band = (column >= row) & (column < row + window)  # [rows, columns]
        exists = start[:, None] - (window - 1) + first + column >= 0  # [B, columns]
        qb = q[:, first:last].reshape(b, rows * n, h) * h**-0.5
        scores = [_scores(qb, near, band[None] & exists[:, None], rows, n)]
        keys = [near]
        if limit:
            keys.append(entries[:, :limit])
            scores.append(_scores(qb, keys[1], mask[:, first:last, :limit], rows, n))
        top = jnp.full((b, rows, n, 1), _FLOOR)
        for part in scores:
            top = jnp.maximum(top, jnp.max(part, axis=-1, keepdims=True))
        total = jnp.exp(sink[:, None] - top)
        out = jnp.zeros((b, rows * n, h))
        for part, key in zip(scores, keys, strict=True):
            weights = jnp.exp(part - top)
            total = total + jnp.sum(weights, axis=-1, keepdims=True)
            out = out + jnp.matmul(weights.reshape(b, rows * n, -1), key)
        blocks.append(out.reshape(b, rows, n, h) / total)
    return blocks[0] if len(blocks) == 1 else jnp.concatenate(blocks, axis=1)


def _scores(
    q: Float[Array, "B SN H"], keys: Float[Array, "B K H"], seen: Bool[Array, "B S K"], rows: int, heads: int
) -> Float[Array, "B S N K"]:
    dots = jnp.matmul(q, jnp.swapaxes(keys, 1, 2)).reshape(q.shape[0], rows, heads, -1)
    return jnp.where(seen[:, :, None], dots, -jnp.inf)
