"""Giving way and coming back: who, how often, and with the same output."""

from __future__ import annotations

import math

import pytest

from widemesh.serving.request import FinishReason
from widemesh.serving.scheduling import RequestState


def test_the_latest_gives_way_and_repeats_itself_exactly(start, prompt) -> None:
    run = start(decode_pages=9, max_model_len=32, reserve_output_tokens=1, max_num_seqs=2, depth=2)
    first, second = run.submit(prompt(9), max_tokens=20), run.submit(prompt(11), max_tokens=15)
    plans = [run.step() for _ in range(12)]
    assert [r for plan in plans for r in plan.preempted] == [second]
    assert second.state is RequestState.PREEMPTED and second.output and second.num_preemptions == 1
    run.drain()
    assert run.scheduler.num_preemptions == 1 and first.num_preemptions == 0
    # What its prompt's pages held is not computed again. It had not been there when the request came.
    assert second.hit_tokens == 8 and second.cached_tokens == 0


@pytest.mark.parametrize(("priorities", "victim"), [((0, 0, 0), 2), ((1, 0, 0), 0), ((0, 2, 1), 1), ((5, 5, 4), 1)])
def test_the_least_important_gives_way_the_latest_of_equals(start, prompt, priorities, victim) -> None:
    run = start(decode_pages=10, max_model_len=36, reserve_output_tokens=1, max_num_seqs=3, prefill_slots_per_rank=3)
    requests = [run.submit(prompt(8, i), max_tokens=20, priority=p) for i, p in enumerate(priorities)]
    preempted: list[object] = []
    while not preempted:
        preempted += run.step().preempted
    assert preempted == [requests[victim]]
    run.drain()
    most_important = min(requests, key=lambda r: r.importance)
    assert most_important.num_preemptions == 0


def test_a_preempted_request_is_the_first_of_its_priority(start, prompt) -> None:
    run = start(decode_pages=9, max_model_len=32, reserve_output_tokens=1, max_num_seqs=2, depth=2)
    run.submit(prompt(9), max_tokens=20)
    run.submit(prompt(11), max_tokens=15)
    run.step()
    waiting = [run.submit(prompt(20, 1), priority=0), run.submit(prompt(20, 2), priority=-1)]
    while not run.scheduler.num_preemptions:
        run.step()
    queue = list(run.scheduler.waiting)
    assert [queue.index(r) for r in (waiting[1], run.requests[1], waiting[0])] == [0, 1, 2]
    run.drain()


def test_one_that_is_still_being_prefilled_can_give_way(start, prompt) -> None:
    run = start(decode_pages=9, max_model_len=32, reserve_output_tokens=1, max_num_seqs=2, max_num_batched_tokens=4)
    first = run.submit(prompt(1), max_tokens=25)
    while len(first.output) < 10:
        run.step()
    late = run.submit(prompt(16), max_tokens=4)  # takes the last five pages; the first needs one soon
    plans = [run.step() for _ in range(3)]
    assert [plan.preempted for plan in plans] == [(), (), (late,)] and late.output == []
    run.drain()
    assert late.hit_tokens == 8  # the chunks that had run


def test_one_that_is_ready_is_not_loaded_when_it_gives_way(start, prompt) -> None:
    run = start(decode_pages=9, max_model_len=32, reserve_output_tokens=1, max_num_seqs=2, max_num_batched_tokens=16)
    first = run.submit(prompt(1), max_tokens=25)
    while len(first.output) < 11:
        run.step()
    late = run.submit(prompt(16), max_tokens=4)
    run.step()
    assert late.state is RequestState.READY
    plan = run.step()
    assert (plan.preempted, plan.loads, plan.joined) == ((late,), (), ())
    run.drain()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("reserve", [1, 4])
def test_bouncing_is_bounded(start, prompt, depth, reserve) -> None:
    """Three long outputs on a rank for one and a half: each comes back a few times, not at every page."""
    run = start(decode_pages=33, prefill_pages=40, max_model_len=128, max_num_seqs=3, prefill_slots_per_rank=3,
                reserve_output_tokens=reserve, depth=depth, max_num_batched_tokens=32)  # fmt: skip
    requests = [run.submit(prompt(4, i), max_tokens=80) for i in range(3)]
    run.drain()
    assert requests[0].num_preemptions == 0
    assert 0 < max(r.num_preemptions for r in requests) <= 1 + math.ceil(math.log2(80 / reserve))
    assert {r.finish_reason for r in requests} == {FinishReason.LENGTH}
    # Work that was thrown away stays a small part: without a bound it grows with the number of pages.
    assert run.num_steps < 3 * 80 + 150


def test_bouncing_is_bounded_while_new_requests_arrive(start, prompt) -> None:
    run = start(decode_pages=17, max_model_len=60, max_num_seqs=4, prefill_slots_per_rank=2, max_num_batched_tokens=16,
                reserve_output_tokens=1, depth=2, max_overtakes=4)  # fmt: skip
    for i in range(60):
        run.submit(prompt(1 + i % 20, i), max_tokens=5 + i % 30)
        run.step()
    run.drain()
    assert run.scheduler.num_preemptions > 0
    assert max(r.num_preemptions for r in run.requests) <= 1 + math.ceil(math.log2(40))
