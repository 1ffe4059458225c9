"""`widemesh bench eplb`: how even expert load gets, in simulated steps, and how long a plan takes.

No model runs. Each layer has its own skewed probabilities of being taken for its experts; steps are drawn from them. A
plan is made from one window of steps, and its placement is measured on steps drawn afresh.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.table import Table

from widemesh.eplb import (
    EplbConfig,
    ExpertLayout,
    advise_redundancy,
    balancedness,
    expected_slot_load,
    feasible_balancedness,
    initial_placement,
    plan_migration,
    plan_placement,
    plan_rebalance,
)
from widemesh.model.config import ConfigError
from widemesh.tools.bench.eplb_loads import Measured, SimulatedModel, Skew, draw_window, measure, uniform
from widemesh.tools.bench.eplb_plain import place_plainly
from widemesh.tools.bench.eplb_plot import plot_rank_loads
from widemesh.tools.plotting import check_plotting
from widemesh.tools.settings import check_output

if TYPE_CHECKING:
    from numpy.random import Generator

TARGET = SimulatedModel(name="target", num_experts=384, experts_per_token=6, tokens=6)
DRAFT = SimulatedModel(name="draft", num_experts=128, experts_per_token=3, tokens=5)
# Sizes at which the first placement on 32 ranks starts at about 0.35 (target) and 0.21 (draft).
SKEWS = {
    "target": (Skew("Zipf", 0.72), Skew("log-normal", 1.42)),
    "draft": (Skew("Zipf", 0.86), Skew("log-normal", 1.42)),
}
_WIDTH = 100  # columns of the tables, at least


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Case:
    """One model, skew and number of redundant experts."""

    model: SimulatedModel
    skew: Skew
    layout: ExpertLayout
    load: np.ndarray  # [layers, experts], of the window that the plan was made from
    uniform: float
    bound: float
    expected: float  # balancedness that the plan promises
    before: Measured
    after: Measured
    transfers: int
    least_transfers: int

    @property
    def recovered(self) -> float:
        """How much of the way from `before` to uniform routing is covered; 0 where there is none to cover."""
        way = self.uniform - self.before.balancedness
        return (self.after.balancedness - self.before.balancedness) / way if way else 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class EplbBench:
    """Simulate skewed expert load before and after a rebalance, for target and draft, and time the planner.

    The last line printed is a JSON object. `target` and `draft` hold, for the skew that recovers less, the balancedness
    of `uniform` routing, of the first placement (`before`) and of the planned one (`after`), the number of `redundant`
    experts, and `recovered` = (after - before) / (uniform - before). `plan_s` is the time of one whole plan for the
    target, `policy_s` that of the published policy within it, and `plan_plain_python_s` that of the same policy in
    plain Python, medians of turns taken one after the other.
    """

    layers: int = 40  # of target and draft
    ranks: int = 32  # that the experts lie on
    requests_per_rank: int = 72  # decoded in a step
    target_redundant: int = 32  # redundant experts of the target
    draft_redundant: int = 32  # redundant experts of the draft
    window: int = 1000  # steps whose load a plan is made from
    steps: int = 50  # drawn afresh for each figure
    repeat: int = 3  # turns of the planners
    seed: int = 0  # of popularities and steps
    peer: Path | None = None  # file with rebalance_experts(weight, num_replicas, num_groups, num_nodes, num_gpus)
    plot: Path | None = None  # PNG file for a picture of rank loads before and after

    def __post_init__(self) -> None:
        for name in ("layers", "ranks", "requests_per_rank", "window", "steps", "repeat"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1; use 1 or more")
        if self.ranks < 2:
            raise ConfigError(f"ranks={self.ranks} must be at least 2, for something to balance; use 32")
        if self.seed < 0:
            raise ConfigError(f"seed={self.seed} must not be negative; use 0")
        for model, redundant in ((TARGET, self.target_redundant), (DRAFT, self.draft_redundant)):
            self._layout(model, redundant)
        if self.plot is not None:
            check_plotting(self.plot, "plot")
            check_output(self.plot, "plot")

    def run(self) -> None:
        console = Console(width=max(_WIDTH, Console().width))
        peer = None
        if self.peer is not None:
            from widemesh.tools.bench.eplb_peer import load_peer

            peer = load_peer(self.peer)
        figures: dict[str, Any] = {}
        pictures: list[tuple[str, Measured, Measured]] = []
        for model, redundant in ((TARGET, self.target_redundant), (DRAFT, self.draft_redundant)):
            rng = np.random.default_rng([self.seed, model.num_experts])
            cases = self._cases(model, redundant, rng)
            console.print(self._table(model, cases))
            wanted = [case for case in cases if case.layout.num_redundant_experts == redundant]
            worst = min(wanted, key=lambda case: case.recovered)
            figures[model.name] = self._figures(worst)
            title = f"{model.name}, {worst.skew}, {redundant} redundant"
            pictures.append((title, worst.before, worst.after))
        figures |= self._times(console, peer)
        if self.plot is not None:
            plot_rank_loads(self.plot, pictures)
            console.print(f"rank loads before and after: {self.plot}")
        print(json.dumps(figures))

    def _layout(self, model: SimulatedModel, redundant: int) -> ExpertLayout:
        try:
            return ExpertLayout(num_layers=self.layers, num_experts=model.num_experts, ranks=self.ranks,
                                num_redundant_experts=redundant)  # fmt: skip
        except ConfigError as err:
            raise ConfigError(f"{model.name}: {err}") from None

    def _rows(self, model: SimulatedModel) -> int:
        return self.requests_per_rank * self.ranks * model.tokens

    def _cases(self, model: SimulatedModel, redundant: int, rng: Generator) -> list[_Case]:
        """Every skew without redundant experts, with those asked for, and with one more for every rank."""
        plain = self._layout(model, 0)
        even = measure(initial_placement(plain), uniform(model, self.layers), plain, self._rows(model), self.steps, rng)
        more = [n for n in plain.legal_redundant_experts() if n > redundant][:1]
        cases = []
        for skew in SKEWS[model.name]:
            chance = skew.probabilities(model, self.layers, rng)
            for number in sorted({0, redundant, *more}):
                cases.append(self._case(model, skew, self._layout(model, number), chance, even.balancedness, rng))
        return cases

    def _case(self, model: SimulatedModel, skew: Skew, layout: ExpertLayout, chance: np.ndarray, even: float,
              rng: Generator) -> _Case:  # fmt: skip
        rows, config = self._rows(model), EplbConfig()
        first = initial_placement(layout)
        load = draw_window(chance, rows, self.window, rng)
        plan = plan_rebalance(load, first, layout, min_gain=config.min_gain, max_swaps=config.max_swaps)
        moves = plan_migration(first, plan.slot_owner, layout, plan.layers)
        return _Case(
            model=model, skew=skew, layout=layout, load=load, uniform=even,
            bound=feasible_balancedness(load, layout), expected=plan.after,
            before=measure(first, chance, layout, rows, self.steps, rng),
            after=measure(plan.slot_owner, chance, layout, rows, self.steps, rng),
            transfers=moves.num_transfers, least_transfers=moves.least_transfers,
        )  # fmt: skip

    def _table(self, model: SimulatedModel, cases: Sequence[_Case]) -> Table:
        table = Table(
            title=f"{model.name}: {model.num_experts} experts, {model.experts_per_token} per token, {self.layers} "
                  f"layers, {self.ranks} ranks x {self.requests_per_rank} requests x {model.tokens} tokens",
            caption=f"uniform routing: {cases[0].uniform:.3f}; bound: no placement does better under the load planned "
                    f"with, that of {self.window} steps; after: of {self.steps} fresh steps; moved: expert rows from "
                    "rank to rank; least: fewer cannot bring this placement about",
        )  # fmt: skip
        for name in ("skew", "redundant", "before", "bound", "planned", "after", "recovered", "moved", "least"):
            table.add_column(name, justify="left" if name == "skew" else "right", no_wrap=True)
        for case in cases:
            table.add_row(
                str(case.skew), str(case.layout.num_redundant_experts), f"{case.before.balancedness:.3f}",
                f"{case.bound:.3f}", f"{case.expected:.3f}", f"{case.after.balancedness:.3f}",
                f"{case.recovered:.1%}", f"{case.transfers:,}", f"{case.least_transfers:,}",
            )  # fmt: skip
        return table

    def _figures(self, case: _Case) -> dict[str, Any]:
        advice = advise_redundancy(case.load, case.layout, max_swaps=EplbConfig().max_swaps)
        return {
            "uniform": round(case.uniform, 4), "before": round(case.before.balancedness, 4),
            "after": round(case.after.balancedness, 4), "redundant": case.layout.num_redundant_experts,
            "recovered": round(case.recovered, 4), "skew": str(case.skew),
            "advised_redundant": advice.num_redundant_experts, "moved_rows": case.transfers,
            "least_moved_rows": case.least_transfers,
        }  # fmt: skip

    def _times(self, console: Console,
               peer: Callable[[np.ndarray, ExpertLayout], np.ndarray] | None) -> dict[str, float]:  # fmt: skip
        """Planners on one load of the target, in turn. Their placements' balancedness stands beside the times."""
        layout, config = self._layout(TARGET, self.target_redundant), EplbConfig()
        rng = np.random.default_rng([self.seed, 1])
        chance = SKEWS["target"][0].probabilities(TARGET, self.layers, rng)
        load = draw_window(chance, self._rows(TARGET), self.window, rng)
        first, lists = initial_placement(layout), load.tolist()

        def whole() -> np.ndarray:
            return plan_rebalance(load, first, layout, min_gain=config.min_gain, max_swaps=config.max_swaps).slot_owner

        def plainly() -> np.ndarray:
            return np.array([place_plainly(one, layout.num_slots, 1, 1, layout.ranks) for one in lists], np.int32)

        planners: dict[str, tuple[str, Callable[[], np.ndarray]]] = {
            "plan_s": ("whole plan: policy, swaps, keeping what may stay", whole),
            "policy_s": ("published policy alone", lambda: plan_placement(load, layout)),
            "plan_plain_python_s": ("published policy in plain Python", plainly),
        }
        if peer is not None:
            planners["plan_peer_s"] = (f"peer {self.peer}", lambda: peer(load, layout))
        found: dict[str, np.ndarray] = {}
        spent: dict[str, list[float]] = {name: [] for name in planners}
        for _ in range(self.repeat):
            for name, (_, planner) in planners.items():
                start = time.perf_counter()
                found[name] = planner()
                spent[name].append(time.perf_counter() - start)
        table = Table(title=f"planning {self.layers} layers of {TARGET.num_experts} + {self.target_redundant} experts "
                      f"on {self.ranks} ranks, median of {self.repeat}")  # fmt: skip
        for column in ("planner", "seconds", "balancedness planned"):
            table.add_column(column, justify="left" if column == "planner" else "right")
        medians = {name: statistics.median(times) for name, times in spent.items()}
        for name, (words, _) in planners.items():
            planned = balancedness(expected_slot_load(load, found[name]), self.ranks)
            table.add_row(words, f"{medians[name]:.4f}", f"{planned:.4f}")
        console.print(table)
        return {name: round(seconds, 4) for name, seconds in medians.items()}
