"""Slots and prefill ranks: nothing lost, nothing taken twice, fair over ranks. Random operations against invariants."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from widemesh.serving.config import EngineConfig
from widemesh.serving.request import SamplingParams
from widemesh.serving.scheduler import Request, Scheduler

CONFIG = EngineConfig(model="x", max_num_seqs=8, decode_devices=4, prefill_devices=2)


def request(number: int, length: int) -> Request:
    return Request(request_id=str(number), prompt=np.arange(length, dtype=np.int32), sampling=SamplingParams(), seed=0,
                   max_tokens=4, stop_token_ids=frozenset(), deliver=lambda _: None)  # fmt: skip


def check(scheduler: Scheduler, alive: list[Request]) -> None:
    """Every live request is in exactly one place, and each place knows its request."""
    held = [r for r in scheduler.slots if r]
    assert sorted(map(id, [*held, *scheduler.waiting])) == sorted(map(id, alive))
    assert all(scheduler.slots[r.slot] is r for r in held)
    prefilling = [r for r in scheduler.prefilling if r]
    assert all(scheduler.prefilling[r.prefill_rank] is r and r in held for r in prefilling)
    assert all(r.slot == -1 and r.prefill_rank == -1 for r in scheduler.waiting)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["add", "admit", "prefilled", "remove"]), st.integers(0, 30)), max_size=60))
def test_random_operations(steps: list[tuple[str, int]]) -> None:
    scheduler, alive = Scheduler(CONFIG), []
    for number, (kind, value) in enumerate(steps):
        if kind == "add":
            alive.append(request(number, 1 + value % 3))
            scheduler.waiting.append(alive[-1])
        elif kind == "admit":
            scheduler.admit()
            # Work-conserving: the head waits only for want of a slot or of a prefill rank.
            if scheduler.waiting:
                blocked = None not in scheduler.prefilling and len(scheduler.waiting[0].prompt) > 1
                assert blocked or None not in scheduler.slots
        elif kind == "prefilled":
            ready = [r for r in scheduler.prefilling if r]
            if ready:
                scheduler.prefilled(ready[value % len(ready)])
        elif alive:
            scheduler.remove(alive.pop(value % len(alive)))
        check(scheduler, alive)


def test_slots_spread_over_ranks() -> None:
    scheduler = Scheduler(CONFIG)
    scheduler.waiting.extend(request(i, 1) for i in range(6))
    scheduler.admit()
    assert sorted(r.slot // CONFIG.slots_per_rank for r in scheduler.decoding) == [0, 0, 1, 1, 2, 3]


def test_recent_ids_cross_from_output_to_prompt() -> None:
    one = request(0, 2)
    one.output = [7, 8]
    assert one.recent(4, 3).tolist() == [1, 7, 8]
    assert one.recent(1, 3).tolist() == [-1, -1, 0]
    assert (one.last_token, one.position) == (8, 3)
