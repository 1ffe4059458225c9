"""An engine whose programs do no work: everything around them, on the host, is the engine's own.

A decode step's result is there a set time after the one before it, without using a core; prefill takes no time.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from widemesh.model.checkpoint import Checkpoint
from widemesh.model.engram_hash import EngramHash
from widemesh.serving.config import EngineConfig
from widemesh.serving.device import DecodeStep, DeviceEngine
from widemesh.serving.engine import Engine
from widemesh.serving.mesh_state import MeshState
from widemesh.serving.programs import Sampled

TOKEN = 3  # that every slot draws in every step


class Mark(NamedTuple):
    """A decode step has just been dispatched."""

    cpu_ns: int  # of the engine's thread since its start, without what it takes to wait
    wall_ns: int
    num_dispatches: int  # of the device since its start


class StepClock:
    """When the device would be ready, and what was seen of the engine's thread meanwhile."""

    def __init__(self, step_s: float):
        self._step_s = step_s
        self._busy_until_s = 0.0
        self.reset()

    def reset(self) -> None:
        """Forget what warm-up has done."""
        self.marks: list[Mark] = []
        self.chunk_cpu_ns: list[int] = []  # of the engine's thread, as a chunk of a prompt is dispatched
        self.waiting_cpu_ns = 0  # of the engine's thread, to fall asleep and wake up
        self.thread_id = 0  # of the engine

    def mark(self, num_dispatches: int) -> None:
        """A decode step has been dispatched by this thread."""
        self.thread_id = threading.get_ident()
        self.marks.append(Mark(time.thread_time_ns() - self.waiting_cpu_ns, time.perf_counter_ns(), num_dispatches))

    def start_step(self) -> float:
        """When the result of a step that is dispatched now is there, in `time.monotonic()` seconds."""
        self._busy_until_s = max(self._busy_until_s, time.monotonic()) + self._step_s
        return self._busy_until_s

    def start_chunk(self) -> None:
        """A chunk of a prompt is dispatched now."""
        self.chunk_cpu_ns.append(time.thread_time_ns())

    def wait(self, ready_s: float) -> None:
        """Sleep until then."""
        left_s = ready_s - time.monotonic()
        if left_s > 0:
            start_ns = time.thread_time_ns()
            time.sleep(left_s)
            self.waiting_cpu_ns += time.thread_time_ns() - start_ns

    def thread_cpu_ns(self) -> int:
        """Processor time of the engine's thread now, read from any thread. It must have run a decode step."""
        return time.clock_gettime_ns(time.pthread_getcpuclockid(self.thread_id))


class _Late:
    """Stands for a device array: to read it is to wait for it."""

    def __init__(self, clock: StepClock, ready_s: float, value: np.ndarray):
        self._clock, self._ready_s, self._value = clock, ready_s, value

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        self._clock.wait(self._ready_s)
        return self._value

    def copy_to_host_async(self) -> None:
        """There is nothing to copy."""

    def is_ready(self) -> bool:
        return time.monotonic() >= self._ready_s

    def block_until_ready(self) -> _Late:
        self._clock.wait(self._ready_s)
        return self


class _IdlePrograms:
    """In place of `Programs`: the same programs, which hand back the state they were given."""

    def __init__(self, clock: StepClock, slots: int):
        self._clock = clock
        self._packed = np.tile(np.array([TOKEN, 0, 1, 0], np.int32), (slots, 1))  # one token of each, all go on
        self._done = _Late(clock, 0.0, np.zeros(1, np.int32))

    def encode(self, rows: int) -> Callable[..., Any]:
        def run(parameters: Any, cache: Any, *rest: Any) -> tuple[Any, Any]:
            self._clock.start_chunk()
            return SimpleNamespace(pre=self._done), cache

        return run

    def tail_rows(self, rows: int) -> int:
        return rows

    def tail(self, rows: int) -> Callable[..., Any]:
        return lambda parameters, cache, *rest: (self._done, cache)

    def score(self, rows: int) -> Callable[..., Any]:
        return lambda parameters, cache, *rest: (SimpleNamespace(chosen=self._done), cache)

    def decode(self, steps: int) -> Callable[..., Any]:
        def run(
            parameters: Any, cache: Any, state: Any, tally: Any, load: Any, *rest: Any
        ) -> tuple[Any, Any, Any, Any, Sampled]:
            ready_s = self._clock.start_step()
            return cache, state, tally, load, Sampled(_Late(self._clock, ready_s, self._packed), None)  # type: ignore[arg-type]

        return run

    def join(self, *sizes: int) -> Callable[..., Any]:
        return lambda state, *rest: state

    write_tally = write_table = import_state = join

    def export(self, pages: int, rank: int) -> Callable[..., Any]:
        return lambda cache, pages: ()  # no array moves


class _IdleMesh(MeshState):
    """Holds no weights and no cache."""

    def __init__(self, clock: StepClock, *args: Any, **named: Any):
        self._clock = clock
        super().__init__(*args, **named)

    def _fill(self, checkpoint: Checkpoint, config: EngineConfig) -> None:
        self.programs = _IdlePrograms(self._clock, self.ranks * self.slots_per_rank)  # type: ignore[assignment]
        for placed in self.experts:
            placed.replicas = ()  # type: ignore[assignment]
        self.parameters = self.rope = self.cache = ()  # type: ignore[assignment]


class IdleDevice(DeviceEngine):
    """Prepares and counts every dispatch as its base does."""

    def __init__(self, clock: StepClock, *args: Any):
        self._clock = clock
        self.mesh_type = functools.partial(_IdleMesh, clock)
        super().__init__(*args)

    def decode_step(self, *args: Any, **named: Any) -> DecodeStep:
        """As the base does it, and noted."""
        step = super().decode_step(*args, **named)
        self._clock.mark(self.num_dispatches)
        return step


class HostEngine(Engine):
    """An engine over an idle device. Its prefill replays a bounded tail."""

    def __init__(self, config: EngineConfig, clock: StepClock):
        self._clock = clock
        super().__init__(config)
        clock.reset()

    def _open_device(self, checkpoint: Checkpoint, engram_hash: EngramHash) -> DeviceEngine:
        return IdleDevice(self._clock, self.config, checkpoint, engram_hash, self.meshes)
