"""One engine of `widemesh bench reshuffle`: a model with skewed gates, steps that are watched, experts that move."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from widemesh.eplb.plan import Plan
from widemesh.model.config import ModelConfig
from widemesh.serving.engine import Engine
from widemesh.serving.request import SamplingParams

_LIMIT_S = 600  # for anything that is waited for
_WARM_STEPS = 5
_POLL_S = 0.02


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """Of one engine. Rows are those of one expert in one layer, from rank to rank; means of the rebalances."""

    undisturbed_s: list[float]
    migrating_s: list[float]
    rebalance_s: list[float]
    rows_per_rebalance: float
    least_rows: float
    row_bytes: int
    # Balancedness of a window with the first placement, and of one with the plan: as the engine has it, from the
    # busiest rank of each step, and of the window's sums, without the chance of a single step.
    before: float
    after: float
    sums_before: float
    sums_after: float
    planned: float  # of the first window's sums with the plan


def write_skewed(folder: Path, config: ModelConfig, skew: float) -> None:
    """A random checkpoint whose gates prefer some experts of each layer: see `ReshuffleBench`."""
    from widemesh.model.checkpoint import write_checkpoint
    from widemesh.model.random_weights import random_tensors
    from widemesh.model.tiny_tokenizer import tiny_tokenizer

    rng = np.random.default_rng(0)

    def tensors() -> Iterator[tuple[str, np.ndarray]]:
        for name, value in random_tensors(config, 0):
            if name.endswith("gate.bias"):
                value = -skew * np.log(1 + rng.permutation(len(value))).astype(np.float32)
            yield name, value

    tokenizer, tokenizer_config = tiny_tokenizer(config)
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config), encoding="utf-8")
    write_checkpoint(folder, config, tensors(), form="quantized")


class _Steps:
    """Step times by what was under way when a step was dispatched, and what rebalances came to."""

    def __init__(self, engine: Engine):
        self.seconds: dict[str, list[float]] = {"idle": [], "planning": [], "migrating": []}
        self.count = 0
        self.plans: list[Plan] = []
        self.windows: list[tuple[float, float]] = []  # balancedness of their steps, and of their sums
        self.rebalance_s: list[float] = []
        self.num_ended = 0
        reshuffler = engine._reshufflers[0]
        assert reshuffler is not None
        device, metrics, figures = engine.device, engine.metrics, reshuffler._figures
        decode_step, device_step = device.decode_step, metrics.device_step
        phases: collections.deque[str] = collections.deque()  # of the steps in flight

        def dispatched(*args: Any, **kwargs: Any) -> Any:
            phases.append(str(reshuffler.phase))
            return decode_step(*args, **kwargs)

        def settled(seconds: float) -> None:
            device_step(seconds)
            self.seconds[phases.popleft()].append(seconds)
            self.count += 1

        planned, window_read, arrived = figures.planned, figures.window_read, figures.arrived

        def on_plan(plan: Plan) -> None:
            planned(plan)
            self.plans.append(plan)

        def on_window(found: Any, steps: int) -> None:
            window_read(found, steps)
            by_rank = found.load_by_slot.reshape(len(found.load_by_slot), reshuffler.layout.ranks, -1).sum(axis=2)
            self.windows.append((found.balancedness, float(by_rank.mean(axis=1).sum() / by_rank.max(axis=1).sum())))

        def on_end(plan: Plan | None, layers: int, seconds: float) -> None:
            arrived(plan, layers, seconds)
            if layers:
                self.rebalance_s.append(seconds)
            self.num_ended += 1

        device.decode_step, metrics.device_step = dispatched, settled  # type: ignore[method-assign]
        figures.planned, figures.window_read = on_plan, on_window  # type: ignore[method-assign]
        figures.arrived = on_end  # type: ignore[method-assign]


def measure(engine: Engine, *, rebalances: int, stretch: int) -> Measured:
    """Fill all slots, plan from a window, then move back and forth, an undisturbed stretch before each time."""
    experts = engine.experts
    with _full(engine) as check:
        steps = engine._loop.call(lambda: _Steps(engine))

        def wait(is_true: Callable[[], bool]) -> None:
            end_s = time.monotonic() + _LIMIT_S
            while not is_true():
                check()
                if time.monotonic() > end_s:
                    raise RuntimeError(f"nothing has come after {_LIMIT_S} s: {experts.status().last_failure}")
                time.sleep(_POLL_S)

        def ended(do: Callable[[], None]) -> None:
            wanted = steps.num_ended + 1
            do()
            wait(lambda: steps.num_ended >= wanted)

        wait(lambda: steps.count > _WARM_STEPS)
        placements = [experts.status().slot_owner]
        for _ in range(2):  # the second one counts what the first has brought about
            ended(lambda: experts.rebalance(engine.config.eplb.window_size))
        placements.append(experts.status().slot_owner)
        (before, sums_before), (after, sums_after), plan = *steps.windows, steps.plans[0]
        if (placements[0] == placements[1]).all():
            raise RuntimeError(f"the plan moves nothing: balancedness {plan.before:.3f}, planned {plan.after:.3f}")
        for seen in (*steps.seconds.values(), steps.rebalance_s):
            seen.clear()
        start = experts.status()
        for turn in range(rebalances):
            wanted = steps.count + stretch
            wait(lambda wanted=wanted: steps.count >= wanted)  # type: ignore[misc]
            ended(lambda turn=turn: experts.import_placement(placements[turn % 2]))  # type: ignore[misc]
        end = experts.status()
    return Measured(
        undisturbed_s=steps.seconds["idle"], migrating_s=steps.seconds["migrating"], rebalance_s=steps.rebalance_s,
        rows_per_rebalance=(end.moved_rows - start.moved_rows) / rebalances,
        least_rows=(end.least_rows - start.least_rows) / rebalances,
        row_bytes=(end.moved_bytes - start.moved_bytes) // (end.moved_rows - start.moved_rows),
        before=before, after=after, sums_before=sums_before, sums_after=sums_after, planned=plan.after,
    )  # fmt: skip


@contextlib.contextmanager
def _full(engine: Engine) -> Iterator[Callable[[], None]]:
    """A request in every slot. The function raises RuntimeError if one has ended, which none should."""
    slots, rng, ends = engine.config.max_num_seqs, np.random.default_rng(1), threading.Event()
    vocab = min(256, engine.model_config.vocab_size - 8)

    def deliver(delta: Any) -> None:
        if delta.finish_reason is not None:
            ends.set()

    def check() -> None:
        if ends.is_set() or not engine.is_alive:
            raise RuntimeError("a request ended while steps were measured; measure fewer steps")

    names = [f"slot {slot}" for slot in range(slots)]
    for name in names:
        prompt = rng.integers(3, vocab, rng.integers(4, 32)).astype(np.int32)
        engine._submit(prompt, SamplingParams(temperature=1.0, seed=0, ignore_eos=True), name, deliver, 0)
    try:
        while engine.num_running < slots or engine.num_waiting:
            check()
            time.sleep(_POLL_S)
        yield check
    finally:
        for name in names:
            engine.abort(name)
