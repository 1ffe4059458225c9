"""What a rebalance needs done on the device. Nothing here waits: answers are polled."""

from __future__ import annotations

import dataclasses
from typing import Protocol

import numpy as np
from jaxtyping import Int32, Int64

from widemesh.eplb.migration import LayerMigration, TransferSlice


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class LoadReading:
    """The load of all ranks, over one step or the steps of a window."""

    load_by_slot: Int64[np.ndarray, "L X"]  # (row, expert) pairs that each slot was sent
    balancedness: float  # mean / maximum rank load over steps and layers, a ratio of sums; 0 if there was no load


class Reading(Protocol):
    """A load that is on its way from the device."""

    def is_ready(self) -> bool:
        """Whether `value` answers without waiting."""

    def value(self) -> LoadReading:
        """The load. Waits for it if it must."""


class Verifying(Protocol):
    """A comparison of staged rows with those they were copied from, on its way from the device."""

    def is_ready(self) -> bool:
        """Whether `bad_rows` answers without waiting."""

    def bad_rows(self) -> int:
        """Rows that differ, over all ranks. Waits for the number if it must."""


class Mover(Protocol):
    """Moves the expert rows of one model. Every process of a job makes the same calls at the same steps.

    What is dispatched runs in the order of the calls, and before every program that is dispatched later. A method that
    raises has changed nothing that serves.
    """

    @property
    def row_bytes(self) -> int:
        """Bytes of one expert's weights in one layer, scales included."""

    def read_window(self) -> Reading:
        """Dispatch the sum over the recorded steps of the window. Later steps may write the ring at once."""

    def read_step(self) -> Reading:
        """Dispatch the reading of the newest step's load."""

    def begin(self, layer: int) -> None:
        """A layer begins to move, or begins anew: no row that was staged before may pass for one of its own.

        A note on the host, which cannot fail.
        """

    def copy(self, layer: int, part: TransferSlice) -> None:
        """Dispatch the copies of a slice of the layer begun last, from live rows to staging rows.

        No live row changes.
        """

    def verify(self, migration: LayerMigration) -> Verifying:
        """Dispatch the comparison of all rows that the migration stages."""

    def commit(self, migration: LayerMigration, slot_owner: Int32[np.ndarray, "L X"]) -> None:
        """Put weights and maps of one layer in force together, for every later dispatch.

        `slot_owner` is the placement of all layers from then on.
        """
