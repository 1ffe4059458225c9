"""Time per call by the host's clock: many calls are queued behind each other, on inputs that rotate.

A program makes one call per set of inputs, so that launching it costs little per call; as many programs are queued as
fill `_SAMPLE_S`, and the clock stops when the last one is done. Sets are drawn until they exceed the second-level
cache, where their number allows it.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from widemesh.pallas_kernels.gpu import device_target
from widemesh.tools.gpu_check.case import Case
from widemesh.tools.gpu_check.cases.draw import split

_SAMPLE_S = 0.02
_REPEATS = 15
_MOST_SETS = 24  # calls in one program: more would compile for long
_L2_MULTIPLE = 2.5


def samples(run: Callable[[], Any]) -> list[float]:
    """Seconds of one `run`, one figure per repeat. `run` must only dispatch and return what it dispatched."""
    jax.block_until_ready(run())
    jax.block_until_ready(run())  # a first run may still load modules
    begin = time.perf_counter()
    jax.block_until_ready(run())
    calls = min(max(math.ceil(_SAMPLE_S / (time.perf_counter() - begin)), 1), 200)
    found = []
    for _ in range(_REPEATS):
        begin = time.perf_counter()
        for _ in range(calls):
            last = run()
        jax.block_until_ready(last)
        found.append((time.perf_counter() - begin) / calls)
    return found


def dispatch_s(run: Callable[[], Any]) -> float:
    """Seconds that the host needs to dispatch one `run` to an idle device."""
    found = []
    for _ in range(5):
        begin = time.perf_counter()
        last = run()
        found.append(time.perf_counter() - begin)
        jax.block_until_ready(last)
    return sorted(found)[2]


class Timed:
    """A case compiled for timing. Compiling takes no turn on the device; `measure` wants it alone."""

    def __init__(self, case: Case, key: Array) -> None:
        if case.floor is None:
            raise ValueError(f"{case.op}/{case.name} has no floor; only cases with one are timed")
        target = device_target()
        cache = target.l2_bytes if target else 0
        self.case, self.key, self.floor_bytes = case, key, case.floor.floor_bytes
        self.sets = min(max(math.ceil(_L2_MULTIPLE * cache / self.floor_bytes), 2), _MOST_SETS)
        self.exceeds_l2 = self.sets * self.floor_bytes >= 2 * cache
        first, rest = jax.eval_shape(self._first, key), jax.eval_shape(self._rest, key)
        program = jax.jit(self._program, donate_argnums=0)
        self.program = program.lower(*self._fixed(first), [rest] * self.sets).compile()

    def measure(self) -> dict[str, Any]:
        """Draws the inputs and gives microseconds per call with their spread."""
        carried, shared = self._fixed(jax.jit(self._first)(self.key))
        draw = jax.jit(self._rest)
        sets = [draw(key) for key in jax.jit(split, static_argnums=1)(self.key, self.sets)]
        jax.block_until_ready(sets)
        state = [carried]

        def run() -> Any:
            state[0], outs = self.program(state[0], shared, sets)
            return state[0], outs

        seconds = np.asarray(samples(run)) / self.sets * 1e6
        median, low, high = (float(x) for x in np.percentile(seconds, (50, 10, 90)))
        dispatch = dispatch_s(run) / self.sets * 1e6
        return {"microseconds": median, "low": low, "high": high, "repeats": len(seconds), "sets": self.sets,
                "exceeds_l2": self.exceeds_l2, "dispatch_microseconds": dispatch}  # fmt: skip

    def _first(self, key: Array) -> tuple[Any, ...]:
        return self.case.build(key)

    def _rest(self, key: Array) -> tuple[Any, ...]:
        """The arguments that every set has of its own; None in the places of the others, which are not drawn."""
        held = {*range(self.case.carried), *self.case.shared}
        return tuple(None if i in held else x for i, x in enumerate(self.case.build(key)))

    def _fixed(self, args: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Carried and shared arguments."""
        return tuple(args[: self.case.carried]), tuple(args[i] for i in self.case.shared)

    def _program(self, carried: tuple[Any, ...], shared: tuple[Any, ...], sets: list[tuple[Any, ...]]) -> Any:
        """One call per set; all results come out, so that no call is left out."""
        call = jax.jit(functools.partial(self.case.call, "mosaic"))
        outs = []
        for given in sets:
            args = [*carried, *given[len(carried) :]]
            for i, x in zip(self.case.shared, shared, strict=True):
                args[i] = x
            out = call(*args)
            if carried:
                carried = tuple(out[: len(carried)])
            else:
                outs.append(out)
        return carried, outs
