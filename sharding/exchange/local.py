"""The exchange of one rank that holds every expert."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from jaxtyping import Array, Float, Float32, Int32

from widemesh.sharding.exchange.interface import Dispatched


@dataclasses.dataclass(frozen=True)
class LocalExchange:
    """Nothing moves."""

    def dispatch(
        self, x: Float[Array, "T D"], slots: Int32[Array, "T K"], weights: Float[Array, "T K"], held: int,
        experts: Int32[Array, "T K"],
    ) -> Dispatched:  # fmt: skip
        """The inputs unchanged."""
        return Dispatched(x=x, slots=slots, weights=weights)

    def combine(self, y: Float32[Array, "M D"], sent: Dispatched) -> Float32[Array, "T D"]:
        """The input unchanged."""
        return y

    def combine_pairs(self, y: Float32[Array, "M K D"], sent: Dispatched) -> Float32[Array, "T K D"]:
        """The input unchanged."""
        return y

    def look_up(
        self, ids: Int32[Array, "T K"], held: int, read: Callable[[Int32[Array, "M K"]], Float[Array, "M K H"]]
    ) -> Float[Array, "T K H"]:
        """What `read` gives."""
        return read(ids)
