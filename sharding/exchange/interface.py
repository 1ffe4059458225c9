"""What an exchange does: rows to the ranks that hold their experts, partial results back, and rows of a table in parts.

T rows of a rank, K experts per row, M rows that a rank works on, D hidden, R ranks. No row is ever dropped. Results are
f32 sums in an order that placement fixes: it never depends on other rows of the batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

from jaxtyping import Array, Float, Float32, Int32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dispatched:
    """Rows that a rank's experts work on. Lives within one trace."""

    x: Float[Array, "M D"]
    slots: Int32[Array, "M K"]  # counted from this rank's first slot; those of other ranks and of none are outside
    weights: Float[Array, "M K"]
    way_back: Any = None  # what `combine` of the same exchange needs to know


class Exchange(Protocol):
    """Dispatch and combine of one MoE layer; the same object serves every layer of a program."""

    def dispatch(
        self, x: Float[Array, "T D"], slots: Int32[Array, "T K"], weights: Float[Array, "T K"], held: int,
        experts: Int32[Array, "T K"],
    ) -> Dispatched:  # fmt: skip
        """Rows that this rank may have to work on.

        `slots` are physical and count over all ranks; -1 goes nowhere. Every rank holds `held` of them. `experts` are
        the logical experts behind them, which matter only where sums are in their order.
        """
        ...

    def combine(self, y: Float32[Array, "M D"], sent: Dispatched) -> Float32[Array, "T D"]:
        """Sum of all ranks' partial results for this rank's own rows, in an order of ranks that is fixed."""
        ...

    def combine_pairs(self, y: Float32[Array, "M K D"], sent: Dispatched) -> Float32[Array, "T K D"]:
        """The result of each (row, expert) at the rank and the place it was sent from; 0 where the slot was -1."""
        ...

    def look_up(
        self, ids: Int32[Array, "T K"], held: int, read: Callable[[Int32[Array, "M K"]], Float[Array, "M K H"]]
    ) -> Float[Array, "T K H"]:
        """Rows `ids` of a table of which every rank holds `held` rows, in rank order.

        `read` gives rows of this rank's part by their place in it; the result is exactly what it gives.
        """
        ...
