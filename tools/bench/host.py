"""`widemesh bench host`: what the engine's own thread costs, with everything but the programs on the devices real."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from widemesh.model.config import ConfigError
from widemesh.serving.config import EngineConfig
from widemesh.serving.request import SamplingParams

if TYPE_CHECKING:
    from widemesh.serving.delta_stream import DeltaStream
    from widemesh.tools.bench.host_device import HostEngine, StepClock
    from widemesh.tools.bench.host_parts import PartTimer

_OUTPUT_ROOM = 65536  # tokens that a request may have put out when all have come and the last step is measured
_MOST_STEPS = _OUTPUT_ROOM // 2  # half as many more are for the parts; the rest is for what comes while slots fill
_WARM_TOKENS = 3  # of each request before steps count
_POLL_S = 0.02


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Steps:
    """Steps of a full batch at one context length."""

    cpu_us: float  # of the engine's thread, median
    wall_us: float  # between dispatches, median; includes the wait for the device
    dispatches: int  # most of any step
    parts_us: dict[str, float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Admission:
    """Milliseconds of processor time of one long prompt, medians."""

    read: float  # a request's bytes to an array of ids
    submit: float  # checks, hashes, hand-over to the engine's thread
    admit: float  # on the engine's thread, until the prompt's first chunk is dispatched
    admit_lists: float  # the same with lists


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostBench:
    """Time the engine's own thread at a full batch, with steps on the devices that take a set time and do no work.

    The last line printed is a JSON object: processor time of the engine's thread for a decode step with all slots at
    the short and at the long context (`step_us_8k`, `step_us_855k`), the most `dispatches` of such a step, and for a
    long prompt the thread's time from its arrival to its first dispatch (`admit_ms`), the same if prompts were lists
    (`admit_ms_lists`), and what the front end takes before (`frontend_ms`). All are medians. `short_context` and
    `long_context` say how long the contexts were, whatever the names of the step times.
    """

    slots: int = 64  # requests decoded together
    short_context: int = 8192  # prompt tokens
    long_context: int = 855_000  # prompt tokens
    steps: int = 400  # decode steps measured at each context
    step_ms: float = 5.0  # device time of a decode step
    prompts: int = 5  # long prompts whose admission is measured
    chunk_rows: int = 2048  # tokens of a prompt in one prefill step

    def __post_init__(self) -> None:
        for name in ("slots", "short_context", "steps", "prompts"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1; use 1 or more")
        if self.short_context < 2 * self.slots:
            raise ConfigError(f"short_context={self.short_context} must be at least {2 * self.slots}, twice the "
                              "slots: no two prompts are of the same length")  # fmt: skip
        if self.long_context <= self.short_context:
            raise ConfigError(f"long_context={self.long_context} must be above short_context={self.short_context}")
        if self.long_context + _OUTPUT_ROOM > 1 << 20:
            raise ConfigError(f"long_context={self.long_context} must be at most {(1 << 20) - _OUTPUT_ROOM}")
        if self.steps > _MOST_STEPS:
            raise ConfigError(f"steps={self.steps} must be at most {_MOST_STEPS}; use 400")
        if self.chunk_rows < 128:
            raise ConfigError(f"chunk_rows={self.chunk_rows} must be at least 128; use 2048")
        if not 1 <= self.step_ms <= 1000:  # the readers of 64 requests take more than a millisecond themselves
            raise ConfigError(f"step_ms={self.step_ms} must be between 1 and 1000; use 5")

    def run(self) -> None:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        from widemesh.tools.bench.host_device import HostEngine, StepClock

        console, clock = Console(), StepClock(self.step_ms * 1e-3)
        with tempfile.TemporaryDirectory() as folder:
            config = self._config(Path(folder))
            engine = HostEngine(config, clock)
            with engine:
                short, admission, long = asyncio.run(self._measure(engine, clock, console))
        console.print(self._table({"short": short, "long": long}))
        console.print(
            f"a prompt of {self.long_context:,} tokens: read {admission.read:.1f} ms, checked and hashed "
            f"{admission.submit:.1f} ms, admitted {admission.admit:.2f} ms (with lists {admission.admit_lists:.1f} ms)",
            highlight=False, soft_wrap=True,
        )  # fmt: skip
        figures = {
            "step_us_8k": round(short.cpu_us, 1), "step_us_855k": round(long.cpu_us, 1),
            "admit_ms": round(admission.admit, 3), "admit_ms_lists": round(admission.admit_lists, 1),
            "frontend_ms": round(admission.read + admission.submit, 1),
            "dispatches": max(short.dispatches, long.dispatches), "slots": self.slots,
            "short_context": self.short_context, "long_context": self.long_context,
        }  # fmt: skip
        print(json.dumps(figures), flush=True)

    def _config(self, folder: Path) -> EngineConfig:
        """A small model that takes long prompts; a slot's pages are given out one by one as its output grows."""
        from widemesh.tools.init_tiny import write_tiny

        write_tiny(folder, preset="tiny-mesh", seed=0, form="quantized")
        path = folder / "config.json"
        content = json.loads(path.read_text())
        content["text_config"]["max_position_embeddings"] = 1 << 20
        path.write_text(json.dumps(content))
        return EngineConfig(
            model=str(folder), max_model_len=self.long_context + _OUTPUT_ROOM, max_num_seqs=self.slots,
            max_num_batched_tokens=self.chunk_rows, reserve_output_tokens=1, prefill_devices=1, decode_devices=1,
        )  # fmt: skip

    async def _measure(
        self, engine: HostEngine, clock: StepClock, console: Console
    ) -> tuple[_Steps, _Admission, _Steps]:
        import numpy as np

        from widemesh.tools.bench.host_parts import PartTimer

        ids = np.random.default_rng(0).integers(3, 256, (1 + self.prompts, self.long_context)).astype(np.int32)
        parts = PartTimer(engine)
        console.print(f"{self.slots} slots at {self.short_context:,} tokens ...", highlight=False)
        short = await self._steps(engine, clock, parts, ids[0][: self.short_context])
        console.print(f"admission of {self.long_context:,} tokens ...", highlight=False)
        admission = await self._admissions(engine, clock, ids[1:])
        console.print(f"{self.slots} slots at {self.long_context:,} tokens ...", highlight=False)
        long = await self._steps(engine, clock, PartTimer(engine), ids[0])
        return short, admission, long

    async def _steps(self, engine: HostEngine, clock: StepClock, parts: PartTimer, prompt: Any) -> _Steps:
        """Fill the slots with prompts that each lack another number of last tokens, and watch steps."""
        sampling = SamplingParams(temperature=0.0, ignore_eos=True)
        counts = [0] * self.slots

        async def read(slot: int, stream: DeltaStream) -> None:
            async for delta in stream:
                counts[slot] += len(delta.token_ids)

        async with contextlib.AsyncExitStack() as stack:
            readers = []
            for slot in range(self.slots):
                stream = engine.stream(prompt[: len(prompt) - slot], sampling)
                stack.push_async_callback(stream.aclose)
                readers.append(asyncio.create_task(read(slot, stream)))
                await asyncio.sleep(0)
            while min(counts) < _WARM_TOKENS:
                await self._check(engine, readers)
            first = len(clock.marks)
            while len(clock.marks) <= first + self.steps:
                await self._check(engine, readers)
            seen = clock.marks[first : first + self.steps + 1]
            with parts:
                first = len(clock.marks)
                while len(clock.marks) <= first + self.steps // 2:
                    await self._check(engine, readers)
        for reader in readers:
            reader.cancel()
        while engine.num_running:
            await asyncio.sleep(_POLL_S)
        steps = list(zip(seen[1:], seen, strict=False))
        return _Steps(
            cpu_us=statistics.median(now.cpu_ns - then.cpu_ns for now, then in steps) / 1e3,
            wall_us=statistics.median(now.wall_ns - then.wall_ns for now, then in steps) / 1e3,
            dispatches=max(now.num_dispatches - then.num_dispatches for now, then in steps),
            parts_us=parts.us_per_turn(),
        )

    async def _check(self, engine: HostEngine, readers: list[asyncio.Task[None]]) -> None:
        """Wait a little. Raises RuntimeError if a request has ended, which none should."""
        await asyncio.sleep(_POLL_S)
        if not engine.is_alive or any(reader.done() for reader in readers):
            raise RuntimeError("a request ended while steps were measured")

    async def _admissions(self, engine: HostEngine, clock: StepClock, prompts: Any) -> _Admission:
        """One prompt after the other, into an engine that is idle; none finds another's pages in the prefix cache."""
        from smg_grpc_proto.generated import vllm_engine_pb2 as pb

        from widemesh.serving.grpc.convert import read_request
        from widemesh.tools.bench.host_lists import ListAdmission

        lists = ListAdmission(engine.config.page_size, engine.config.max_model_len, engine.model_config.sliding_window)
        read_ns, submit_ns, admit_ns, lists_ns = [], [], [], []
        for prompt in prompts:
            message = pb.GenerateRequest(
                tokenized=pb.TokenizedInput(input_ids=prompt.tolist()),
                sampling_params=pb.SamplingParams(temperature=0.0, ignore_eos=True), stream=True,
            ).SerializeToString()  # fmt: skip
            start_ns = time.thread_time_ns()
            call = read_request(pb.GenerateRequest.FromString(message))
            read_ns.append(time.thread_time_ns() - start_ns)

            chunks, idle_ns = len(clock.chunk_cpu_ns), clock.thread_cpu_ns()
            start_ns = time.thread_time_ns()
            stream = engine.stream(call.prompt, call.sampling)
            submit_ns.append(time.thread_time_ns() - start_ns)
            while len(clock.chunk_cpu_ns) == chunks:
                await asyncio.sleep(0.001)
            admit_ns.append(clock.chunk_cpu_ns[chunks] - idle_ns)
            await stream.aclose()
            while engine.num_running:
                await asyncio.sleep(_POLL_S)

            as_list = prompt.tolist()
            start_ns = time.thread_time_ns()
            lists.admit(as_list)
            lists_ns.append(time.thread_time_ns() - start_ns)
        return _Admission(
            read=statistics.median(read_ns) / 1e6, submit=statistics.median(submit_ns) / 1e6,
            admit=statistics.median(admit_ns) / 1e6, admit_lists=statistics.median(lists_ns) / 1e6,
        )  # fmt: skip

    def _table(self, columns: dict[str, _Steps]) -> Table:
        table = Table(title=f"engine thread, microseconds per decode step of {self.slots} slots",
                      caption="parts: means of other steps, the clock's cost within; thread: median of processor time; "
                      f"between steps: median of wall time, a step takes the device {self.step_ms:g} ms")  # fmt: skip
        table.add_column("part")
        for name, context in zip(columns, (self.short_context, self.long_context), strict=True):
            table.add_column(f"{name}: {context:,} tokens", justify="right")
        for part in next(iter(columns.values())).parts_us:
            table.add_row(part, *(f"{one.parts_us[part]:.1f}" for one in columns.values()))
        table.add_section()
        table.add_row("thread", *(f"{one.cpu_us:.1f}" for one in columns.values()))
        table.add_row("between steps", *(f"{one.wall_us:.1f}" for one in columns.values()))
        return table
