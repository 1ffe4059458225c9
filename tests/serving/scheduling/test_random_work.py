"""Random work against every invariant: page accounts after each operation, every token right, nothing left over."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from widemesh.serving.request import FinishReason
from widemesh.serving.scheduling import RequestState

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "two in flight": dict(depth=2, decode_pages=17, prefill_pages=17, reserve_output_tokens=1),
    "drafts": dict(depth=2, decode_rows=3, decode_pages=18, prefill_pages=17, reserve_output_tokens=2),
    "ranks": dict(depth=2, prefill_ranks=2, decode_ranks=2, max_num_seqs=6, prefill_slots_per_rank=2, decode_pages=18,
                  prefill_pages=20, max_num_batched_tokens=12, reserve_output_tokens=2, max_overtakes=3),
    "bounded, one load": dict(depth=3, prefix="bounded", max_new_kv_loads_per_step=1, prefill_slots_per_rank=4,
                              decode_pages=20, reserve_output_tokens=1, max_num_seqs=8),
    "full tail, tiny pages": dict(tail="full", page_size=2, max_num_batched_tokens=3, decode_pages=35, prefill_pages=33,
                                  reserve_output_tokens=3, max_overtakes=0),
}  # fmt: skip


def submit_some(run: Any, rng: np.random.Generator) -> None:
    """One request of a few families of prompts, so that prefixes meet."""
    longest = run.config.longest_request - 1
    length = min(longest, int(rng.choice([1, 2, 3, 4, 5, 8, 9, 13, 17, 25, 40])))
    ids = np.random.default_rng(int(rng.integers(3))).integers(0, 1000, 64).astype(np.int32)[:length]
    if rng.random() < 0.5:
        ids[int(rng.integers(length)) :] = 7
    run.submit(ids, max_tokens=int(rng.integers(1, 30)), priority=int(rng.choice([0, 0, 0, 1, -1])),
               reads_cache=bool(rng.random() < 0.9))  # fmt: skip


def operate(run: Any, kind: str, rng: np.random.Generator) -> None:
    """One operation on a request picked at random, and the check after it."""
    alive = [r for r in run.requests if r.state is not RequestState.FINISHED]
    pick = alive[int(rng.integers(len(alive)))] if alive else None
    if kind == "submit":
        submit_some(run, rng)
    elif kind == "step":
        run.step()
    elif kind == "hold":
        run.step(rng.random(run.config.max_num_seqs) < 0.5)
    elif kind == "cancel" and pick:
        assert run.scheduler.finish(pick, FinishReason.ABORT)
        assert not run.scheduler.finish(pick, FinishReason.ABORT)
    elif kind == "stop":
        running = [r for r in alive if r.output]
        if running:
            run.scheduler.finish(running[int(rng.integers(len(running)))], FinishReason.STOP)
    elif kind == "preempt" and pick and pick.decode_slot >= 0:
        run.scheduler._preempt(pick)
    elif kind == "flush":
        run.scheduler.flush_prefix_cache()
    run.check()


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("seed", [0, None], ids=["fixed", "fresh"])
def test_five_hundred_random_operations(start: Callable[..., Any], name: str, seed: int | None) -> None:
    seed = int(os.environ["WIDEMESH_TEST_SEED"]) if seed is None else seed  # printed in the header of the run
    rng = np.random.default_rng(seed)
    run = start(seed=seed, **SETTINGS[name])
    kinds = ["submit", "step", "hold", "cancel", "stop", "preempt", "flush"]
    for _ in range(500):
        likely = np.array([0.2 if len(run.scheduler.waiting) < 12 else 0.0, 0.62, 0.06, 0.04, 0.03, 0.04, 0.01])
        operate(run, str(rng.choice(kinds, p=likely / likely.sum())), rng)
    run.drain()
    assert len(run.requests) > 30
    if seed == 0:
        assert any(r.num_preemptions for r in run.requests) and any(r.hit_tokens for r in run.requests)


@pytest.mark.parametrize("name", ["two in flight", "ranks"])
def test_state_machine(start: Callable[..., Any], name: str) -> None:
    """The same operations, chosen and shrunk by hypothesis."""

    class Machine(RuleBasedStateMachine):
        @initialize()
        def begin(self) -> None:
            self.run = start(**SETTINGS[name])
            self.rng = np.random.default_rng(0)

        @rule(seed=st.integers(0, 999))
        def submit(self, seed: int) -> None:
            submit_some(self.run, np.random.default_rng(seed))
            self.run.check()

        @rule(count=st.integers(1, 8))
        def step(self, count: int) -> None:
            for _ in range(count):
                self.run.step()

        @rule(kind=st.sampled_from(["hold", "cancel", "stop", "preempt", "flush"]), seed=st.integers(0, 999))
        def interfere(self, kind: str, seed: int) -> None:
            operate(self.run, kind, np.random.default_rng(seed))

        def teardown(self) -> None:
            if hasattr(self, "run"):
                self.run.drain()

    run_state_machine_as_test(
        Machine, settings=settings(max_examples=20, stateful_step_count=40, deadline=None, derandomize=True)
    )
