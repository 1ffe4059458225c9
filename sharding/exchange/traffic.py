"""Bytes that an exchange moves between ranks: in closed form, and counted from a routing.

What a rank keeps for itself is not counted. A rank sends as many bytes as it receives, on average over the ranks.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from jaxtyping import Int, Int64

_I32 = _F32 = 4  # bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerShape:
    """One MoE layer as its exchange sees it."""

    rows: int  # T, of each rank
    per_token: int  # K
    hidden: int  # D
    value_bytes: int  # of a value of the rows that are sent out; what comes back is f32
    ranks: int  # R
    slots: int  # X, over all ranks
    batch_invariant: bool = False  # the way back carries every (row, expert) by itself

    @property
    def row_bytes(self) -> int:
        """A row on its way to the experts, with its slots and weights."""
        return self.hidden * self.value_bytes + self.per_token * (_I32 + _F32)

    @property
    def result_bytes(self) -> int:
        """One partial result on its way back."""
        return self.hidden * _F32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes that a rank sends in one layer, and receives."""

    dispatch: float
    combine: float

    @property
    def total(self) -> float:
        """Both ways."""
        return self.dispatch + self.combine


def expected_ranks(per_token: int, slots: int, ranks: int) -> float:
    """How many ranks other than a row's own hold one of its experts, on average.

    Each rank is left out with the chance that `per_token` different slots, all equally likely, lie elsewhere.
    """
    held = slots // ranks
    return (ranks - 1) * (1 - math.comb(slots - held, per_token) / math.comb(slots, per_token))


def all_gather_traffic(shape: LayerShape) -> Traffic:
    """Each row goes to every other rank, and from each comes a partial result, or one per expert."""
    others = (shape.ranks - 1) * shape.rows
    per_row = shape.per_token if shape.batch_invariant else 1
    return Traffic(dispatch=others * shape.row_bytes, combine=others * per_row * shape.result_bytes)


def ragged_traffic(shape: LayerShape, distinct: float | None = None) -> Traffic:
    """Each row goes to `distinct` other ranks; None: as many as `expected_ranks` says of all its rows.

    A partial result comes back from each of these, or one per expert that lies on another rank. Ahead of the rows
    goes a table of how many there are.
    """
    distinct = expected_ranks(shape.per_token, shape.slots, shape.ranks) if distinct is None else distinct
    returned = shape.per_token * (shape.ranks - 1) / shape.ranks if shape.batch_invariant else distinct
    return Traffic(
        dispatch=shape.rows * distinct * shape.row_bytes + _counts_bytes(shape.ranks),
        combine=shape.rows * returned * shape.result_bytes,
    )


def look_up_traffic(*, rows: int, columns: int, width: int, value_bytes: int, ranks: int) -> int:
    """Bytes that a rank sends, and receives, to read `columns` rows of a table for each of its own rows."""
    return (ranks - 1) * rows * columns * (_I32 + width * value_bytes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoutedTraffic:
    """Bytes of each rank in one layer, for a routing that has happened."""

    sent: Int64[np.ndarray, "R"]
    received: Int64[np.ndarray, "R"]


def routed_ragged_traffic(slots: Int[np.ndarray, "R T K"], shape: LayerShape) -> RoutedTraffic:
    """What the ragged exchange moves for the slots that each rank's rows have chosen; -1 goes nowhere."""
    ranks, held = shape.ranks, shape.slots // shape.ranks
    target = np.where(slots < 0, -1, slots // held)
    on = target[..., None] == np.arange(ranks)  # [R, T, K, R]
    rows, pairs = on.any(axis=2).sum(axis=1), on.sum(axis=(1, 2))  # [from, to]
    out = rows * shape.row_bytes + 2 * ranks * _I32  # every rank tells every other its counts
    back = (pairs if shape.batch_invariant else rows) * shape.result_bytes
    for moved in (out, back):
        np.fill_diagonal(moved, 0)
    both = out + back.T
    return RoutedTraffic(sent=both.sum(axis=1), received=both.sum(axis=0))


def _counts_bytes(ranks: int) -> int:
    """Each rank tells every other how many rows and how many pairs it sends to whom."""
    return (ranks - 1) * 2 * ranks * _I32
