"""The prefill mesh: slots, page pools with their prefix caches, and chunks."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Int32

from widemesh.serving.scheduling.config import SchedulerConfig
from widemesh.serving.scheduling.page_pool import PagePool
from widemesh.serving.scheduling.plan import PageWrites, PrefillPlan
from widemesh.serving.scheduling.prefix_cache import count_hits, find_prefix
from widemesh.serving.scheduling.replay import ReplayRule, next_chunk
from widemesh.serving.scheduling.request import ScheduledRequest

_AFFINITY = 1.25  # a rank that holds more of the prompt is preferred up to this many times the least backlog


class PrefillPlace(NamedTuple):
    """A rank with room for a request, and the pages of the prompt that it holds already."""

    rank: int
    hit_pages: Int32[np.ndarray, "h"]


class PrefillSide[RequestT: ScheduledRequest]:
    """A request holds all pages of its prompt from admission on. They stay in the prefix cache when it leaves."""

    def __init__(self, config: SchedulerConfig, replay: ReplayRule):
        self._config, self._replay = config, replay
        ranks, self._per_rank = config.prefill_ranks, config.prefill_slots_per_rank
        self.pools = [PagePool(config.prefill_pages) for _ in range(ranks)]
        self.slots: list[RequestT | None] = [None] * (ranks * self._per_rank)
        self.num_free_slots = len(self.slots)
        self.generation = 0
        self.hit_tokens = self.asked_tokens = 0  # since start: found in the cache, looked for
        self._table = np.zeros((len(self.slots), config.pages_per_slot), np.int32)
        self._held = np.zeros(len(self.slots), np.int64)  # pages of each slot
        self._backlog = np.zeros(ranks, np.int64)  # rows not planned yet
        self._free_slots = np.full(ranks, self._per_rank)

    def choose(self, request: RequestT, closed_rank: int) -> PrefillPlace | None:
        """Where it fits: by outstanding rows, preferring a rank that holds its first pages."""
        total = self._config.pages_of(request.prefill_tokens)
        fitting = []
        for rank, pool in enumerate(self.pools):
            if self._free_slots[rank] and rank != closed_rank:
                hits = self._count_hits(request, rank)
                if total - hits <= pool.num_available:
                    fitting.append((rank, hits))
        if not fitting:
            return None
        near = _AFFINITY * min(self._backlog[rank] for rank, _ in fitting)

        def preference(place: tuple[int, int]) -> tuple[bool, int, int, int]:
            rank, hits = place
            return bool(self._backlog[rank] > near), -hits, int(self._backlog[rank]), -self.pools[rank].num_free

        for rank, hits in sorted(fitting, key=preference):
            pool = self.pools[rank]
            pages = find_prefix(pool, request.page_hashes[:hits])
            # Cached pages that it takes over are no longer available to it.
            if total - len(pages) <= pool.num_available - pool.count_idle(pages):
                return PrefillPlace(rank, pages)
        return None

    def calmest_rank(self) -> int:
        """The rank with the least backlog."""
        return int(np.argmin(self._backlog))

    def take(self, request: RequestT, place: PrefillPlace) -> PageWrites:
        """Give it a slot and pages on a rank that `choose` named."""
        rank, hit_pages = place
        pool = self.pools[rank]
        pool.touch(hit_pages)
        fresh = pool.allocate(self._config.pages_of(request.prefill_tokens) - len(hit_pages))
        assert fresh is not None
        pages = np.concatenate([hit_pages, fresh])
        slot = self.slots.index(None, rank * self._per_rank, (rank + 1) * self._per_rank)
        self.slots[slot] = request
        self._table[slot, : len(pages)] = pages
        self._held[slot] = len(pages)
        request.prefill_slot, request.generation = slot, self.generation
        request.hit_tokens = len(hit_pages) * self._config.page_size
        if not request.num_preemptions:
            request.cached_tokens = request.hit_tokens
        request.start = request.next_row = self._replay.restart(request.hit_tokens).start
        request.counted_hits = {}
        self.num_free_slots -= 1
        self._free_slots[rank] -= 1
        self._backlog[rank] += request.prefill_tokens - request.start
        self.asked_tokens += request.prefill_tokens if request.reads_cache else 0
        self.hit_tokens += request.hit_tokens
        return PageWrites.of(slot, 0, pages)

    def plan(self) -> PrefillPlan[RequestT] | None:
        """The next chunk of every request, as far as each rank's rows go, the most important first."""
        if self.num_free_slots == len(self.slots):
            return None
        chunks: list[tuple[RequestT, int, int]] = []
        for rank in np.flatnonzero(self._backlog):
            rows = self._config.rows_per_rank
            on_rank = self.slots[rank * self._per_rank : (rank + 1) * self._per_rank]
            for request in sorted((r for r in on_rank if r), key=lambda r: r.importance):
                left = request.prefill_tokens - request.next_row
                # The tail needs its rows in one chunk, whatever the chunks before it were.
                last = self._replay.shortest_last_chunk(request.prefill_tokens - request.start)
                count = next_chunk(left, rows, last)
                if count:
                    chunks.append((request, request.next_row, count))
                    request.next_row += count
                    self._backlog[rank] -= count
                    rows -= count
        if not chunks:
            return None
        requests, starts, lengths = zip(*chunks, strict=True)
        slots = np.array([r.prefill_slot for r in requests], np.int32)
        return PrefillPlan(
            requests=requests,
            epochs=tuple(r.epoch for r in requests),
            slots=slots,
            ranks=slots // np.int32(self._per_rank),
            start=np.array(starts, np.int32),
            length=np.array(lengths, np.int32),
            window_start=np.array([r.start for r in requests], np.int32),
            write_from=np.array([r.hit_tokens for r in requests], np.int32),
            is_last=np.array([r.next_row == r.prefill_tokens for r in requests]),
        )

    def pages(self, slot: int) -> Int32[np.ndarray, "n"]:
        """A copy of a slot's page ids."""
        return self._table[slot, : self._held[slot]].copy()

    def leave(self, request: RequestT) -> None:
        """Take back slot and pages. Full pages whose rows were planned stay in the cache: steps run in order."""
        slot, rank = request.prefill_slot, request.prefill_slot // self._per_rank
        pages, pool = self.pages(slot), self.pools[rank]
        full = max(request.hit_tokens, request.next_row) // self._config.page_size
        if request.generation != self.generation:
            full = 0  # made by weights that are gone
        pool.release(pages[full:])
        if full:
            pool.retire(pages[:full], request.page_hashes[:full])
        self._backlog[rank] -= request.prefill_tokens - request.next_row
        self.slots[slot] = None
        self._held[slot] = 0
        self._free_slots[rank] += 1
        self.num_free_slots += 1
        request.prefill_slot = -1

    def flush(self) -> None:
        """Forget every cached page; what is being prefilled now will not be cached."""
        self.generation += 1
        for pool in self.pools:
            pool.flush()

    def _count_hits(self, request: RequestT, rank: int) -> int:
        if not request.reads_cache:
            return 0
        pool = self.pools[rank]
        version, hits = request.counted_hits.get(rank, (-1, 0))
        if version != pool.version:
            size = self._config.page_size
            hits = count_hits(pool, request.page_hashes[: request.prefill_tokens // size])
            hits = self._replay.restart(hits * size).write_from // size
            request.counted_hits[rank] = pool.version, hits
        return hits

    def check(self) -> None:
        """Assert every invariant; for tests."""
        for rank, pool in enumerate(self.pools):
            pool.check()
            mine = range(rank * self._per_rank, (rank + 1) * self._per_rank)
            held = [page for slot in mine for page in self.pages(slot).tolist()]
            assert np.array_equal(np.bincount(held, minlength=pool.num_pages), pool.references())
            running = [r for r in (self.slots[slot] for slot in mine) if r]
            assert self._free_slots[rank] == self._per_rank - len(running)
            assert self._backlog[rank] == sum(r.prefill_tokens - r.next_row for r in running)
        for slot, request in enumerate(self.slots):
            if request is None:
                assert self._held[slot] == 0
            else:
                assert request.prefill_slot == slot
                assert self._held[slot] == self._config.pages_of(request.prefill_tokens)
                assert request.start <= request.next_row <= request.prefill_tokens
        assert self.num_free_slots == self.slots.count(None)
