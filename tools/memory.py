"""`widemesh memory DIR`: what an engine with these settings will hold, without reading a weight or allocating it."""

from __future__ import annotations

import dataclasses
import json
import os
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from widemesh.model.config import ConfigError, ModelConfig
from widemesh.model.presets import PRESETS
from widemesh.serving.config import EngineConfig

if TYPE_CHECKING:
    from rich.table import Table

    from widemesh.serving.memory_plan import MemoryPlan


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedEngine(EngineConfig):
    """The engine's settings; those that memory depends on most have a short name too."""

    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="DIR")] = ""  # folder with a config.json
    # requests decoded together, over all decode devices
    max_num_seqs: Annotated[int, tyro.conf.arg(aliases=["--slots"])] = EngineConfig.max_num_seqs
    # pages of each decode device's pool, the null page included; None: for all its slots
    num_pages: Annotated[int | None, tyro.conf.arg(aliases=["--pages"])] = EngineConfig.num_pages


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """Print how much memory the engine will hold on each mesh; `--slots` and `--pages` stand for `--max-num-seqs` and
    `--num-pages`.

    Takes a checkpoint folder, of which only config.json is read, or the name of a preset. The last line is JSON.
    """

    engine: Annotated[PlannedEngine, tyro.conf.arg(name="")]
    platform: Literal["cpu", "gpu"] = "cpu"  # what the numerics `serving` stand for
    preset: Annotated[str | None, tyro.conf.arg(metavar="{" + ",".join(PRESETS) + "}")] = None  # sizes instead of DIR's

    def __post_init__(self) -> None:
        if self.preset is not None and self.preset not in PRESETS:
            raise ConfigError(f"preset={self.preset!r} is unknown; use one of {', '.join(PRESETS)}")
        if (self.preset is None) == (not self.engine.model):
            raise ConfigError("give either a folder DIR with a config.json, or --preset NAME")

    def run(self) -> None:
        model = ModelConfig.from_dir(self.engine.model) if self.preset is None else PRESETS[self.preset]
        os.environ.setdefault("JAX_PLATFORMS", "cpu")  # shapes only: no accelerator is to be taken
        from rich.console import Console

        from widemesh.serving.memory_plan import plan_memory

        plan = plan_memory(model, self.engine, self.platform)
        title = f"{self.preset or self.engine.model}, {self.engine.numerics} on a {self.platform.upper()}"
        Console().print(_table(plan, title))
        print(json.dumps(plan.to_json()))


def _table(plan: MemoryPlan, title: str) -> Table:
    """One line per mesh and part, one per mesh, and the total."""
    from rich.table import Table
    from rich.text import Text

    from widemesh.serving.memory_plan import format_bytes

    table = Table(title=Text(title), caption=Text(
        f"{plan.bytes_per_token:g} B per token, {plan.page_bytes} B per page, window rings of a slot "
        f"{plan.window_bytes_per_slot} B of which {plan.window_bytes_needed} B are read"
    ))  # fmt: skip
    table.add_column("mesh")
    table.add_column("kind")
    table.add_column("part")
    table.add_column("per device", justify="right")
    table.add_column("total", justify="right")
    for mesh in plan.meshes:
        for part in mesh.parts:
            sizes = (part.num_bytes, mesh.devices * part.num_bytes)
            table.add_row(mesh.name, part.kind, part.name, *map(format_bytes, sizes))
        sizes = (mesh.rank_bytes, mesh.total_bytes)
        table.add_row(mesh.name, "", f"all, {mesh.devices} devices", *map(format_bytes, sizes), style="bold")
        table.add_section()
    table.add_row("both", "", "", "", format_bytes(plan.total_bytes), style="bold")
    return table
