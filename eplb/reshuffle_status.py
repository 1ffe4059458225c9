"""What is known of a model's rebalancing: to look at, and to count."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Protocol

import numpy as np
from jaxtyping import Int32, Int64

from widemesh.eplb.layout import ExpertLayout


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ReshuffleStatus:
    """Between two steps. Its arrays are never written."""

    model: str  # "target" or "draft"
    layout: ExpertLayout
    slot_owner: Int32[np.ndarray, "L X"]  # serves now; -1: empty
    placement_hash: int
    load: Int64[np.ndarray, "L X"]  # that each slot was sent in `load_steps` steps, all under this `slot_owner`
    load_steps: int  # a window, or one step where none has been read under this placement; 0: no load is known yet
    balancedness: float  # as last measured, under an earlier placement perhaps; 0: nothing is known
    feasible: float  # what no placement exceeds under the load of the last plan; 0: there was none
    phase: str  # "idle", "waiting" (with an import, for the other processes), "reading", "planning" or "migrating"
    imported_hash: int  # of the placement that was imported here and has not set out; 0: there is none
    layers_done: int  # of the migration under way, committed ones
    layers_total: int  # that it moves; 0 if there is none
    rebalances: Mapping[str, int]  # how many have ended as "committed", "skipped" or "abandoned"
    last_failure: str  # why the last one was abandoned; empty: none was
    moved_bytes: int  # since the start, from rank to rank; those of abandoned layers too
    moved_rows: int
    least_rows: int  # fewer could not have brought the committed layers about
    is_paused: bool
    is_disabled: bool  # after too many abandoned ones in a row
    steps_to_trigger: int  # until the next plan is made; 0: none is due


class ReshuffleListener(Protocol):
    """Hears of what happens, on the engine's thread. For metrics."""

    def balancedness(self, model: str, value: float, feasible: float | None) -> None:
        """Mean rank load / maximum rank load was measured; `feasible` is None until there was a plan."""

    def rebalanced(self, model: str, result: str, rows: int, num_bytes: int) -> None:
        """A rebalance has ended as "committed", "skipped" or "abandoned", after so much went from rank to rank."""

    def layer_committed(self, model: str, seconds: float) -> None:
        """A layer's weights and maps are in force, so long after its first copy."""

    def disabled(self, model: str, is_disabled: bool) -> None:
        """Rebalancing was given up after too many failures, or resumed."""


class NoListener:
    """Nobody listens."""

    def balancedness(self, model: str, value: float, feasible: float | None) -> None: ...
    def rebalanced(self, model: str, result: str, rows: int, num_bytes: int) -> None: ...
    def layer_committed(self, model: str, seconds: float) -> None: ...
    def disabled(self, model: str, is_disabled: bool) -> None: ...
