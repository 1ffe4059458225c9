"""Sums over a row's experts in ascending order of the logical expert, whatever rank or copy computed each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from widemesh.sharding.exchange.interface import Dispatched, Exchange


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchInvariantExchange:
    """Brings the result of every (row, expert) home by itself and sums there.

    The sum's order is the same for every placement and number of ranks, so results are bit for bit the same if an
    expert's result for a row is a function of the two alone. Experts get one row per pair, K times as many places, and
    the way back carries a row per pair instead of one per rank.
    """

    exchange: Exchange  # that moves the rows

    def dispatch(
        self, x: Float[Array, "T D"], slots: Int32[Array, "T K"], weights: Float[Array, "T K"], held: int,
        experts: Int32[Array, "T K"],
    ) -> Dispatched:  # fmt: skip
        """Every row that has come, once per expert, with one slot each. `experts` must differ within a row."""
        sent = self.exchange.dispatch(x, slots, weights, held, experts)
        k = slots.shape[1]
        return Dispatched(
            x=jnp.repeat(sent.x, k, axis=0), slots=sent.slots.reshape(-1, 1), weights=sent.weights.reshape(-1, 1),
            way_back=(sent, jnp.argsort(experts, axis=1)),
        )  # fmt: skip

    def combine(self, y: Float32[Array, "M*K D"], sent: Dispatched) -> Float32[Array, "T D"]:
        """Sum of a row's experts, lowest logical id first."""
        inner, order = sent.way_back
        pairs = self.exchange.combine_pairs(y.reshape(*inner.slots.shape, -1), inner)
        pairs = jnp.take_along_axis(pairs, order[:, :, None], axis=1)
        total = pairs[:, 0]
        for k in range(1, pairs.shape[1]):
            total = total + pairs[:, k]
        return total

    def combine_pairs(self, y: Float32[Array, "M*K 1 D"], sent: Dispatched) -> Float32[Array, "T K D"]:
        """The results themselves, in the order of `slots`."""
        inner, _ = sent.way_back
        return self.exchange.combine_pairs(y.reshape(*inner.slots.shape, -1), inner)

    def look_up(
        self, ids: Int32[Array, "T K"], held: int, read: Callable[[Int32[Array, "M K"]], Float[Array, "M K H"]]
    ) -> Float[Array, "T K H"]:
        """Of the exchange inside: nothing is summed."""
        return self.exchange.look_up(ids, held, read)
