"""Compiling the engine's step programs for GPUs that need not be there: do they compile, and do they fit?"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax

from widemesh.eplb import EplbConfig
from widemesh.model.config import ConfigError, ModelConfig
from widemesh.model.loading import split_model
from widemesh.model.numerics import numerics_named
from widemesh.pallas_kernels.gpu.aot import compile_ahead
from widemesh.pallas_kernels.gpu.facts import Calls, Collective, Compiled
from widemesh.pallas_kernels.gpu.targets import TARGETS, GpuTarget
from widemesh.pallas_kernels.gpu.topology import topology
from widemesh.serving.abstract import AbstractArguments
from widemesh.serving.config import EngineConfig
from widemesh.serving.memory_plan import plan_memory
from widemesh.serving.programs import Programs
from widemesh.serving.tensor_split import refuse_packed
from widemesh.sharding import make_mesh

Role = Literal["prefill", "decode"]

# Every op that has a kernel; the names of its kernels begin with it.
OPS = ("sparse_attention", "select_entries", "grouped_moe", "compress", "mhc", "engram_gate")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepCheck:
    """What became of one role's programs, which run one after the other on the same devices."""

    role: Role
    target: GpuTarget
    devices: int
    programs: dict[str, Compiled]
    errors: dict[str, str]  # of the programs that did not compile, in one sentence
    expected: dict[str, tuple[str, ...]]  # the ops of each program
    seconds: float
    drafts: int = 0  # that a decode step tries for each slot
    staging_bytes: int = 0  # per device, held beside the programs: rows of experts that move

    @property
    def compiled(self) -> bool:
        """Whether all programs compiled, each with a kernel for every op of it."""
        return not self.errors and not self.missing

    @property
    def missing(self) -> tuple[tuple[str, str], ...]:
        """Programs that compiled, and ops of them without a kernel."""
        return tuple(
            (name, op) for name, one in self.programs.items() for op in self.expected[name]
            if not any(calls.name.startswith(op) for calls in one.calls)
        )  # fmt: skip

    @property
    def kernels(self) -> dict[str, int]:
        """Custom calls of each op's kernels, over the programs; of the ops that the model has."""
        found = dict.fromkeys((op for op in OPS if any(op in ops for ops in self.expected.values())), 0)
        for calls in self.calls():
            for op in found:
                found[op] += calls.count * calls.name.startswith(op)
        return found

    @property
    def argument_bytes(self) -> int:
        """Of the program that is handed most, per device."""
        return max((one.memory.argument_bytes for one in self.programs.values()), default=0)

    @property
    def temp_bytes(self) -> int:
        """What a program takes on top of its arguments at the most: temporaries, and results that are not donated."""
        return max((one.memory.total_bytes - one.memory.argument_bytes for one in self.programs.values()), default=0)

    @property
    def total_bytes(self) -> int:
        """Device memory at the most."""
        return max((one.memory.total_bytes for one in self.programs.values()), default=0) + self.staging_bytes

    @property
    def spill_bytes(self) -> int:
        """Of all kernels."""
        return sum(one.spill_bytes for one in self.programs.values())

    @property
    def fits(self) -> bool:
        """Whether every program is known to fit into a device's memory."""
        return not self.errors and self.total_bytes <= self.target.hbm_bytes

    def calls(self) -> Iterator[Calls]:
        """Of the kernels, program by program."""
        for one in self.programs.values():
            yield from one.calls

    def collectives(self) -> Iterator[tuple[str, Collective]]:
        """Program and collectives of one kind."""
        for name, one in self.programs.items():
            for collective in one.collectives:
                yield name, collective

    def reasons(self) -> list[str]:
        """Why the check fails, in sentences; nothing if it does not."""
        found = [f"{name} does not compile: {error}" for name, error in self.errors.items()]
        found += [f"{name} has no kernel of {op}; its reference would run" for name, op in self.missing]
        if self.total_bytes > self.target.hbm_bytes:
            found.append(
                f"{self.total_bytes} bytes are needed of the {self.target.hbm_bytes} of a {self.target.name}; use "
                "fewer slots, a shorter max_model_len, fewer pages or more devices"
            )
        if self.spill_bytes:
            found.append(f"kernels spill {self.spill_bytes} bytes of registers")
        return found

    def to_json(self) -> dict[str, Any]:
        """Plain values. Bytes are per device; collectives are summed over the programs."""
        collectives: dict[str, dict[str, int]] = {}
        for _, one in self.collectives():
            total = collectives.setdefault(one.kind, {"count": 0, "bytes": 0})
            total["count"] += one.runs
            total["bytes"] += one.num_bytes
        return {
            "target": self.target.name,
            "devices": self.devices,
            "role": self.role,
            "drafts": self.drafts,
            "fits": self.fits,
            "compiled": self.compiled,
            "kernels": self.kernels,
            "argument_bytes": self.argument_bytes,
            "temp_bytes": self.temp_bytes,
            "staging_bytes": self.staging_bytes,
            "hbm_bytes": self.target.hbm_bytes,
            "spill_bytes": self.spill_bytes,
            "collectives": collectives,
            "seconds": round(self.seconds, 1),
        }


def check_step(
    model: ModelConfig, config: EngineConfig, *, target: str, role: Role, report: Callable[[str], None] = lambda _: None
) -> StepCheck:
    """Compile what an engine of these settings dispatches in `role`, for as many GPUs as the role has devices.

    `report` is told what is being compiled. Raises ConfigError for settings that the model cannot be served with or
    a number of devices that no whole hosts have; ToolchainError without a compiler.
    """
    config.check_model(model)
    model = model.with_draft(config.num_speculative_tokens)
    sizes = config.scheduler
    devices = config.decode_devices if role == "decode" else config.prefill_devices
    refuse_packed(config.tensor_parallel_size)
    try:
        mesh = make_mesh(topology(target, devices))
    except ValueError as err:
        raise ConfigError(str(err)) from err
    numerics = numerics_named("serving", "gpu")
    graph, _ = split_model(model, numerics)
    programs = Programs(
        config=model, numerics=numerics, graph=graph, mesh=mesh, max_len=sizes.pages_per_slot * config.page_size,
        kernels="mosaic", exchange=config.exchange, batch_invariant=config.batch_invariant,
        eplb=config.eplb if role == "decode" else EplbConfig(),
        draft_eplb=config.draft_eplb if role == "decode" else EplbConfig(),
    )  # fmt: skip
    begin = time.perf_counter()
    compiled: dict[str, Compiled] = {}
    errors: dict[str, str] = {}
    expected: dict[str, tuple[str, ...]] = {}
    with _no_stored_programs():
        for name, function, arguments in step_programs(programs, config, role):
            report(name)
            expected[name] = ops_of(model, name)
            try:
                # To know its arguments, the tail traces the encode, whose kernels ask what they are traced for.
                with jax.default_device(topology(target)[0]):
                    placed = arguments()
                compiled[name] = compile_ahead(function, placed, target)
            except Exception as err:  # whatever tracing, lowering or the compiler raises is the answer to the question
                errors[name] = f"{type(err).__name__}: {next(iter(str(err).strip().splitlines()), '')}"
    return StepCheck(
        role=role, target=TARGETS[target], devices=devices, programs=compiled, errors=errors, expected=expected,
        drafts=model.num_speculative_tokens, seconds=time.perf_counter() - begin,
        staging_bytes=_staging_bytes(model, config) if role == "decode" else 0,
    )  # fmt: skip


def _staging_bytes(model: ModelConfig, config: EngineConfig) -> int:
    """What moving experts takes of each decode device: a layer's rows as they arrive, and as a commit makes them."""
    parts = plan_memory(model, config, "gpu").decode.parts
    return sum(part.num_bytes for part in parts if part.name.endswith(("expert staging", "expert commit")))


def ops_of(model: ModelConfig, program: str) -> tuple[str, ...]:
    """The ops that a program of this name has for a model: those of the layers that it runs."""
    cut = model.replay_cut
    below = range(cut + 1) if program == "encode" else range(model.num_hidden_layers)  # layers that store keys
    whole = {"encode": range(cut), "tail": range(cut, model.num_hidden_layers)}.get(program, below)
    has = {
        "select_entries": any(model.roles[layer].owns_index for layer in whole),
        "compress": program != "tail" and any(model.roles[layer].owns_kv for layer in below),
        "engram_gate": program != "tail" and any(model.roles[layer].has_engram for layer in below),
    }
    return tuple(op for op in OPS if has.get(op, True))


@contextlib.contextmanager
def _no_stored_programs() -> Iterator[None]:
    """The compiler reports on kernels that it compiles, not on those of a stored program."""
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)


def step_programs(
    programs: Programs, config: EngineConfig, role: Role
) -> Iterator[tuple[str, Callable[..., Any], Callable[[], tuple[Any, ...]]]]:
    """Name, function and abstract arguments of what an engine with these programs dispatches step after step."""
    sizes = config.scheduler
    if role == "decode":
        abstract = AbstractArguments(
            programs=programs, slots=sizes.slots_per_rank, pages=sizes.decode_pages, page_size=config.page_size,
            windows=config.load_windows,
        )  # fmt: skip
        steps = config.decode_steps
        yield "decode", programs.decode(steps), lambda: abstract.decode(steps)
        return
    abstract = AbstractArguments(programs=programs, slots=1, pages=sizes.prefill_pages, page_size=config.page_size)
    rows = config.chunk_rows
    if config.replay_tail == "full":
        yield "prefill", programs.prefill(rows), lambda: abstract.prefill(rows)
        return
    yield "encode", programs.encode(rows), lambda: abstract.prefill(rows)
    yield "tail", programs.tail(rows), lambda: abstract.tail(rows)
