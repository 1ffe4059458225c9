"""Index scores: how relevant every compressed entry is to every query row.

    score[t, j] = sum over index heads h of relu(query[t, h] . key[j]) * weight[t, h]

Formula: docs/model.md, "Index queries and scores". The relu is per head and before the weighting; weights are signed.
Cost: 2 * I * J FLOP per scored entry (8192 in the released model) and 68 B read per key in packed form.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from widemesh.pallas_kernels.rounding import maybe_round_bf16

# Rows per block: the [rows, I, L] intermediate of one block should stay in a core's second-level cache.
_BLOCK_ROWS = 128


def indexer_scores(
    queries: Float[Array, "B S I J"],
    weights: Float[Array, "B S I"],
    keys: Float[Array, "B L J"],
    *,
    ratio: int,
    start_bound: int,
    bf16_rounding: bool = False,
) -> Float[Array, "B S L"]:
    """Scores of all L entries, in f32 (or with the released bf16 roundings). Visibility is not applied.

    `start_bound` is a static bound on the position of row 0 of any request; entries that no row of a block can see
    under it are not scored and read as -inf.
    """
    b, s, i, j = queries.shape
    entries = keys.shape[1]
    keys_t = jnp.swapaxes(keys, 1, 2)
    blocks = []
    for first in range(0, s, _BLOCK_ROWS):
        last = min(first + _BLOCK_ROWS, s)
        limit = min(entries, (start_bound + last) // ratio)
        q = queries[:, first:last].reshape(b, (last - first) * i, j)
        dots = jnp.matmul(q, keys_t[:, :, :limit]).reshape(b, last - first, i, limit)
        dots = maybe_round_bf16(dots, bf16_rounding)
        terms = jnp.maximum(dots, 0.0) * weights[:, first:last, :, None]
        score = maybe_round_bf16(jnp.sum(maybe_round_bf16(terms, bf16_rounding), axis=2), bf16_rounding)
        blocks.append(jnp.pad(score, ((0, 0), (0, 0), (0, entries - limit)), constant_values=-jnp.inf))
    return blocks[0] if len(blocks) == 1 else jnp.concatenate(blocks, axis=1)
