"""`widemesh bench reshuffle`: decode steps while experts move, beside undisturbed ones of the same run."""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table

from widemesh.eplb.config import EplbConfig
from widemesh.model.config import ConfigError
from widemesh.model.presets import DEFAULT_PRESET, PRESETS
from widemesh.serving.config import check_slice_rows
from widemesh.tools.init_tiny import TINY_PRESETS

_LONGEST = 4096  # tokens of a request: one for each step that is taken


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReshuffleBench:
    """Serve a small model whose gates prefer some experts, with all slots taken, while its experts move back and forth.

    Gates: in every layer, the experts in a random order get biases that are lower by `skew` times ln 1, ln 2, ln 3 and
    so on; the weights are random. The engine counts its own load, plans a placement from one window, and counts again
    with it. Then it moves between the first placement and that one, with an undisturbed stretch before each time.

    The last line printed is a JSON object. Step times are from one result to the next, as the engine's own metrics
    have them, for the first of `slice_rows` (all of them are in `by_slice_rows`); rows and bytes go from rank to rank;
    `least_rows` is the number that no other way to move would undercut.
    """

    preset: Annotated[str, tyro.conf.arg(metavar="{" + ",".join(TINY_PRESETS) + "}")] = DEFAULT_PRESET  # model sizes
    ranks: int = 8  # of the decode mesh, one virtual device each
    redundant: int = 8  # expert slots beyond one per expert
    slots: int = 32  # requests decoded together
    window: int = 64  # steps that a plan is made from
    rebalances: int = 6  # measured, one after the other
    stretch: int = 60  # undisturbed steps before each of them
    slice_rows: tuple[int, ...] = (1, 3)  # expert rows that a rank sends between two steps; an engine for each
    skew: float = 0.4  # of the gates, 0: none

    def __post_init__(self) -> None:
        if self.preset not in TINY_PRESETS:
            raise ConfigError(f"preset={self.preset!r} is unknown; use one of {', '.join(TINY_PRESETS)}")
        for name in ("rebalances", "stretch"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1; use 1 or more")
        if not self.slice_rows:
            raise ConfigError("slice_rows= is empty; give at least one number")
        if not self.skew >= 0:
            raise ConfigError(f"skew={self.skew:g} must not be negative; use 0 or more")
        for rows in self.slice_rows:
            experts = PRESETS[self.preset].n_routed_experts
            check_slice_rows(rows, self.eplb(rows).layout(num_layers=1, num_experts=experts, ranks=self.ranks))
        steps = 2 * self.window + self.rebalances * self.stretch  # those while experts move come on top
        if steps >= _LONGEST:
            raise ConfigError(f"rebalances={self.rebalances} times stretch={self.stretch} and twice window="
                              f"{self.window} are {steps} steps; use fewer than {_LONGEST}")  # fmt: skip
        if self.slots < 1 or self.slots % self.ranks:
            raise ConfigError(f"slots={self.slots} must be a multiple of ranks={self.ranks}; use "
                              f"{max(1, -(-self.slots // self.ranks)) * self.ranks}")  # fmt: skip

    def eplb(self, slice_rows: int) -> EplbConfig:
        """Settings of an engine that plans when it is asked to. Raises ConfigError."""
        return EplbConfig(num_redundant_experts=self.redundant, window_size=self.window, step_interval=10**9,
                          slice_rows=slice_rows)  # fmt: skip

    def run(self) -> None:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        from widemesh.serving.config import EngineConfig
        from widemesh.serving.engine import Engine
        from widemesh.tools.bench.reshuffle_run import Measured, measure, write_skewed

        console = Console()
        found: dict[int, Measured] = {}
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name) / "model"
            write_skewed(folder, PRESETS[self.preset], self.skew)
            for rows in self.slice_rows:
                console.print(f"slices of {rows} rows: opening an engine on {self.ranks} ranks ...", highlight=False)
                config = EngineConfig(
                    model=str(folder), numerics="plain", max_model_len=_LONGEST, max_num_seqs=self.slots,
                    max_num_batched_tokens=64, reserve_output_tokens=1, prefill_devices=1, decode_devices=self.ranks,
                    enable_eplb=True, eplb=self.eplb(rows),
                )  # fmt: skip
                with Engine(config) as engine:
                    found[rows] = measure(engine, rebalances=self.rebalances, stretch=self.stretch)
        first = found[self.slice_rows[0]]
        console.print(self._table(found))
        console.print(
            f"balancedness with {self.redundant} redundant experts, of the sums of {self.window} steps: "
            f"{first.sums_before:.3f}, planned {first.planned:.3f}, then {first.sums_after:.3f}; of the steps one by "
            f"one: {first.before:.3f}, then {first.after:.3f}", highlight=False, soft_wrap=True,
        )  # fmt: skip
        times = {rows: _times(one) for rows, one in found.items()}
        print(json.dumps(times[self.slice_rows[0]] | {
            "rows_per_rebalance": first.rows_per_rebalance, "least_rows": first.least_rows,
            "bytes_per_rebalance": round(first.rows_per_rebalance * first.row_bytes),
            "skewed": {
                **{name: round(getattr(first, name), 4)
                   for name in ("before", "after", "planned", "sums_before", "sums_after")},
                "redundant": self.redundant,
            },
            "by_slice_rows": {str(rows): one for rows, one in times.items()},
        }), flush=True)  # fmt: skip

    def _table(self, found: dict[int, Any]) -> Table:
        row_bytes = next(iter(found.values())).row_bytes
        table = Table(
            title=f"decode steps of {self.slots} slots on {self.ranks} ranks, {self.preset}, milliseconds",
            caption="slice: rows that a rank sends between two steps; still, moving: medians; steps: while experts "
            f"moved; seconds, rows: of a rebalance; least: no other way has fewer; a row: {row_bytes:,} bytes",
        )  # fmt: skip
        for name in ("slice", "still", "P99", "moving", "P99", "steps", "seconds", "rows", "least"):
            table.add_column(name, justify="right")
        for rows, one in found.items():
            times = _times(one)
            table.add_row(
                str(rows), *(f"{times[kind][figure]:.2f}" for kind in ("undisturbed", "migrating")
                             for figure in ("median_ms", "p99_ms")),
                str(len(one.migrating_s)), f"{times['seconds_per_rebalance']:.2f}", f"{one.rows_per_rebalance:.0f}",
                f"{one.least_rows:.0f}",
            )  # fmt: skip
        return table


def _times(one: Any) -> dict[str, Any]:
    return {
        "undisturbed": _spread(one.undisturbed_s), "migrating": _spread(one.migrating_s),
        "seconds_per_rebalance": round(statistics.median(one.rebalance_s), 3),
    }  # fmt: skip


def _spread(seconds: list[float]) -> dict[str, float]:
    """Median and P99; of less than a hundred steps the longest."""
    ordered = sorted(seconds)
    p99 = ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
    return {"median_ms": round(statistics.median(ordered) * 1e3, 3), "p99_ms": round(p99 * 1e3, 3)}
