"""What a selection hands to the layers above."""

from __future__ import annotations

import dataclasses

import jax
from jaxtyping import Array, Int32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Selected:
    """The choice of each row: ascending numbers, then -1 for what is missing."""

    indices: Int32[Array, "B S k"]  # of entries
    blocks: Int32[Array, "B S top_blocks"] | None  # of candidate blocks; None unless they were asked for
