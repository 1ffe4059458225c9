"""The exchange that sends each row once to every rank that holds one of its experts, and nothing else.

    x [T, D] --pack by rank--> [T * J, W] --ragged all-to-all--> [R * T, W]: rows, slots and weights
      --experts--> y [R * T, D] --ragged all-to-all, the same way back--> [T * J, D]
      --each row adds what its J = min(K, R) ranks made of it, in ascending order, f32--> [T, D]

The buffers hold what any routing can need, at worst all rows of all ranks on one: shapes are static, and no row is ever
dropped. What moves is what the routing asks for, and ahead of it how much that is: 2 R counts of each rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from widemesh.sharding.exchange.all_gather import gathered_look_up
from widemesh.sharding.exchange.interface import Dispatched
from widemesh.sharding.exchange.packing import Packing, distinct_ranks, from_words, pack, to_words
from widemesh.sharding.exchange.ragged_rows import send_rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class _WayBack:
    """How a dispatch was packed."""

    rows: Packing  # of this rank's rows by the ranks they went to
    pairs: Packing  # of its (row, k) by the rank of the slot
    row_counts: Int32[Array, "R R"]  # rows from each rank to each
    pair_counts: Int32[Array, "R R"]  # likewise pairs
    held: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class RaggedExchange:
    """Rows whose slots are all -1 are sent nowhere; a row with several experts on a rank is sent there once."""

    axis: str = "ep"
    is_native: bool  # False: by the stand-in for platforms without a ragged all-to-all

    def dispatch(
        self, x: Float[Array, "T D"], slots: Int32[Array, "T K"], weights: Float[Array, "T K"], held: int,
        experts: Int32[Array, "T K"],
    ) -> Dispatched:  # fmt: skip
        """What arrives, in order of rank, then row (M = R * T); slots of rows past it are -1."""
        ranks, me = jax.lax.axis_size(self.axis), jax.lax.axis_index(self.axis)
        to = distinct_ranks(slots, held, ranks)
        rows, pairs = pack(to, ranks), pack(jnp.where(slots < 0, -1, slots // held), ranks)
        counts = jax.lax.all_gather(jnp.stack([rows.counts, pairs.counts]), self.axis)  # [R, 2, R]
        back = _WayBack(rows=rows, pairs=pairs, row_counts=counts[:, 0], pair_counts=counts[:, 1], held=held)

        words = to_words(x, slots, weights)[rows.entries // to.shape[1]]
        words = self._send(words, back.row_counts, room=ranks * len(x))
        x, slots, weights = from_words(words, hidden=x.shape[1], per_token=slots.shape[1], dtype=x.dtype)
        arrived = jnp.arange(len(x)) < jnp.sum(back.row_counts[:, me])
        slots = jnp.where(arrived[:, None], slots - me * held, -1)
        return Dispatched(x=x, slots=slots, weights=weights, way_back=back)

    def combine(self, y: Float32[Array, "M D"], sent: Dispatched) -> Float32[Array, "T D"]:
        """The partial results of every row back to it."""
        back: _WayBack = sent.way_back
        place = back.rows.place
        returned = self._send(y, back.row_counts.T, room=place.size)
        total = returned.at[place[:, 0]].get(mode="fill", fill_value=0)
        for j in range(1, place.shape[1]):
            total = total + returned.at[place[:, j]].get(mode="fill", fill_value=0)
        return total

    def combine_pairs(self, y: Float32[Array, "M K D"], sent: Dispatched) -> Float32[Array, "T K D"]:
        """Only pairs of this rank's slots are sent back."""
        back: _WayBack = sent.way_back
        is_mine = (sent.slots >= 0) & (sent.slots < back.held)
        # Rows lie in order of the rank they came from, so one list of all pairs is in order of where they go.
        made = pack(jnp.where(is_mine, 0, -1), 1)
        flat = y.reshape(-1, y.shape[-1])[made.entries]
        place = back.pairs.place
        returned = self._send(flat, back.pair_counts.T, room=place.size)
        return returned.at[place].get(mode="fill", fill_value=0)

    def look_up(
        self, ids: Int32[Array, "T K"], held: int, read: Callable[[Int32[Array, "M K"]], Float[Array, "M K H"]]
    ) -> Float[Array, "T K H"]:
        """As `gathered_look_up`: ids are a few bytes, and a row of the table goes to one rank at any rate."""
        return gathered_look_up(self.axis, ids, held, read)

    def _send(self, rows: Array, counts: Int32[Array, "R R"], *, room: int) -> Array:
        return send_rows(rows, counts, axis=self.axis, room=room, is_native=self.is_native)
