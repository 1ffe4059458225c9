"""What outside of the engine can be known of expert placement, and asked of it: by the RPCs and the command line."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Protocol

import numpy as np
from jaxtyping import Int32, Int64

from widemesh.eplb import ExpertLayout
from widemesh.model.config import ConfigError
from widemesh.serving.request import Status


class ExpertControlError(RuntimeError):
    """A call that cannot be done now, though nothing is wrong with it. `str(err)` is one sentence with the remedy."""

    status: Status


class EplbOff(ExpertControlError):
    """The engine runs without rebalancing: no call will ever do until it is started otherwise."""

    status = Status.FAILED_PRECONDITION

    def __init__(self, message: str = "enable_eplb=False: experts stay where they are; start the server with "
                                      "--enable-eplb"):  # fmt: skip
        super().__init__(message)


class EplbBusy(ExpertControlError):
    """Experts are moving. The placement that a caller has seen is about to change: look again, then decide anew.

    ABORTED, not UNAVAILABLE: that one makes clients repeat the same call within milliseconds, as to a server that is
    about to answer, and a migration takes as long as thousands of steps.
    """

    status = Status.ABORTED

    def __init__(self, model: str = "target"):
        super().__init__(f"experts are moving already; wait until `widemesh experts show{model_flag(model)}` says idle")


class EplbPaused(ExpertControlError):
    """A plan was asked for that would not be made."""

    status = Status.FAILED_PRECONDITION

    def __init__(self, model: str = "target"):
        super().__init__(f"rebalancing is paused; run `widemesh experts resume{model_flag(model)}` first")


def model_flag(model: str) -> str:
    """What a command of `widemesh experts` needs behind it to mean this model."""
    return "" if model == "target" else f" --model {model}"


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ExpertStatus:
    """One model's placement and load at a step boundary. Its arrays are the caller's: nothing writes them later."""

    model: str  # "target" or "draft"
    layout: ExpertLayout
    slot_owner: Int32[np.ndarray, "L X"]  # expert of each slot; -1: empty
    placement_hash: int
    load: Int64[np.ndarray, "L X"]  # rows that each slot has taken since it has the experts of `slot_owner`
    load_steps: int  # steps in which those rows were counted; 0: none is known under this placement yet
    # Mean rank load / maximum rank load, each summed over layers, as last measured: under an earlier placement perhaps.
    balancedness: float  # 0: nothing is known
    phase: str  # "off", "idle", "waiting" (imported here, not in every process), "reading", "planning" or "migrating"
    layers_done: int  # of the migration under way, committed ones
    layers_total: int  # that it moves; 0 if there is none
    rebalances: Mapping[str, int]  # how many have ended as "committed", "skipped" or "abandoned"
    last_failure: str  # why the last one was abandoned; empty: none was
    moved_bytes: int  # since the start, from rank to rank
    moved_rows: int  # likewise, expert rows
    least_rows: int  # fewer could not have brought these placements about
    is_paused: bool
    is_disabled: bool  # after too many abandoned ones in a row; `resume` ends it
    steps_to_trigger: int  # until the next plan is made; 0 if none is due
    imported_hash: int = 0  # of a placement that was imported here and does not move yet; 0: there is none
    feasible: float = 0.0  # balancedness that no placement exceeds under the load of the last plan; 0: there was none


class ExpertControl(Protocol):
    """Steers the rebalancing of one model of an engine.

    Safe from any thread; a call waits for the next step boundary at most.
    All but `status` raise EplbOff where rebalancing is off. A closed engine raises its EngineError.
    """

    def status(self) -> ExpertStatus:
        """Placement, load, and what is under way. Always answers; the phase is "off" where rebalancing is off."""
        ...

    def rebalance(self, steps: int | None = None) -> None:
        """Make a plan after `steps` more recorded steps; None: the engine's own number of them.

        Raises ConfigError for more than a window, EplbPaused after `pause`.
        """
        ...

    def pause(self) -> None:
        """Record nothing and make no new plan until `resume`; withdraw an import that waits for other processes."""
        ...

    def resume(self) -> None:
        """Go on after `pause`, or after too many abandoned rebalances."""
        ...

    def import_placement(self, slot_owner: Int32[np.ndarray, "L X"]) -> None:
        """Move to this placement, as soon as the control of every process of the engine has been given it.

        Until then the phase is "waiting". Raises ConfigError if it does not fit, EplbBusy while experts move.
        """
        ...


def control_of(model: str, target: ExpertControl, draft: ExpertControl | None) -> ExpertControl:
    """That of a model by its name. Raises ConfigError if it is not one of those that an engine serves."""
    served = {"target": target} if draft is None else {"target": target, "draft": draft}
    if model not in served:
        raise ConfigError(f"model={model!r} is not served here; use {' or '.join(served)}")
    return served[model]
