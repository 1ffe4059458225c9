"""Index scores: how relevant every compressed entry is to every query row.

    score[t, j] = sum over index heads h of relu(query[t, h] . key[j]) * weight[t, h]

Formula: docs/model.md, "Index queries and scores". The relu is per head and before the weighting; weights are signed.
Cost: 2 * I * J FLOP per scored entry (8192 in the released model) and 68 B read per key in packed form.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from widemesh.pallas_kernels.rounding import maybe_round_bf16
from widemesh.pallas_kernels.row_blocks import fill_row_blocks

# Rows per block: the [rows, I, L] intermediate of one block should stay in a core's second-level cache.
_BLOCK_ROWS = 64


def indexer_scores(
    queries: Float[Array, "B S I J"],
    weights: Float[Array, "B S I"],
    keys: Float[Array, "B L J"],
    *,
    ratio: int,
    start_bound: int,
    bf16_operands: bool = False,
    bf16_rounding: bool = False,
) -> Float[Array, "B S L"]:
    """Scores of all L entries, in f32 (or with the released bf16 roundings). Visibility is not applied.

    `start_bound` is a static bound on the position of row 0 of any request; entries that no row of a block can see
    under it are not scored and read as -inf. `bf16_operands` promises that queries and keys hold bfloat16 values, as
    FP4 ones do: their products and f32 sums are then the same in a bfloat16 matmul, which is faster.
    """
    b, s, i, j = queries.shape
    if bf16_operands:
        queries, keys = queries.astype(jnp.bfloat16), keys.astype(jnp.bfloat16)

    def score(first: Int32[Array, ""] | int, rows: int, limit: int) -> Float[Array, "B rows limit"]:
        q = lax.dynamic_slice_in_dim(queries, first, rows, axis=1).reshape(b, rows * i, j)
        w = lax.dynamic_slice_in_dim(weights, first, rows, axis=1)
        dots = jnp.einsum("bqj,blj->bql", q, keys[:, :limit], preferred_element_type=jnp.float32)
        dots = maybe_round_bf16(dots.reshape(b, rows, i, limit), bf16_rounding)
        terms = maybe_round_bf16(jnp.maximum(dots, 0.0) * w[..., None], bf16_rounding)
        return maybe_round_bf16(jnp.sum(terms, axis=2), bf16_rounding)

    return fill_row_blocks(jnp.full((b, s, keys.shape[1]), -jnp.inf), score, block=_BLOCK_ROWS,
                           entries=keys.shape[1], ratio=ratio, start_bound=start_bound)  # fmt: skip
