"""The exchange that gathers every rank's rows everywhere and reduce-scatters the partial sums: the reference."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from widemesh.sharding.exchange.interface import Dispatched


@dataclasses.dataclass(frozen=True, kw_only=True)
class AllGatherExchange:
    """Moves the same bytes whatever the routing, padding included (`traffic.all_gather_traffic`)."""

    axis: str = "ep"

    def dispatch(
        self, x: Float[Array, "T D"], slots: Int32[Array, "T K"], weights: Float[Array, "T K"], held: int,
        experts: Int32[Array, "T K"],
    ) -> Dispatched:  # fmt: skip
        """All ranks' rows in rank order (M = R * T)."""
        x, slots, weights = (jax.lax.all_gather(part, self.axis, tiled=True) for part in (x, slots, weights))
        return Dispatched(x=x, slots=slots - jax.lax.axis_index(self.axis) * held, weights=weights)

    def combine(self, y: Float32[Array, "M D"], sent: Dispatched) -> Float32[Array, "T D"]:
        """Reduce-scatter over the rank axis."""
        return jax.lax.psum_scatter(y, self.axis, scatter_dimension=0, tiled=True)

    def combine_pairs(self, y: Float32[Array, "M K D"], sent: Dispatched) -> Float32[Array, "T K D"]:
        """Reduce-scatter of all pairs. One rank has a result and the others add zeros: exact."""
        return jax.lax.psum_scatter(y, self.axis, scatter_dimension=0, tiled=True)

    def look_up(
        self, ids: Int32[Array, "T K"], held: int, read: Callable[[Int32[Array, "M K"]], Float[Array, "M K H"]]
    ) -> Float[Array, "T K H"]:
        """As `gathered_look_up`."""
        return gathered_look_up(self.axis, ids, held, read)


def gathered_look_up(
    axis: str, ids: Int32[Array, "T K"], held: int, read: Callable[[Int32[Array, "M K"]], Float[Array, "M K H"]]
) -> Float[Array, "T K H"]:
    """All ranks read what they hold of all ids, and zeros for the rest; a reduce-scatter brings them together."""
    place = jax.lax.all_gather(ids, axis, tiled=True) - jax.lax.axis_index(axis) * held
    is_mine = (place >= 0) & (place < held)
    rows = read(jnp.where(is_mine, place, 0))
    # One rank has a row, the others add zeros: exact in any dtype.
    return jax.lax.psum_scatter(jnp.where(is_mine[..., None], rows, 0), axis, scatter_dimension=0, tiled=True)
