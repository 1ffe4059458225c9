"""Attention of each query over its window and its selected compressed entries: the specification.

Keys and values are the same vectors, shared by all heads. One softmax runs over the window rows and the selected
entries together, plus a learned sink per head that takes weight and adds no value. Formula: docs/model.md,
"Attention". B requests, S query rows each, N heads, H head dim, W window, L entries, k selected.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from widemesh.pallas_kernels.rounding import round_bf16

_FLOOR = -1e30  # of the running maximum: a row without keys gives zeros, not NaN
_ROUNDED_BLOCK = 64  # slots per online-softmax block of the released kernel; only visible under bf16 rounding


def attend_gathered(
    q: Float[Array, "B S N H"],
    window_kv: Float[Array, "B WS H"],
    start: Int32[Array, "B"],
    first: Int32[Array, "B"],
    entries: Float[Array, "B S k H"],
    exists: Bool[Array, "B S k"],
    sink: Float[Array, "N"],
    *,
    window: int,
    bf16_rounding: bool = False,
) -> Float[Array, "B S N H"]:
    """Attention over entries gathered for each row; those that do not exist must still be finite.

    `window_kv` holds the rows at positions start - (window - 1) .. start + S - 1, so row i of the queries (position
    start + i) sees window rows i .. i + window - 1, those at positions before `first` excepted.
    """
    s, h = q.shape[1], q.shape[3]
    rows = jnp.arange(s)[:, None] + jnp.arange(window)[None]  # [S, W]
    keys = window_kv[:, rows]  # [B, S, W, H]
    seen = (start[:, None, None] - (window - 1) + rows[None]) >= first[:, None, None]
    keys = jnp.concatenate([keys, entries], axis=2)
    seen = jnp.concatenate([seen, exists], axis=2)
    scores = jnp.einsum("bsnh,bskh->bsnk", q, keys) * h**-0.5
    scores = jnp.where(seen[:, :, None], scores, -jnp.inf)
    if bf16_rounding:
        return _online_softmax(scores, keys, seen, sink)
    top = jnp.maximum(jnp.max(scores, axis=-1, keepdims=True), _FLOOR)
    weights = jnp.exp(scores - top)
    total = jnp.sum(weights, axis=-1, keepdims=True) + jnp.exp(sink[:, None] - top)
    return jnp.einsum("bsnk,bskh->bsnh", weights, keys) / total


def _online_softmax(
    scores: Float[Array, "B S N K"],
    keys: Float[Array, "B S K H"],
    seen: Bool[Array, "B S K"],
    sink: Float[Array, "N"],
) -> Float[Array, "B S N H"]:
    """The released kernel's rounding: weights are rounded to bfloat16 relative to the maximum of the blocks so far."""
    b, s, n, k = scores.shape
    top = jnp.full((b, s, n, 1), _FLOOR)
    total = jnp.zeros((b, s, n, 1))
    acc = jnp.zeros((b, s, n, keys.shape[-1]))
    for first in range(0, k, _ROUNDED_BLOCK):
        part = scores[..., first : first + _ROUNDED_BLOCK]
        new_top = jnp.maximum(top, jnp.max(part, axis=-1, keepdims=True))
        weights = jnp.exp(part - new_top)
        decay = jnp.exp(top - new_top)
        total = total * decay + jnp.sum(weights, axis=-1, keepdims=True)
        values = keys[:, :, first : first + _ROUNDED_BLOCK]
        acc = acc * decay + jnp.einsum("bsnk,bskh->bsnh", round_bf16(weights), values)
        top = new_top
    total = total + jnp.exp(sink[:, None] - top)
    return acc / total


def visible_entries(
    start: Int32[Array, "B"], rows: int, entries: int, ratio: int
) -> Bool[Array, "B S L"]:
    """Causal visibility: the row at position p sees entries j < (p + 1) // ratio."""
    position = start[:, None] + jnp.arange(rows)
    count = (position + 1) // ratio
    return lax.broadcasted_iota(jnp.int32, (*count.shape, entries), 2) < count[..., None]
