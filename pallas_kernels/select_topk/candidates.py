"""Level one of the two-level selection: whole blocks of entries that later index layers may choose from."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from widemesh.pallas_kernels.select_topk.bisect import select_mask


def candidate_mask(
    scores: Float[Array, "*T L"], visible_len: Int32[Array, "*T"], *, block: int, top_blocks: int
) -> Bool[Array, "*T L"]:
    """Mask of the entries in the best `top_blocks` blocks of `block` entries.

    `scores` are -inf beyond `visible_len` entries. A block scores its maximum; the block of the newest visible entry
    is always kept and counts toward the limit; a block without a visible entry is never kept. The mask covers whole
    blocks: the caller combines it with visibility. Formula: docs/model.md, "Two-level candidates".
    """
    *rows, entries = scores.shape
    blocks = -(-entries // block)
    padded = jnp.pad(scores, [(0, 0)] * len(rows) + [(0, blocks * block - entries)], constant_values=-jnp.inf)
    best = jnp.max(padded.reshape(*rows, blocks, block), axis=-1)
    newest = (visible_len - 1) // block  # -1 (no block) when nothing is visible
    best = jnp.where(jnp.arange(blocks) == newest[..., None], jnp.inf, best)
    kept = select_mask(best, top_blocks)
    return jnp.repeat(kept, block, axis=-1)[..., :entries]
