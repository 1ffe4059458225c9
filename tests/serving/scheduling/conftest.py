"""A scheduler driven against a fake device that keeps a token in every place where a real one keeps its state.

Whatever reaches a wrong page, is written over or is missing changes a token that somebody reads, and so the output.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from widemesh.serving.request import FinishReason
from widemesh.serving.scheduling import (
    DecodePlan,
    PageWrites,
    PrefillPlan,
    ReplayConfig,
    ReplayRule,
    ScheduledRequest,
    Scheduler,
    SchedulerConfig,
    StepPlan,
    hash_pages,
)

_REJECTED = -7  # what a draft that was not accepted leaves behind
_UNSET = -1


def next_token(known: np.ndarray) -> int:
    """The output of the fake model: depends on every token and its place."""
    return int((known * (np.arange(len(known)) + 3)).sum() % 997)


def expected_output(prompt: np.ndarray, count: int) -> list[int]:
    """What a request alone on an endless machine yields."""
    known = prompt.astype(np.int64).tolist()
    for _ in range(count):
        known.append(next_token(np.array(known)))
    return known[len(prompt) :]


class _Mesh:
    """Page contents and page tables of one mesh."""

    def __init__(self, ranks: int, pages: int, slots: int, config: SchedulerConfig):
        self.page_size, self.per_rank = config.page_size, slots // ranks
        self.contents = np.full((ranks, pages, config.page_size), _UNSET, np.int64)
        self.table = np.zeros((slots, config.pages_per_slot), np.int32)
        self.filled = np.zeros(slots, np.int64)  # entries of the slot's present request

    def scatter(self, writes: PageWrites) -> None:
        named = set(zip(writes.slots.tolist(), writes.places.tolist(), strict=True))
        assert len(named) == len(writes), "an entry is named twice"
        for slot, place, page in zip(writes.slots, writes.places, writes.pages, strict=True):
            assert page > 0 and place in (0, self.filled[slot])
            self.table[slot, place] = page
            self.filled[slot] = place + 1

    def write(self, slot: int, position: int, token: int) -> None:
        place, offset = divmod(position, self.page_size)
        assert place < self.filled[slot], "a row has no page"
        self.contents[slot // self.per_rank, self.table[slot, place], offset] = token

    def read(self, slot: int, count: int) -> np.ndarray:
        pages = self.table[slot, : -(-count // self.page_size)]
        assert len(pages) <= self.filled[slot]
        return self.contents[slot // self.per_rank, pages].reshape(-1)[:count].copy()


@dataclasses.dataclass
class _DecodeSlot:
    position: int  # of the newest token, whose state is not written yet
    token: int
    limit: int  # tokens after which the device itself stops


class FakeDevice:
    """Runs plans at once, in order. Accepts a random number of drafts."""

    def __init__(self, config: SchedulerConfig, rule: ReplayRule, rng: np.random.Generator):
        self.config, self.rule, self.rng = config, rule, rng
        prefill_slots = config.prefill_ranks * config.prefill_slots_per_rank
        self.prefill = _Mesh(config.prefill_ranks, config.prefill_pages, prefill_slots, config)
        self.decode = _Mesh(config.decode_ranks, config.decode_pages, config.max_num_seqs, config)
        self.running: dict[int, _DecodeSlot] = {}
        self.rows_run: collections.Counter[str] = collections.Counter()  # prefill rows by request
        self.steps_run: collections.Counter[str] = collections.Counter()  # decode steps by request

    def run(self, plan: StepPlan[Any]) -> tuple[np.ndarray, np.ndarray] | None:
        for load in plan.loads:
            source = self.prefill.contents[load.prefill_rank, load.source_pages]
            assert np.array_equal(source.reshape(-1)[: load.tokens], load.request.tokens[: load.tokens])
            assert load.prefill_slot // self.prefill.per_rank == load.prefill_rank
            assert load.decode_slot // self.decode.per_rank == load.decode_rank
            self.decode.contents[load.decode_rank, load.target_pages] = source
        self.prefill.scatter(plan.prefill_pages)
        if plan.prefill:
            self._prefill(plan.prefill)
        self.decode.scatter(plan.decode_pages)
        for request in plan.joined:
            place = len(request.tokens) - 1
            limit = request.most_tokens - 1
            self.running[request.decode_slot] = _DecodeSlot(place, int(request.tokens[-1]), limit)
            assert np.array_equal(self.decode.read(request.decode_slot, place), request.tokens[:place])
        return self._decode(plan.decode) if plan.decode else None

    def _prefill(self, plan: PrefillPlan[Any]) -> None:
        rows = np.bincount(plan.ranks, plan.length)
        assert rows.max() <= self.config.rows_per_rank and plan.length.min() >= 1
        for i, request in enumerate(plan.requests):
            slot, start, end = int(plan.slots[i]), int(plan.start[i]), int(plan.start[i] + plan.length[i])
            for position in range(max(start, int(plan.write_from[i])), end):
                self.prefill.write(slot, position, int(request.tokens[position]))
            assert np.array_equal(self.prefill.read(slot, end), request.tokens[:end])
            assert plan.window_start[i] <= start and plan.is_last[i] == (end == len(request.tokens) - 1)
            if plan.is_last[i]:
                run = end - int(plan.window_start[i])
                assert plan.length[i] >= self.rule.shortest_last_chunk(run)
            self.rows_run[request.request_id] += int(plan.length[i])

    def _decode(self, plan: DecodePlan) -> tuple[np.ndarray, np.ndarray]:
        slots, rows = self.config.max_num_seqs, self.config.decode_rows
        tokens, counts = np.full((slots, rows), _REJECTED, np.int32), np.zeros(slots, np.int32)
        for slot in np.flatnonzero(plan.is_active).tolist():
            state = self.running[slot]
            if state.position >= state.limit:
                continue
            most = min(rows, state.limit - state.position)
            counts[slot] = self.rng.integers(1, most + 1)
            first = state.position
            for row in range(most):
                if row < counts[slot]:
                    self.decode.write(slot, state.position, state.token)
                    state.position += 1
                    state.token = tokens[slot, row] = next_token(self.decode.read(slot, state.position))
                else:
                    self.decode.write(slot, first + row, _REJECTED)
        return tokens, counts


class Run:
    """A scheduler with its fake device. `depth` steps are in flight before the oldest one's results arrive."""

    def __init__(self, config: SchedulerConfig, rule: ReplayRule, depth: int = 1, seed: int = 0):
        self.rng = np.random.default_rng(seed)
        self.config, self.rule, self.depth = config, rule, depth
        self.scheduler: Scheduler[ScheduledRequest] = Scheduler(config, rule)
        self.device = FakeDevice(config, rule, self.rng)
        self.in_flight: collections.deque[tuple[StepPlan[ScheduledRequest], Any]] = collections.deque()
        self.requests: list[ScheduledRequest] = []
        self.page_tokens: dict[bytes, bytes] = {}  # of every hash ever known
        self.num_steps = 0

    def submit(self, prompt: Sequence[int] | np.ndarray, max_tokens: int = 4, **fields: Any) -> ScheduledRequest:
        ids = np.asarray(prompt, np.int32)
        request = ScheduledRequest(
            request_id=str(len(self.requests)), prompt=ids, max_tokens=max_tokens,
            page_hashes=hash_pages(ids, self.config.page_size, salt=fields.get("salt", b"")), **fields,
        )  # fmt: skip
        self.scheduler.check_queue([request])
        self.scheduler.submit(request)
        self.requests.append(request)
        return request

    def step(self, hold: np.ndarray | None = None) -> StepPlan[ScheduledRequest]:
        """Plan and dispatch a step; take in the results that are due."""
        plan = self.scheduler.plan_step(hold)
        self.num_steps += 1
        assert self.num_steps < 10_000, "the work does not end"
        if plan.prefill:
            self._check_written(plan.prefill)
        self.in_flight.append((plan, self.device.run(plan)))
        for request in plan.joined:
            self.device.steps_run[request.request_id] += 0
        if plan.decode:
            for slot in np.flatnonzero(plan.decode.is_active):
                request_at = self.scheduler.decode.slots[slot]
                assert request_at is not None
                self.device.steps_run[request_at.request_id] += 1
        while len(self.in_flight) >= self.depth:
            self.settle()
        self.check()
        return plan

    def _check_written(self, plan: PrefillPlan[ScheduledRequest]) -> None:
        """No chunk writes to a page that another request holds or may find."""
        size = self.config.page_size
        for i, rank in enumerate(plan.ranks.tolist()):
            first, end = max(int(plan.start[i]), int(plan.write_from[i])), int(plan.start[i] + plan.length[i])
            pages = self.scheduler.prefill.pages(int(plan.slots[i]))[first // size : -(-end // size)]
            pool = self.scheduler.prefill.pools[rank]
            assert first >= end or (pool.references()[pages] == 1).all()
            assert first >= end or not np.isin(pages, pool._index.pages()).any(), "a cached page is written again"

    def settle(self) -> None:
        """Take in the oldest step's results."""
        plan, result = self.in_flight.popleft()
        if plan.prefill:
            self.scheduler.prefill_done(plan.prefill)
        if plan.decode:
            accepted = self.scheduler.apply_decode(plan.decode, *result)
            for slot in np.flatnonzero(accepted.is_live).tolist():
                request, count = self.scheduler.decode.slots[slot], accepted.counts[slot]
                assert request is not None
                if self.rng.random() < 0.5:  # reading now or later makes no difference
                    fresh = accepted.tokens[slot, :count].tolist()
                    assert request.output[len(request.output) - len(fresh) :] == fresh
                    assert accepted.outputs[slot] == len(request.output)
                    assert accepted.is_at_limit[slot] == request.is_at_limit
                if accepted.is_at_limit[slot]:
                    assert self.scheduler.finish(request, FinishReason.LENGTH)

    def drain(self, most_steps: int = 5000) -> None:
        """Step until nothing is left; every request that was let run has its right output and nothing is held."""
        for _ in range(most_steps):
            if not self.scheduler.has_work:
                break
            self.step()
        assert not self.scheduler.has_work, "requests are stuck"
        while self.in_flight:
            self.settle()
        self.check()
        for request in self.requests:
            wanted = expected_output(request.prompt, len(request.output))
            assert request.output == wanted, f"request {request.request_id} of {len(request.prompt)} tokens"
            if request.finish_reason is FinishReason.LENGTH:
                assert len(request.output) == request.max_tokens
        assert all(pool.num_used == 0 for pool in self.pools)

    @property
    def pools(self) -> list[Any]:
        return [*self.scheduler.prefill.pools, *self.scheduler.decode.pools]

    def check(self) -> None:
        """The scheduler's invariants, and that every findable page holds the tokens of its hash."""
        self.scheduler.check()
        size = self.config.page_size
        for request in self.requests:
            for page, digest in enumerate(request.page_hashes):
                self.page_tokens[digest.tobytes()] = request.tokens[page * size : (page + 1) * size].tobytes()
        for rank, pool in enumerate(self.scheduler.prefill.pools):
            pages = pool._index.pages()
            for page, digest in zip(pages, pool._index.key_bytes(pages), strict=True):
                held = self.device.prefill.contents[rank, page].astype(np.int32).tobytes()
                assert held == self.page_tokens[digest.tobytes()], "a cached page was written over"


@pytest.fixture
def start() -> Callable[..., Run]:
    """Makes a `Run`: scheduler settings, and window, num_layers, max_ratio, prefix, tail, depth, seed."""

    def make(depth: int = 1, seed: int = 0, prefix: Any = "exact", tail: Any = "bounded", **settings: Any) -> Run:
        model = {name: settings.pop(name, value) for name, value in
                 (("window", 4), ("num_layers", 2), ("max_ratio", 2))}  # fmt: skip
        sizes = dict(page_size=4, max_model_len=64, prefill_pages=33, max_num_batched_tokens=8, decode_pages=65,
                     max_num_seqs=4, reserve_output_tokens=8)  # fmt: skip
        rule = ReplayRule(config=ReplayConfig(prefix=prefix, tail=tail), **model)
        return Run(SchedulerConfig(**{**sizes, **settings}), rule, depth, seed)

    return make


@pytest.fixture
def prompt() -> Callable[[int], np.ndarray]:
    """Random token ids, the same for the same length and seed."""
    return lambda length, seed=0: np.random.default_rng([length, seed]).integers(0, 1000, length).astype(np.int32)
