"""`widemesh check`: the engine's step programs compiled for GPUs that need not be there, at full size."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from widemesh.eplb.config import EplbConfig
from widemesh.model.config import ConfigError, ModelConfig
from widemesh.model.presets import PRESETS
from widemesh.pallas_kernels.gpu.targets import TARGETS
from widemesh.serving.config import EngineConfig

if TYPE_CHECKING:
    from rich.table import Table

    from widemesh.serving.ahead import StepCheck

_SLOTS_PER_DEVICE = 64
_ROWS_PER_DEVICE = 2048
_WIDTH = 110


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check:
    """Compile the programs that an engine dispatches, for GPUs that need not be there, and say whether they fit.

    Takes a folder with a config.json, of which nothing else is read, or the name of a preset. Every op runs its GPU
    kernel, weights are packed as released. Exit status 1, with the reason, if a program does not compile, does not
    fit into a device's memory, lacks the kernel of an op or has one that spills. The last line is JSON; bytes are per
    device.
    """

    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="DIR")] = ""  # folder with a config.json
    preset: Annotated[str | None, tyro.conf.arg(metavar="{" + ",".join(PRESETS) + "}")] = None  # sizes instead of DIR's
    target: Annotated[str, tyro.conf.arg(metavar="{" + ",".join(TARGETS) + "}")] = "H200"  # GPU
    devices: int = 8  # GPUs of the role's mesh, 1 to 8 or a multiple of 8
    role: Literal["decode", "prefill"] = "decode"  # whose programs
    slots: int | None = None  # decode: requests decoded together, over all devices; None: 64 per device
    max_model_len: int = 131072  # tokens of the longest request
    pages: int | None = None  # of each device's pool; None: for all slots (decode), for four requests (prefill)
    page_size: int = EngineConfig.page_size  # tokens
    chunk_rows: int = _ROWS_PER_DEVICE  # prefill: tokens of a prompt in one step of a device
    decode_steps: int = 1  # decode: tokens that one dispatch draws
    # tokens that the model's draft proposes: decode then runs slots * (1 + drafts) rows and the draft behind them
    drafts: int = 0
    redundant_experts: int | None = None  # decode: with enable_eplb and so many redundant experts; None: without
    replay_tail: Literal["bounded", "full"] = "bounded"  # prefill: rows of the later layers, one window or all

    def __post_init__(self) -> None:
        if self.preset is not None and self.preset not in PRESETS:
            raise ConfigError(f"preset={self.preset!r} is unknown; use one of {', '.join(PRESETS)}")
        if (self.preset is None) == (not self.model):
            raise ConfigError("give either a folder DIR with a config.json, or --preset NAME, and not both")
        if self.target not in TARGETS:
            raise ConfigError(f"target={self.target!r} is unknown; use one of {', '.join(TARGETS)}")
        for name in ("devices", "chunk_rows"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1; use 1 or more")
        if self.slots is not None and (self.slots < 1 or self.slots % self.devices):
            use = max(1, -(-self.slots // self.devices)) * self.devices
            raise ConfigError(f"slots={self.slots} must be a multiple of devices={self.devices}; use {use}")
        if self.pages is not None and self.pages < 2:
            raise ConfigError(f"pages={self.pages} must be at least 2, one of which is nobody's")
        if self.drafts < 0:
            raise ConfigError(f"drafts={self.drafts} must not be negative; use 0 to leave the draft out")
        if self.redundant_experts is not None and self.role != "decode":
            raise ConfigError(f"redundant_experts={self.redundant_experts} goes with role=decode: prefill keeps one "
                              "slot per expert; leave it out")  # fmt: skip

    def run(self) -> int:
        model = ModelConfig.from_dir(self.model) if self.preset is None else PRESETS[self.preset]
        config = self.engine_config()
        os.environ["JAX_PLATFORMS"] = "cpu"  # the plugin is only to compile
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # XLA finds a compile of minutes alarming
        from rich.console import Console

        from widemesh.serving.ahead import check_step

        console = Console(width=None if sys.stdout.isatty() else _WIDTH)  # a pipe has no width of its own
        errors = Console(stderr=True)
        begin = time.perf_counter()

        def report(name: str) -> None:
            print(f"{time.perf_counter() - begin:6.1f} s  compiling {name}", file=sys.stderr, flush=True)

        check = check_step(model, config, target=self.target, role=self.role, report=report)
        console.print(_memory(check, f"{self.preset or self.model} on {self.devices} x {self.target}, {self.role}"))
        console.print(_kernels(check))
        console.print(_collectives(check))
        for reason in check.reasons():
            errors.print(f"widemesh check: {reason}", style="red", highlight=False, soft_wrap=True)
        print(json.dumps(check.to_json()), flush=True)
        return 1 if check.reasons() else 0

    def engine_config(self) -> EngineConfig:
        """The engine whose programs are compiled. With role=decode nothing is asked of its prefill mesh."""
        prefill_devices = self.devices if self.role == "prefill" else 1
        return EngineConfig(
            numerics="serving",
            max_model_len=self.max_model_len,
            max_num_seqs=_SLOTS_PER_DEVICE * self.devices if self.slots is None else self.slots,
            max_num_batched_tokens=self.chunk_rows * prefill_devices,
            page_size=self.page_size,
            num_pages=self.pages if self.role == "decode" else None,
            num_prefill_pages=self.pages if self.role == "prefill" else None,
            prefill_devices=prefill_devices,
            decode_devices=self.devices,
            decode_steps=self.decode_steps,
            num_speculative_tokens=self.drafts,
            replay_tail=self.replay_tail,
            enable_eplb=self.redundant_experts is not None,
            eplb=EplbConfig(num_redundant_experts=self.redundant_experts or 0),
        )


def _memory(check: StepCheck, title: str) -> Table:
    from rich.table import Table
    from rich.text import Text

    from widemesh.serving.memory_plan import format_bytes

    hbm = check.target.hbm_bytes
    caption = f"per device, of {format_bytes(hbm)}; compiled in {check.seconds:.0f} s"
    table = Table(title=Text(title), caption=Text(caption))
    for column in ("program", "arguments", "results", "temporaries", "together", "of the memory"):
        table.add_column(column, justify="left" if column == "program" else "right")
    for name, one in check.programs.items():
        memory = one.memory
        kept = memory.output_bytes - memory.alias_bytes
        sizes = (memory.argument_bytes, kept, memory.temp_bytes, memory.total_bytes)
        table.add_row(name, *map(format_bytes, sizes), f"{memory.total_bytes / hbm:.0%}")
    for name in check.errors:
        table.add_row(name, "does not compile", *[""] * 4)
    return table


def _kernels(check: StepCheck) -> Table:
    from rich.table import Table

    table = Table(title="GPU kernels")
    for column in ("program", "kernel", "calls", "registers", "spills", "shared memory"):
        table.add_column(column, justify="left" if column in ("program", "kernel") else "right")
    for program, one in check.programs.items():
        for calls in one.calls:
            facts = [kernel for kernel in one.kernels if kernel.name == calls.name]
            registers = max((kernel.registers for kernel in facts), default=0)
            smem = max((kernel.smem_bytes for kernel in facts), default=0)
            spills = sum(kernel.spill_bytes for kernel in facts)
            table.add_row(program, calls.name, str(calls.count), str(registers), str(spills), f"{smem:,}")
        table.add_section()
    return table


def _collectives(check: StepCheck) -> Table:
    from rich.table import Table

    from widemesh.serving.memory_plan import format_bytes

    table = Table(title="collectives of one run, per device")
    for column in ("program", "kind", "calls", "bytes"):
        table.add_column(column, justify="left" if column in ("program", "kind") else "right")
    for program, one in check.collectives():
        table.add_row(program, one.kind, str(one.runs), format_bytes(one.num_bytes))
    return table
