"""Moving rows to the ranks that hold their experts, and the results back, and reading rows of a table in parts. No row
is ever dropped.

T rows per rank, K experts per row, R ranks, D hidden.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32


class Exchange(Protocol):
    """Dispatch and combine of one MoE layer; the same object serves every layer of a program."""

    def dispatch(
        self, x: Float[Array, "T D"], slots: Int32[Array, "T K"], weights: Float[Array, "T K"], held: int
    ) -> tuple[Float[Array, "M D"], Int32[Array, "M K"], Float[Array, "M K"]]:
        """Rows that this rank may have to work on, with slots counted from its own first slot.

        `held` is the number of expert slots per rank. Slots of other ranks come out below 0 or at `held` and above.
        """
        ...

    def combine(self, y: Float[Array, "M D"]) -> Float[Array, "T D"]:
        """Sum of all ranks' partial results for this rank's own rows."""
        ...

    def look_up(
        self, ids: Int32[Array, "T K"], held: int, read: Callable[[Int32[Array, "M K"]], Float[Array, "M K H"]]
    ) -> Float[Array, "T K H"]:
        """Rows `ids` of a table of which every rank holds `held` rows, in rank order.

        `read` gives rows of this rank's part by their place in it; the result is exactly what it gives.
        """
        ...


@dataclasses.dataclass(frozen=True)
class LocalExchange:
    """One rank holds every expert: nothing moves."""

    def dispatch(
        self, x: Float[Array, "T D"], slots: Int32[Array, "T K"], weights: Float[Array, "T K"], held: int
    ) -> tuple[Float[Array, "M D"], Int32[Array, "M K"], Float[Array, "M K"]]:
        """The inputs unchanged."""
        return x, slots, weights

    def combine(self, y: Float[Array, "M D"]) -> Float[Array, "T D"]:
        """The input unchanged."""
        return y

    def look_up(
        self, ids: Int32[Array, "T K"], held: int, read: Callable[[Int32[Array, "M K"]], Float[Array, "M K H"]]
    ) -> Float[Array, "T K H"]:
        """What `read` gives."""
        return read(ids)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AllGatherExchange:
    """All-gather every rank's rows, reduce-scatter the partial sums. Right for any number of ranks.

    Moves R * T * (D + 2K) values to each rank per layer whatever the routing; the reference for cheaper exchanges.
    """

    axis: str = "ep"

    def dispatch(
        self, x: Float[Array, "T D"], slots: Int32[Array, "T K"], weights: Float[Array, "T K"], held: int
    ) -> tuple[Float[Array, "M D"], Int32[Array, "M K"], Float[Array, "M K"]]:
        """All ranks' rows in rank order (M = R * T)."""
        x = jax.lax.all_gather(x, self.axis, tiled=True)
        slots = jax.lax.all_gather(slots, self.axis, tiled=True)
        weights = jax.lax.all_gather(weights, self.axis, tiled=True)
        return x, slots - jax.lax.axis_index(self.axis) * held, weights

    def combine(self, y: Float[Array, "M D"]) -> Float[Array, "T D"]:
        """Reduce-scatter over the rank axis."""
        return jax.lax.psum_scatter(y, self.axis, scatter_dimension=0, tiled=True)

    def look_up(
        self, ids: Int32[Array, "T K"], held: int, read: Callable[[Int32[Array, "M K"]], Float[Array, "M K H"]]
    ) -> Float[Array, "T K H"]:
        """All ranks read what they hold of all ids, and zeros for the rest; a reduce-scatter brings them together."""
        place = jax.lax.all_gather(ids, self.axis, tiled=True) - jax.lax.axis_index(self.axis) * held
        is_mine = (place >= 0) & (place < held)
        rows = read(jnp.where(is_mine, place, 0))
        # One rank has a row, the others add zeros: exact in any dtype.
        return self.combine(jnp.where(is_mine[..., None], rows, 0))
