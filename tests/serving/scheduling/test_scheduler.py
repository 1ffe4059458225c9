"""Admission, prefix hits, chunks, loads, and every way to end. The fake device checks every token and page."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import numpy as np
import pytest

from widemesh.serving.request import FinishReason, RequestError, Status
from widemesh.serving.scheduling import ReplayRule, RequestState, ScheduledRequest, Scheduler, SchedulerConfig

ABORT = FinishReason.ABORT


def states(run: Any) -> list[str]:
    return [r.state.value for r in run.requests]


# --- the queue --------------------------------------------------------------------------------------------------------


def test_a_prompt_that_can_never_fit_is_refused_with_the_numbers(start, prompt) -> None:
    run = start(prefill_pages=9, decode_pages=17, max_model_len=500)
    assert run.config.longest_request == 33
    with pytest.raises(RequestError) as caught:
        run.submit(prompt(33))
    assert str(caught.value) == (
        "prompt=33 tokens and an output token are more than the 33 tokens that fit, with 8 prefill pages and 16 decode "
        "pages of 4 tokens and max_model_len=500; send a shorter prompt"
    )
    assert caught.value.status is Status.INVALID_ARGUMENT and not run.scheduler.has_work
    assert run.submit(prompt(32), max_tokens=100).max_tokens == 1
    run.drain()


def test_queue_limits(start, prompt) -> None:
    run = start(max_num_queued_reqs=3, max_num_queued_tokens=20)
    run.submit(prompt(8))
    run.submit(prompt(8))
    with pytest.raises(RequestError, match=r"^max_num_queued_tokens=20 would be passed by 5 tokens on top of") as err:
        run.submit(prompt(5))
    assert err.value.status is Status.UNAVAILABLE
    run.submit(prompt(4))
    with pytest.raises(RequestError, match=r"^max_num_queued_reqs=3 requests are waiting already") as err:
        run.submit(prompt(1))
    assert err.value.status is Status.UNAVAILABLE
    run.step()
    run.submit(prompt(5))  # the first is not waiting any more
    run.drain()


def test_the_queue_takes_several_or_none(start, prompt) -> None:
    """With those that are on their way; and whoever was accepted comes in, even if a preempted one is back by then."""
    run = start(max_num_queued_reqs=3, max_num_queued_tokens=20)
    one, two, three = (ScheduledRequest(request_id=str(i), prompt=np.arange(4, dtype=np.int32), max_tokens=1,
                                        page_hashes=np.zeros((1, 16), np.uint8)) for i in range(3))  # fmt: skip
    run.scheduler.check_queue([one, two, three])
    run.scheduler.check_queue([one], [two, three])
    with pytest.raises(RequestError, match=r"^max_num_queued_reqs=3 requests are waiting already"):
        run.scheduler.check_queue([one, two], [three, three])
    with pytest.raises(RequestError, match="would be passed by 8 tokens on top of 16 that are waiting already"):
        run.scheduler.check_queue([one, two], [dataclasses.replace(three, prompt=np.arange(16, dtype=np.int32))])
    for _ in range(3):
        run.submit(prompt(1))
    run.scheduler.submit(one)
    assert len(run.scheduler.waiting) == 4


def test_mistakes_of_the_caller(start, prompt) -> None:
    run = start()
    with pytest.raises(ValueError, match="at least one prompt token"):
        run.submit([])
    with pytest.raises(ValueError, match="at least one prompt token and one output"):
        run.submit(prompt(3), max_tokens=0)
    with pytest.raises(ValueError, match="a hash for each"):
        run.scheduler.submit(ScheduledRequest(request_id="x", prompt=prompt(9), max_tokens=1,
                                              page_hashes=np.zeros((1, 16), np.uint8)))  # fmt: skip


def test_more_important_requests_go_first_and_equals_in_order(start, prompt) -> None:
    run = start(max_num_seqs=1)
    first = run.submit(prompt(3), priority=5)
    run.step()
    rest = [run.submit(prompt(3 + i), priority=p) for i, p in enumerate([1, 0, 1, 0, -3])]
    order = []
    while run.scheduler.has_work:
        order += run.step().admitted
    assert first.finish_reason is FinishReason.LENGTH
    assert [rest.index(r) for r in order] == [4, 1, 3, 0, 2]
    run.drain()


# --- fitting ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_requests_whose_loads_do_not_fit_together_both_finish(start, prompt, order) -> None:
    """Seven pages: one needs four and one more, the other three and one more. Neither may hold what both wait for."""
    run = start(decode_pages=8, prefill_pages=8, max_model_len=24, prefill_ranks=2, max_num_batched_tokens=16)
    sizes = [(16, 3), (12, 3)]
    for which in order:
        run.submit(prompt(sizes[which][0]), max_tokens=sizes[which][1])
    run.drain(100)
    assert {r.finish_reason for r in run.requests} == {FinishReason.LENGTH}


def test_drafts_have_pages_when_all_loads_are_in(start, prompt) -> None:
    run = start(decode_pages=8, prefill_pages=8, max_model_len=24, decode_rows=4, depth=2, reserve_output_tokens=1,
                prefill_slots_per_rank=4)  # fmt: skip
    for length in (12, 11, 4, 9):
        run.submit(prompt(length), max_tokens=8)
    run.drain(300)


def test_a_small_request_passes_one_that_does_not_fit(start, prompt) -> None:
    run = start(decode_pages=9, max_model_len=32, prefill_ranks=2, max_num_batched_tokens=16)
    holder = run.submit(prompt(16), max_tokens=8)
    run.step()
    large, small = run.submit(prompt(20), max_tokens=4), run.submit(prompt(3), max_tokens=2)
    assert run.step().admitted == (small,)
    assert large.state is RequestState.QUEUED and holder.decode_slot >= 0
    run.drain()


def test_an_important_request_that_does_not_fit_blocks_nobody(start, prompt) -> None:
    run = start(decode_pages=9, max_model_len=32)
    run.submit(prompt(16), max_tokens=8, priority=3)
    run.step()
    large = run.submit(prompt(20), max_tokens=4, priority=-1)
    small = run.submit(prompt(1), max_tokens=2, priority=9)
    while small.state is not RequestState.FINISHED:
        run.step()
    assert large.state is RequestState.QUEUED
    run.drain()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_request_that_does_not_fit_is_not_starved(start, prompt, ranks) -> None:
    """Small requests never stop coming; a bounded number passes. On two ranks they go on while one empties."""
    run = start(decode_pages=13, max_model_len=48, max_num_seqs=4, decode_ranks=ranks, prefill_ranks=ranks,
                prefill_slots_per_rank=2, max_num_batched_tokens=8 * ranks, max_overtakes=5)  # fmt: skip
    for seed in range(3 * ranks):
        run.submit(prompt(10, seed), max_tokens=6)
    run.step()
    large = run.submit(prompt(40), max_tokens=8)
    passed = passed_after_keeping = 0
    for seed in range(400):
        if len(run.scheduler.waiting) < 4:
            run.submit(prompt(10, seed + 100), max_tokens=6)
        is_kept = large.kept_decode_rank >= 0
        admitted = run.step().admitted
        passed += sum(r.arrival > large.arrival for r in admitted)
        passed_after_keeping += is_kept * len(admitted)
        if large in admitted:
            break
    assert large.state is RequestState.PREFILLING
    if ranks == 1:
        assert passed - passed_after_keeping <= 5 and passed_after_keeping == 1
    else:
        assert passed_after_keeping > 1
    run.drain()


def test_nobody_passes_when_none_may(start, prompt) -> None:
    run = start(decode_pages=9, max_model_len=32, max_overtakes=0)
    run.submit(prompt(16), max_tokens=8)
    run.step()
    large, small = run.submit(prompt(20), max_tokens=4), run.submit(prompt(3), max_tokens=2)
    while large.state is RequestState.QUEUED:
        run.step()
        assert small.state is RequestState.QUEUED or large.state is RequestState.PREFILLING
    run.drain()


def test_a_kept_rank_is_given_up_with_the_request(start, prompt) -> None:
    run = start(decode_pages=9, max_model_len=32, max_overtakes=0, prefill_ranks=2, max_num_batched_tokens=16)
    run.submit(prompt(16), max_tokens=8)
    run.step()
    large, small = run.submit(prompt(20), max_tokens=4), run.submit(prompt(3), max_tokens=2)
    run.step()
    assert small.state is RequestState.QUEUED
    run.scheduler.finish(large, ABORT)
    assert run.step().admitted == (small,)
    run.drain()


def test_twenty_requests_on_four_pages(start, prompt) -> None:
    run = start(decode_pages=5, prefill_pages=5, max_model_len=16, reserve_output_tokens=1, depth=2)
    for i in range(20):
        run.submit(prompt(1 + i % 9, i), max_tokens=1 + i % 7)
    run.drain()
    assert {r.finish_reason for r in run.requests} == {FinishReason.LENGTH}


@pytest.mark.parametrize("page_size", [2, 4, 16])
def test_lengths_around_a_page_alone_and_together(start, prompt, page_size) -> None:
    lengths = range(1, 2 * page_size + 2)
    run = start(page_size=page_size, max_num_seqs=len(lengths), decode_pages=200, max_model_len=64)
    for length in lengths:
        run.submit(prompt(length), max_tokens=page_size + 1)
    run.drain()  # compares every output with the request's own, computed alone


# --- ranks ------------------------------------------------------------------------------------------------------------


def test_decode_ranks_get_equal_numbers(start, prompt) -> None:
    run = start(max_num_seqs=8, decode_ranks=4, prefill_slots_per_rank=8, max_num_batched_tokens=64)
    for i in range(6):
        run.submit(prompt(3, i), max_tokens=9)
    run.step()
    assert sorted(r.decode_slot // 2 for r in run.requests) == [0, 0, 1, 1, 2, 3]
    run.drain()


def test_prefill_ranks_get_equal_numbers_of_rows(start, prompt) -> None:
    run = start(prefill_ranks=2, prefill_slots_per_rank=3, max_num_batched_tokens=16)
    for length in (30, 12, 12):
        run.submit(prompt(length), max_tokens=1)
    run.step()
    assert [r.prefill_slot // 3 for r in run.requests] == [0, 1, 1]
    run.drain()


def test_prefill_prefers_the_rank_that_has_the_prompt(start, prompt) -> None:
    run = start(prefill_ranks=3, max_num_batched_tokens=24)
    shared = prompt(20)
    others = [run.submit(prompt(20, 1)), run.submit(prompt(20, 2))]
    run.step()
    first = run.submit(shared)
    run.step()
    rank = first.prefill_slot
    assert {r.prefill_slot for r in [*others, first]} == {0, 1, 2}
    run.drain()
    again = run.submit(np.append(shared, [1, 2, 3]))
    run.step()
    assert again.prefill_slot == rank and again.hit_tokens == 16
    run.drain()


# --- prefix cache -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["bounded", "exact"])
@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 13, 29])
def test_hits_at_page_edges(start, prompt, prefix, length) -> None:
    run = start(prefix=prefix, window=6)
    ids = prompt(length)
    run.submit(ids)
    run.drain()
    again = run.submit(ids)
    run.drain()
    hit = (length - 1) // 4 * 4  # whole pages, and the last token is always computed
    if prefix == "bounded":
        hit = hit if hit > 6 else 0
        begin = max(0, hit - 6)
    else:
        begin = max(0, hit - (6 + 5)) // 2 * 2
    assert (again.hit_tokens, again.start) == (hit, begin)
    assert run.device.rows_run[again.request_id] == length - 1 - begin
    assert again.output == run.requests[0].output


@pytest.mark.parametrize("shared", [1, 3, 4, 5, 7, 8, 9, 16, 17])
def test_prompts_that_part_ways_share_what_is_equal(start, prompt, shared) -> None:
    run = start()
    one, other = prompt(24, 1), prompt(24, 2)
    other[:shared] = one[:shared]
    other[shared] = one[shared] + 1
    run.submit(one)
    run.drain()
    second = run.submit(other)
    run.drain()
    assert second.hit_tokens == shared // 4 * 4


@pytest.mark.parametrize("end", ["length", "stop", "abort", "while prefilling"])
def test_hits_after_every_way_to_end(start, prompt, end) -> None:
    run = start(max_num_batched_tokens=8)
    first = run.submit(prompt(21), max_tokens=5)
    run.step()
    if end != "while prefilling":
        while len(first.output) < 2:
            run.step()
    if end == "length":
        run.drain()
    else:
        run.scheduler.finish(first, FinishReason.STOP if end == "stop" else ABORT)
    second = run.submit(prompt(21), max_tokens=5)
    run.drain()
    assert second.hit_tokens == (8 if end == "while prefilling" else 20)


def test_equal_prompts_in_flight_together(start, prompt) -> None:
    run = start(prefill_slots_per_rank=3, max_num_batched_tokens=8, depth=2)
    ids = prompt(21)
    for _ in range(3):
        run.submit(ids)
    run.drain()
    assert [r.hit_tokens for r in run.requests] == [0, 0, 0]
    assert run.scheduler.prefill.pools[0].num_cached == 5
    assert run.submit(ids) and run.step().admitted[0].hit_tokens == 20
    run.drain()


def test_a_session_finds_its_earlier_turns(start, prompt) -> None:
    run = start(max_model_len=200, prefill_pages=60, prefix="bounded")
    ids = prompt(9)
    for turn in range(6):
        request = run.submit(ids, max_tokens=5)
        before = (len(ids) - 5 - 7 - 1) // 4 * 4 if turn else 0
        run.drain()
        assert request.hit_tokens == (before if before > 4 else 0)
        ids = np.concatenate([ids, request.output, prompt(7, turn)])


def test_salted_requests_share_nothing(start, prompt) -> None:
    run = start()
    for salt in (b"", b"a", b"b", b"a"):
        run.submit(prompt(21), salt=salt)
        run.drain()
    assert [r.hit_tokens for r in run.requests] == [0, 0, 0, 20]


def test_requests_that_want_all_rows_read_no_cache_but_fill_it(start, prompt) -> None:
    run = start()
    for reads in (False, False, True):
        run.submit(prompt(21), reads_cache=reads)
        run.drain()
    assert [r.hit_tokens for r in run.requests] == [0, 0, 20]
    assert (run.scheduler.prefill.asked_tokens, run.scheduler.prefill.hit_tokens) == (20, 20)


def test_cached_pages_make_room_and_what_is_left_still_hits(start, prompt) -> None:
    run = start(prefill_pages=9, max_model_len=32)
    for seed in (1, 2):
        run.submit(prompt(17, seed))
        run.drain()
    run.submit(prompt(9, 3))
    run.drain()  # two pages: the tail of the oldest goes
    assert run.scheduler.prefill.pools[0].num_evicted == 2
    again = run.submit(prompt(17, 1))
    run.drain()
    assert again.hit_tokens == 8


def test_a_hit_counts_against_the_room_that_is_left(start, prompt) -> None:
    run = start(prefill_pages=9, max_model_len=32, prefill_slots_per_rank=2, max_num_batched_tokens=8)
    run.submit(prompt(17))
    run.drain()
    run.submit(prompt(17, 5))
    run.step()  # four pages cached, four used
    longer = run.submit(np.concatenate([prompt(17), prompt(3)]))
    run.step()
    assert longer.state is RequestState.QUEUED  # its four pages are there, a fifth is not
    run.drain()
    assert longer.hit_tokens == 16


def test_flush_forgets_what_is_cached_and_what_is_under_way(start, prompt) -> None:
    run = start(max_num_batched_tokens=8)
    run.submit(prompt(21, 1))
    run.drain()
    under_way = run.submit(prompt(21, 2))
    run.step()
    run.scheduler.flush_prefix_cache()
    run.check()
    run.drain()
    assert run.scheduler.prefill.pools[0].num_cached == 0
    for seed in (1, 2):
        assert run.submit(prompt(21, seed)) is not under_way
        run.drain()
        assert run.requests[-1].hit_tokens == 0
    assert run.scheduler.prefill.pools[0].num_cached == 10


# --- chunks and loads -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tail", "rows"), [("full", 1), ("full", 3), ("full", 4), ("bounded", 4), ("bounded", 5),
                                            ("bounded", 22)])  # fmt: skip
def test_chunk_sizes_change_no_token_and_no_page(start, prompt, tail, rows) -> None:
    run = start(tail=tail, max_num_batched_tokens=rows, depth=2)
    request = run.submit(prompt(22), max_tokens=6)
    lengths, held = [], set()
    while request.state in (RequestState.QUEUED, RequestState.PREFILLING, RequestState.READY):
        plan = run.step()
        lengths += plan.prefill.length.tolist() if plan.prefill else []
        held |= {pool.num_used for pool in run.pools[:1]}
    assert sum(lengths) == 21 and max(lengths) <= rows and held <= {6, 0}
    assert lengths[-1] >= (4 if tail == "bounded" else 1)
    run.drain()


def test_a_rank_shares_its_rows_in_order_of_importance(start, prompt) -> None:
    run = start(prefill_slots_per_rank=3, max_num_batched_tokens=12, tail="full")
    for length, priority in ((6, 1), (21, 0), (6, 2)):
        run.submit(prompt(length), priority=priority)
    planned = []
    for _ in range(3):
        plan = run.step().prefill
        planned.append([(int(r.request_id), n) for r, n in zip(plan.requests, plan.length.tolist(), strict=True)])
    assert planned == [[(1, 12)], [(1, 8), (0, 4)], [(0, 1), (2, 5)]]
    run.drain()


@pytest.mark.parametrize("cap", [0, 1, 4])
def test_loads_are_capped_and_first_come_first_served(start, prompt, cap) -> None:
    run = start(max_new_kv_loads_per_step=cap, max_num_seqs=11, prefill_slots_per_rank=11, max_num_batched_tokens=80,
                prefill_pages=80, decode_pages=80)  # fmt: skip
    for i in range(10):
        run.submit(prompt(6, i), max_tokens=9, priority=-i)
    one_token = run.submit(prompt(1), max_tokens=9)
    plan = run.step()
    assert plan.joined == (one_token,) and not plan.loads and len(plan.prefill.requests) == 10
    ready = [r.request_id for r in plan.prefill.requests]
    loaded = []
    while len(loaded) < 10:
        plan = run.step()
        assert len(plan.loads) == min(cap or 10, 10 - len(loaded)) and plan.joined == tuple(
            x.request for x in plan.loads
        )
        loaded += [load.request.request_id for load in plan.loads]
    assert loaded == ready
    run.drain()


@pytest.mark.parametrize("ends", ["parked", "running", "all"])
def test_requests_parked_before_their_load_do_not_use_slots_up(start, prompt, ends) -> None:
    """As many as there are slots run or wait for their load; whichever of them end, the next ones get in."""
    run = start(max_new_kv_loads_per_step=1, max_num_seqs=4, prefill_slots_per_rank=4, max_num_batched_tokens=80,
                prefill_pages=80, decode_pages=80)  # fmt: skip
    for turn in range(6):
        requests = [run.submit(prompt(6, 10 * turn + i), max_tokens=20) for i in range(4)]
        while not any(r.state is RequestState.RUNNING for r in requests):
            run.step()
        states = [r.state for r in requests]
        assert states.count(RequestState.READY) == 3 and run.scheduler.num_running == 4
        queued = run.submit(prompt(6, 10 * turn + 5), max_tokens=2)
        run.step()
        assert queued.state is RequestState.QUEUED
        for request in requests:
            if ends == "all" or (request.state is RequestState.RUNNING) == (ends == "running"):
                run.scheduler.finish(request, ABORT)
        run.step()
        assert queued.state is not RequestState.QUEUED
        run.drain()
        assert queued.finish_reason is FinishReason.LENGTH and run.scheduler.num_running == 0


def test_a_load_waits_for_its_prefill(start, prompt) -> None:
    run = start(depth=3)
    request = run.submit(prompt(5))
    run.step()
    assert run.step().is_empty and request.state is RequestState.PREFILLING  # no result has come back yet
    while request.state is not RequestState.READY:
        run.step()
    assert run.step().loads[0].request is request
    run.drain()


# --- results, late ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_no_step_is_planned_beyond_the_last_token(start, prompt, depth) -> None:
    run = start(depth=depth)
    for max_tokens in (1, 2, 3, 7):
        run.submit(prompt(5), max_tokens=max_tokens)
    run.drain()
    assert [run.device.steps_run[r.request_id] for r in run.requests] == [1, 2, 3, 7]


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("rows", [2, 4])
def test_several_rows_of_which_any_number_counts(start, prompt, depth, rows) -> None:
    run = start(depth=depth, decode_rows=rows, reserve_output_tokens=2, seed=depth)
    for i in range(8):
        run.submit(prompt(1 + 3 * i), max_tokens=20)
    run.drain()


def test_tokens_of_a_request_that_has_ended_are_dropped(start, prompt) -> None:
    run = start(depth=3, max_num_seqs=1)
    first = run.submit(prompt(1), max_tokens=9)
    while len(first.output) < 2:
        run.step()
    run.scheduler.finish(first, FinishReason.STOP)
    second = run.submit(prompt(1, 1), max_tokens=9)  # takes the slot while steps of the first are in flight
    run.step()
    assert second.decode_slot == 0 and len(first.output) == 2 and second.output == []
    run.drain()
    assert len(first.output) == 2


def test_a_slot_that_is_held_back_sits_out(start, prompt) -> None:
    run = start(depth=2)
    one, other = run.submit(prompt(1), max_tokens=6), run.submit(prompt(2), max_tokens=6)
    while other.state is not RequestState.RUNNING:
        run.step()
    before = len(one.output)
    hold = np.zeros(4, bool)
    hold[one.decode_slot] = True
    plans = [run.step(hold) for _ in range(3)]
    assert not any(plan.decode.is_active[one.decode_slot] for plan in plans)
    assert len(one.output) <= before + 2 and len(other.output) >= 2
    run.drain()


@pytest.mark.parametrize("state", list(RequestState))
def test_ending_in_any_state_frees_once(start, prompt, state) -> None:
    run = start(decode_pages=9, reserve_output_tokens=1, max_model_len=32, prefill_slots_per_rank=2, tail="full",
                max_new_kv_loads_per_step=1, depth=2, prefix="bounded")  # fmt: skip
    requests = [run.submit(prompt(12, i), max_tokens=20) for i in range(3)]
    seen = None
    for _ in range(200):
        seen = next((r for r in requests if r.state is state), None)
        if seen:
            break
        run.step()
    assert seen is not None
    assert run.scheduler.finish(seen, ABORT) is (state is not RequestState.FINISHED)
    assert run.scheduler.finish(seen, FinishReason.ERROR) is False
    assert seen.finish_reason is (FinishReason.LENGTH if state is RequestState.FINISHED else ABORT)
    run.check()
    run.drain()


def test_times_of_the_states_are_kept(prompt) -> None:
    now = iter(range(100))
    scheduler: Scheduler[ScheduledRequest] = Scheduler(
        SchedulerConfig(), ReplayRule(window=4, num_layers=1, max_ratio=1), clock_s=lambda: next(now)
    )
    request = ScheduledRequest(request_id="x", prompt=prompt(3), page_hashes=np.zeros((0, 16), np.uint8), max_tokens=1)
    scheduler.submit(request)
    scheduler.prefill_done(scheduler.plan_step().prefill)
    scheduler.plan_step()
    scheduler.finish(request, ABORT)
    assert list(request.entered_s.items()) == [("queued", 0), ("prefilling", 1), ("ready", 2), ("running", 3),
                                               ("finished", 4)]  # fmt: skip


def test_a_very_long_prompt_holds_up_nobody() -> None:
    """855,000 tokens are admitted within a step's time, while another request decodes on."""
    config = SchedulerConfig(max_model_len=1_000_000, prefill_pages=16000, decode_pages=16000, max_num_seqs=4,
                             max_num_batched_tokens=8192)  # fmt: skip
    scheduler: Scheduler[ScheduledRequest] = Scheduler(config, ReplayRule(window=128, num_layers=40, max_ratio=2))
    none = np.zeros((0, 16), np.uint8)
    short = ScheduledRequest(request_id="s", prompt=np.zeros(1, np.int32), page_hashes=none, max_tokens=500)
    scheduler.submit(short)
    scheduler.plan_step()
    hashes = np.random.default_rng(0).integers(0, 256, (13359, 16), np.uint8)
    long = ScheduledRequest(request_id="l", prompt=np.zeros(855_000, np.int32), page_hashes=hashes, max_tokens=5)
    begin_s = time.thread_time()
    scheduler.submit(long)
    plan = scheduler.plan_step()
    took_s = time.thread_time() - begin_s
    assert long.state is RequestState.PREFILLING and plan.prefill is not None and plan.decode is not None
    assert len(plan.prefill_pages) == len(plan.decode_pages) == 13360
    assert took_s < 0.05  # about 1 ms on an idle core; a Python step per page would take longer than this
    num_chunks = 1
    while long.state is RequestState.PREFILLING:
        scheduler.prefill_done(plan.prefill)
        if long.state is RequestState.PREFILLING:
            plan = scheduler.plan_step()
            num_chunks += 1
            assert plan.decode is not None and len(plan.prefill_pages) == 0 and len(plan.decode_pages) <= 1
    assert num_chunks == 105
    scheduler.check()


def test_most_plans_do_not_ask_for_pages(start, prompt) -> None:
    """A rank with plenty gives pages a quarter of a page ahead, to all that will need one, and then not for a while."""
    run = start(page_size=16, max_model_len=512, decode_pages=129, prefill_pages=129, reserve_output_tokens=1,
                max_num_batched_tokens=64, depth=2)  # fmt: skip
    requests = [run.submit(prompt(length), max_tokens=200) for length in (17, 20, 26, 31)]
    while len(run.scheduler.decode.running()) < 4:
        run.step()
    grown = [len(run.step().decode_pages) for _ in range(96)]
    assert sum(grown) == 4 * 96 // 16
    assert sum(count > 0 for count in grown) <= 96 // 4
    run.drain()
    assert all(len(request.output) == 200 for request in requests)
