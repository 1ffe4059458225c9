"""Layouts, loads and placements that the property tests of this room draw."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import reject
from hypothesis import strategies as st

from widemesh.eplb import EplbConfig, ExpertLayout, initial_placement, plan_placement
from widemesh.model.config import ConfigError


class Draws:
    """What a hypothesis test draws from its `data`."""

    def layout(self, data: st.DataObject, *, hierarchical: bool = True) -> ExpertLayout:
        draw = data.draw
        ranks, experts, nodes, groups = draw(st.integers(1, 8)), draw(st.integers(1, 24)), 1, 1
        if hierarchical and draw(st.booleans()):
            nodes = draw(st.sampled_from([n for n in range(1, ranks + 1) if ranks % n == 0]))
            groups = nodes * draw(st.integers(1, 2))
            experts = groups * draw(st.integers(1, 6))
        try:
            layout = ExpertLayout(
                num_layers=draw(st.integers(1, 3)), num_experts=experts, ranks=ranks, num_groups=groups,
                num_redundant_experts=-experts % ranks, max_copies_per_expert=draw(st.sampled_from([2, 3, 8])),
                num_nodes=nodes,
            )  # fmt: skip
        except ConfigError:  # too few experts, with so many copies, for so many ranks
            reject()
        redundant = draw(st.sampled_from(layout.legal_redundant_experts()[:8]))
        return dataclasses.replace(layout, num_redundant_experts=redundant)

    def load(self, data: st.DataObject, layout: ExpertLayout) -> np.ndarray:
        """Heavy-tailed counts; in some layers few experts are taken, or none."""
        rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
        shape = (layout.num_layers, layout.num_experts)
        load = rng.poisson(np.exp(rng.normal(2, data.draw(st.sampled_from([0.1, 1.0, 3.0])), shape)))
        taken = rng.choice([0.0, 0.3, 1.0], (layout.num_layers, 1), p=[0.1, 0.3, 0.6])
        return load * (rng.random(shape) < taken)

    def placement(self, data: st.DataObject, layout: ExpertLayout) -> np.ndarray:
        """A valid placement: the first one, a planned one, or the slots of either in any order."""
        planned = data.draw(st.booleans())
        owner = plan_placement(self.load(data, layout), layout) if planned else initial_placement(layout)
        if data.draw(st.booleans()):
            return np.random.default_rng(data.draw(st.integers(0, 99))).permuted(owner, axis=1)
        return owner


@pytest.fixture(scope="session")
def draws() -> Draws:
    return Draws()


@pytest.fixture(scope="session")
def simulation() -> ModuleType:
    """The module beside this file; tests are imported without a path of their own."""
    spec = importlib.util.spec_from_file_location("widemesh_test_eplb", Path(__file__).parent / "simulation.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules.setdefault(spec.name, importlib.util.module_from_spec(spec))
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def start(simulation: ModuleType) -> Callable[..., Any]:
    """Start a simulated job, of the simulation's own settings unless others are given."""

    def start(config: EplbConfig = simulation.CONFIG, layout: ExpertLayout = simulation.LAYOUT, **options: Any) -> Any:
        return simulation.Job(layout, config, **options)

    return start
