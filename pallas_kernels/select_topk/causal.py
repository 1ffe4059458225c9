"""The same mask for the rows of a prefill: in blocks that stay in cache, over the entries that each block can see."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from widemesh.pallas_kernels.row_blocks import fill_row_blocks
from widemesh.pallas_kernels.select_topk.bisect import select_mask

_BLOCK_ROWS = 256


def select_mask_causal(
    scores: Float[Array, "B S L"], k: int, *, ratio: int, start_bound: int
) -> Bool[Array, "B S L"]:
    """`select_mask` of scores that are -inf past what `ratio` and `start_bound` let a row see (`row_blocks`).

    Rows that see k entries or fewer need no search: they keep all of them.
    """
    b = scores.shape[0]

    def select(first: Int32[Array, ""] | int, rows: int, limit: int) -> Bool[Array, "B rows limit"]:
        return select_mask(lax.dynamic_slice(scores, (0, first, 0), (b, rows, limit)), k)

    return fill_row_blocks(jnp.zeros(scores.shape, bool), select, block=_BLOCK_ROWS, entries=scores.shape[2],
                           ratio=ratio, start_bound=start_bound)  # fmt: skip
