"""Whatever comes to whichever process, all of them dispatch the same programs in the same order, and rest together.

The loop, the scheduler, the ticket and the waves are real; processes are threads, and their devices only take notes.
"""

from __future__ import annotations

import importlib.util
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from widemesh.serving.agreement import Agreement, step_schema
from widemesh.serving.config import EngineConfig
from widemesh.serving.engine_request import Request
from widemesh.serving.loop import EngineLoop, WeightUpdate
from widemesh.serving.mailbox import on_the_spot
from widemesh.serving.metrics import EngineMetrics
from widemesh.serving.prompt_scores import PromptScores
from widemesh.serving.request import Delta, FinishReason, SamplingParams
from widemesh.serving.scheduling import ReplayRule, Scheduler, hash_pages
from widemesh.sharding.ticket import NetTicket

_spec = importlib.util.spec_from_file_location("widemesh_stub_device", Path(__file__).parent / "stub_device.py")
assert _spec is not None and _spec.loader is not None
_module = sys.modules.setdefault(_spec.name, importlib.util.module_from_spec(_spec))
_spec.loader.exec_module(_module)
StubDevice = _module.StubDevice

SIZES = EngineConfig(
    max_model_len=32, max_num_seqs=4, max_num_batched_tokens=16, page_size=4, num_pages=13, reserve_output_tokens=4,
    prefill_devices=2, decode_devices=2,
)  # fmt: skip


class Rank:
    """One process: its loop, the notes of its device, and what its requests got."""

    def __init__(self, rank: int, size: int, port: int):
        ticket = NetTicket.join(
            step_schema(SIZES.max_new_kv_loads_per_step), rank=rank, size=size, address=f"127.0.0.1:{port}",
            timeout_s=20.0,
        )  # fmt: skip
        self.ticket, self.device = ticket, StubDevice(SIZES)
        self.ends: dict[str, FinishReason] = {}
        self.counts: dict[str, int] = {}
        self.num_agreed = 0
        compiles = SimpleNamespace(after_warm_up=0)
        metrics = EngineMetrics(model_name="m", max_model_len=32, compiles=compiles, traffic={})  # type: ignore[arg-type]
        rule = ReplayRule(config=SIZES.replay, window=8, num_layers=2, max_ratio=2)
        self.loop = EngineLoop(
            SIZES, Scheduler(SIZES.scheduler, rule), self.device, lambda _: None, metrics,
            Agreement(ticket, self._agreed),
        )  # type: ignore[arg-type] # fmt: skip

    def _agreed(self, wait_s: float, last: int) -> None:
        self.num_agreed += 1

    def _deliver(self, delta: Delta) -> None:
        self.counts[delta.request_id] = delta.completion_tokens
        if delta.finish_reason is not None:
            self.ends[delta.request_id] = delta.finish_reason

    def send(self, name: str, prompt: np.ndarray, max_tokens: int, **options: Any) -> None:
        assert self.loop.post([self.request(name, prompt, max_tokens, **options)])

    def send_together(self, *requests: Request) -> None:
        """So that the loop takes all of them in before the same step."""
        with self.loop._lock:
            self.loop._inbox.extend(requests)
        self.loop.wake()

    def request(self, name: str, prompt: np.ndarray, max_tokens: int, **options: Any) -> Request:
        scored = options.pop("scored", False)
        scores = PromptScores(len(prompt) - 1, 1) if scored else None
        return Request(
            request_id=name, prompt=prompt, page_hashes=hash_pages(prompt, SIZES.page_size), max_tokens=max_tokens,
            sampling=SamplingParams(temperature=0.0, max_tokens=max_tokens, **options), seed=0,
            stop_token_ids=frozenset(), deliver=self._deliver, mailbox=on_the_spot(), prompt_scores=scores,
            reads_cache=not scored,
        )  # fmt: skip


@pytest.fixture
def ranks(new_port: Callable[[], int]) -> Iterator[Callable[[int], list[Rank]]]:
    """`ranks(n)`; all are stopped at the end."""
    made: list[Rank] = []

    def make(size: int) -> list[Rank]:
        port = new_port()
        with ThreadPoolExecutor(size) as pool:
            made.extend(pool.map(lambda rank: Rank(rank, size, port), range(size)))
        return made

    yield make
    if made:
        made[-1].loop.stop()
    for one in made:
        one.loop.stop()
        one.ticket.close()


def until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline_s = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.002)


def are_at_rest(all_ranks: list[Rank]) -> bool:
    return all(not one.loop.num_running and not one.loop.num_waiting for one in all_ranks) and not any(
        one.loop._agreement.is_stepping for one in all_ranks
    )


def check_same_steps(all_ranks: list[Rank]) -> None:
    until(lambda: are_at_rest(all_ranks) and len({one.num_agreed for one in all_ranks}) == 1)
    first, *others = all_ranks
    for other in others:
        assert other.device.calls == first.device.calls
    before = first.num_agreed
    time.sleep(0.2)
    assert [one.num_agreed for one in all_ranks] == [before] * len(all_ranks)  # nobody spins


@pytest.mark.parametrize("size", [2, 3, 4])
def test_random_arrivals(ranks, size: int) -> None:
    """Bursts and pauses, aborts, tight pages, scored prompts, penalties; most of it on one rank."""
    rng = random.Random(size)
    all_ranks = ranks(size)
    sent: dict[str, tuple[Rank, int]] = {}
    for i in range(80):
        rank = all_ranks[rng.choice([0, 0, 0, *range(size)])]
        prompt = np.random.default_rng(i).integers(3, 60, rng.randint(1, 20)).astype(np.int32)
        options: dict[str, Any] = {"scored": True} if rng.random() < 0.15 and len(prompt) > 1 else {}
        if rng.random() < 0.2:
            options["frequency_penalty"] = 0.5
        sent[f"r{i}"] = rank, rng.randint(1, 11)
        rank.send(f"r{i}", prompt, sent[f"r{i}"][1], **options)
        if rng.random() < 0.1:
            rank.loop.abort(f"r{rng.randint(0, i)}")
        if rng.random() < 0.3:
            time.sleep(rng.random() * 0.02)
        if rng.random() < 0.1:
            until(lambda: are_at_rest(all_ranks))
    until(lambda: all(name in rank.ends for name, (rank, _) in sent.items()))
    check_same_steps(all_ranks)
    kinds = all_ranks[0].device.kinds
    assert all(kinds[name] for name in ("load", "prefill pages", "prefill", "join", "tally", "decode")), kinds
    for name, (rank, count) in sent.items():
        assert rank.ends[name] is not FinishReason.ERROR
        assert rank.counts[name] == count or rank.ends[name] is FinishReason.ABORT


def test_an_idle_rank_steps_along(ranks) -> None:
    first, second = ranks(2)
    second.send("one", np.arange(3, 20, dtype=np.int32), 9)
    until(lambda: "one" in second.ends)
    check_same_steps([first, second])
    assert sum(first.device.kinds.values()) == 0 < sum(second.device.kinds.values())


def test_at_the_end_of_the_room(ranks) -> None:
    """One rank's request has a single token to write, another has none to prefill; the third goes on."""
    all_ranks = ranks(3)
    all_ranks[0].send("full", np.full(SIZES.max_model_len - 1, 5, np.int32), 1)
    all_ranks[1].send("short", np.full(1, 5, np.int32), 1)
    all_ranks[2].send("long", np.full(2, 5, np.int32), 30)
    until(lambda: all(one.ends for one in all_ranks))
    check_same_steps(all_ranks)
    assert [list(one.counts.values()) for one in all_ranks] == [[1], [1], [30]]


def test_preempted_beside_others(ranks) -> None:
    """Four requests of 8 pages on two ranks of 12: some give way and are prefilled again, on one process only."""
    first, second = ranks(2)
    second.send("other", np.full(7, 5, np.int32), 20)
    first.send_together(*(first.request(f"r{i}", np.full(2, 5, np.int32), 30) for i in range(4)))
    until(lambda: len(first.ends) == 4 and len(second.ends) == 1)
    check_same_steps([first, second])
    assert first.loop._scheduler.num_preemptions > 0 == second.loop._scheduler.num_preemptions
    assert list(first.counts.values()) == [30] * 4


def test_wakes_are_not_lost(ranks) -> None:
    """A request to each rank in turn, just as the others go to rest after the one before."""
    all_ranks = ranks(2)
    for i in range(60):
        rank = all_ranks[i % 2]
        rank.send(f"r{i}", np.full(1 + i % 3, 5, np.int32), 1 + i % 2)
        until(lambda rank=rank, i=i: f"r{i}" in rank.ends)
    check_same_steps(all_ranks)


def test_weights_change_at_the_same_step(ranks) -> None:
    """A process waits for the update of the others, who serve on the old weights until they have it too."""
    first, second = ranks(2)
    second.send("old", np.full(9, 5, np.int32), 12)
    with ThreadPoolExecutor(2) as pool:
        updates = [WeightUpdate(prefill=name, decode=name, aborts=False) for name in ("a", "b")]  # type: ignore[arg-type]
        early = pool.submit(first.loop.update_weights, updates[0])
        until(lambda: "old" in second.ends)
        first.send("new", np.full(3, 5, np.int32), 2)
        time.sleep(0.2)
        assert not early.done() and "new" not in first.ends and first.loop.weights_version == 0
        second.send("older", np.full(9, 5, np.int32), 12)
        until(lambda: "older" in second.ends)
        assert pool.submit(second.loop.update_weights, updates[1]).result(20) and early.result(20)
    assert (first.device.decode.parameters, second.device.decode.parameters) == ("a", "b")
    assert updates[0].version == updates[1].version == 1
    until(lambda: "new" in first.ends)
    check_same_steps([first, second])


def test_one_stops_and_all_end(ranks) -> None:
    first, second = ranks(2)
    for one in (first, second):
        one.send("r", np.full(2, 5, np.int32), 30)
    stopping = threading.Thread(target=second.loop.stop)
    stopping.start()
    stopping.join(20)
    until(lambda: not first.loop.is_running)
    until(lambda: first.ends and second.ends)  # which the first one, now told, may still be writing
    assert first.loop.stopped_by == second.loop.stopped_by == 1
    assert {first.ends["r"], second.ends["r"]} <= {FinishReason.ABORT, FinishReason.LENGTH}
    assert not first.loop.post([SimpleNamespace(prompt=[5])])  # type: ignore[list-item]
