"""What is measured, and who is told."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from widemesh.eplb import ExpertLayout
from widemesh.eplb.mover import LoadReading
from widemesh.eplb.reshuffle_figures import ReshuffleFigures
from widemesh.eplb.reshuffle_status import NoListener

LAYOUT = ExpertLayout(num_layers=2, num_experts=4, ranks=2)
SOME = LoadReading(load_by_slot=np.full((2, 4), 3), balancedness=0.75)
NONE = LoadReading(load_by_slot=np.zeros((2, 4), np.int64), balancedness=0.0)


class Listener(NoListener):
    def __init__(self) -> None:
        self.heard: list[tuple[str, float, float | None]] = []

    def balancedness(self, model: str, value: float, feasible: float | None) -> None:
        self.heard.append((model, value, feasible))


@pytest.fixture
def listener() -> Listener:
    return Listener()


@pytest.fixture
def figures(listener: Listener) -> ReshuffleFigures:
    return ReshuffleFigures("target", LAYOUT, logs=False, logs_balancedness=False, row_bytes=1, listener=listener)


def test_what_routed_nothing_measures_nothing(figures: ReshuffleFigures, listener: Listener) -> None:
    """A step that was dispatched before its last request was known to have ended has no rows."""
    figures.step_read(SOME)
    figures.step_read(NONE)
    assert (figures.balancedness, figures.load_steps) == (0.75, 1) and figures.load.all()
    figures.window_read(NONE, 8)
    assert figures.balancedness == 0.75 and listener.heard == [("target", 0.75, None)]


def test_what_a_plan_may_reach_is_told_with_it(figures: ReshuffleFigures, listener: Listener) -> None:
    figures.window_read(SOME, 8)
    figures.planned(SimpleNamespace(feasible=0.9))  # type: ignore[arg-type]
    assert listener.heard == [("target", 0.75, None), ("target", 0.75, 0.9)]
