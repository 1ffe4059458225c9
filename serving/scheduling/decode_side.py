"""The decode mesh: slots and their page tables, as arrays over slots. Nothing here grows with a context's length."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
from jaxtyping import Bool, Int32, Int64

from widemesh.serving.scheduling.config import SchedulerConfig
from widemesh.serving.scheduling.output_log import OutputLog
from widemesh.serving.scheduling.page_pool import PagePool
from widemesh.serving.scheduling.plan import Accepted, DecodePlan, PageWrites
from widemesh.serving.scheduling.progress import Progress
from widemesh.serving.scheduling.request import ScheduledRequest

_AHEAD = 4  # a slot that comes within this part of a page of its last page's end may get the next one
_MANY_PLANS = 1 << 30


class DecodeSide[RequestT: ScheduledRequest]:
    """A request holds pages for its known tokens and a reserve from admission on, and more page by page after that.

    Steps in flight are counted: each settles at least one token of a slot and at most `decode_rows`.
    """

    def __init__(self, config: SchedulerConfig):
        slots, ranks = config.max_num_seqs, config.decode_ranks
        self._config, self._per_rank = config, config.slots_per_rank
        self.pools = [PagePool(config.decode_pages) for _ in range(ranks)]
        self.slots: list[RequestT | None] = [None] * slots
        self.num_free_slots = slots
        self._load = np.zeros(ranks, np.int64)  # requests of each rank
        self._table = np.zeros((slots, config.pages_per_slot), np.int32)
        self._held = np.zeros(slots, np.int64)  # pages of each slot
        self._most_pages = np.zeros(slots, np.int64)  # that its request can ever need
        self._limit = np.zeros(slots, np.int64)  # tokens that its request will ever have computed
        self._before_output = np.zeros(slots, np.int64)  # tokens that it has computed before it has any output
        self._spare_plans = 0  # for which no slot can need a page
        self._log = OutputLog(slots, config.decode_rows)
        self._progress = Progress(slots)
        self._is_running = np.zeros(slots, bool)
        self._epoch = np.full(slots, -1, np.int64)
        self._running: list[RequestT] | None = None  # made when it is asked for
        self._generation = 0  # as in a plan
        self._last_plan: DecodePlan | None = None
        self._same_plans = 0  # that are certain to be as the last one, unless the generation changes or a slot is held
        self._calm_results = 0  # of the last plan that cannot bring anybody to a limit
        self._outputs_then = np.zeros(slots, np.int64)  # as in what is accepted
        self._nobody = np.zeros(slots, bool)

    def running(self) -> list[RequestT]:
        """Requests that decode, by slot. The same object until somebody joins or leaves; never changed."""
        if self._running is None:
            self._running = [r for r, runs in zip(self.slots, self._is_running, strict=True) if r is not None and runs]
        return self._running

    def choose(self, request: RequestT, closed_rank: int) -> int:
        """The rank with the fewest requests where it fits; -1 where none has a slot and pages.

        A preempted request must not bounce: it comes back only where everybody has room for a horizon of tokens,
        twice as many after every preemption. So it is preempted a number of times that grows with the logarithm of
        the output's length, unless more important requests keep arriving.
        """
        need = self._reserved_pages(request)
        horizon = self._horizon(request)
        best, best_key = -1, (0, 0)
        for rank, pool in enumerate(self.pools):
            if rank == closed_rank or self._load[rank] == self._per_rank or need > pool.num_available:
                continue
            if request.num_preemptions:
                mine = self._on(rank)
                growth = np.minimum(self._most_pages[mine] - self._held[mine], self._config.pages_of(horizon))
                if need + int(growth.sum()) > pool.num_available:
                    continue
            key = int(self._load[rank]), -pool.num_available
            if best < 0 or key < best_key:
                best, best_key = rank, key
        return best

    def calmest_rank(self) -> int:
        """The rank with the fewest requests."""
        return int(np.argmin(self._load))

    def take(self, request: RequestT, rank: int) -> PageWrites:
        """Give it a slot and pages on a rank that `choose` named."""
        pages = self.pools[rank].allocate(self._reserved_pages(request))
        assert pages is not None
        slot = self.slots.index(None, rank * self._per_rank, (rank + 1) * self._per_rank)
        self.slots[slot] = request
        self._table[slot, : len(pages)] = pages
        self._held[slot] = len(pages)
        self._most_pages[slot] = self._config.pages_of(request.most_tokens - 1)
        self._limit[slot] = request.most_tokens - 1
        self._before_output[slot] = len(request.prompt) - 1
        self._progress.computed[slot] = request.prefill_tokens
        self._progress.in_flight[slot] = 0
        self._epoch[slot] = request.epoch
        self._load[rank] += 1
        self.num_free_slots -= 1
        self._log.skip(slot)
        self._generation += 1
        request.decode_slot, request.unread = slot, functools.partial(self._log.read, slot)
        return PageWrites.of(slot, 0, pages)

    def join(self, request: RequestT) -> None:
        """It decodes from the next plan on."""
        self._is_running[request.decode_slot] = True
        self._running = None
        self._generation += 1
        self._spare_plans = 0

    def pages(self, slot: int, count: int) -> Int32[np.ndarray, "count"]:
        """A copy of a slot's first page ids."""
        return self._table[slot, :count].copy()

    def grow(self, hold: Bool[np.ndarray, "slots"] | None, preempt: Callable[[RequestT], None]) -> list[PageWrites]:
        """Pages for the rows that the next plan runs, the most important request first.

        Where there are none, the rank's least important request is preempted, be it the one that asks. While a rank
        has plenty, whoever will soon be short gets its next page too, so that most plans need not ask.
        """
        if self._spare_plans > 0:
            self._spare_plans -= 1
            return []
        page_size = self._config.page_size
        most, soon = self._tokens_after(0), self._tokens_after(page_size // _AHEAD)
        runs = self._will_run(hold)
        is_short = (most > self._held * page_size) & runs
        if not is_short.any():
            self._spare_plans = self._plans_without_need()
            return []
        need, need_soon = -(-most // page_size), -(-soon // page_size)
        writes = []
        asking = [r for r in (self.slots[slot] for slot in np.flatnonzero(need_soon * runs > self._held)) if r]
        for request in sorted(asking, key=lambda r: (not is_short[r.decode_slot], r.importance)):
            slot = request.decode_slot
            if slot < 0:  # preempted for another
                continue
            rank = slot // self._per_rank
            pool, held = self.pools[rank], int(self._held[slot])
            count, has_plenty = int(need_soon[slot]) - held, pool.num_available >= 2 * self._per_rank
            if not has_plenty:
                count = max(0, int(need[slot]) - held)
            while (pages := pool.allocate(count)) is None:
                victim = max((r for r in self.slots[self._on(rank)] if r), key=lambda r: r.importance)
                preempt(victim)
                if victim is request:
                    break
            if pages is None or not count:
                continue
            self._table[slot, held : held + count] = pages
            self._held[slot] += count
            writes.append(PageWrites.of(slot, held, pages))
        self._spare_plans = self._plans_without_need()
        return writes

    def _tokens_after(self, ahead: int) -> Int64[np.ndarray, "slots"]:
        """Tokens that each slot has room for once the next plan has run, and so many more; no more than it can need."""
        rows, computed, in_flight = self._config.decode_rows, self._progress.computed, self._progress.in_flight
        return np.minimum(computed + (in_flight + 1) * rows + ahead, self._limit)

    def _plans_without_need(self) -> int:
        """How many plans after the next one no slot can need a page for, unless somebody joins."""
        rows, room = self._config.decode_rows, self._held * self._config.page_size
        grows = self._is_running & (room < self._limit)
        left = (room - self._progress.computed - (self._progress.in_flight + 1) * rows)[grows]
        return max(0, int(left.min()) // rows) if len(left) else _MANY_PLANS

    def plan(self, hold: Bool[np.ndarray, "slots"] | None) -> DecodePlan | None:
        """A step of every running request that is not held back and not certain to be at its limit already.

        The same object as last time where that says it all.
        """
        last = self._last_plan
        if last is not None and hold is None and self._same_plans > 0 and last.generation == self._generation:
            self._same_plans -= 1
            self._progress.plan(last.is_active)
            return last
        is_active = self._will_run(hold)
        if not is_active.any():
            return None
        left = (self._limit - self._progress.computed - self._progress.in_flight)[is_active]
        self._same_plans = (int(left.min()) - 1) // self._config.decode_rows if hold is None else 0
        self._calm_results = self._same_plans
        self._progress.plan(is_active)
        self._last_plan = DecodePlan(
            is_active=is_active, epochs=self._epoch.copy(), generation=self._generation,
            is_everybody=np.count_nonzero(is_active) == len(self.running()),
            one_each=is_active.astype(np.int32).tobytes(),
        )  # fmt: skip
        return self._last_plan

    def apply(
        self, plan: DecodePlan, tokens: Int32[np.ndarray, "slots rows"], counts: Int32[np.ndarray, "slots"]
    ) -> Accepted:
        """Take in a step's accepted tokens; those of requests that have left their slot since are dropped.

        The arrays must not be written to again.
        """
        if self._log.is_full:
            self._read_log()
        is_same, is_single = plan.generation == self._generation, False
        if is_same and self._config.decode_rows == 1:
            is_single = counts.tobytes() == plan.one_each  # a third of what == and all() take
        if is_single and self._calm_results > 0 and plan is self._last_plan:  # as in most steps
            self._calm_results -= 1
            steps = self._progress.settle(plan.is_active)
            if steps == 1:
                self._outputs_then = self._progress.computed_then - self._before_output
            self._log.add(tokens, counts)
            return Accepted(
                is_live=plan.is_active, tokens=tokens, counts=counts, outputs_then=self._outputs_then,
                steps_since=steps, is_at_limit=self._nobody, is_plain=plan.is_everybody,
            )  # fmt: skip
        computed = self._progress.computed
        is_live = plan.is_active if is_same else plan.is_active & (self._epoch == plan.epochs)
        self._progress.in_flight[:] -= is_live
        # A request has computed all tokens that it knows but the newest, so what is left of its output is this much.
        # One row at a time is never planned past it.
        taken = counts if is_single else np.minimum(counts, self._limit - computed) * is_live
        computed += taken
        self._log.add(tokens, taken)
        is_at_limit = computed >= self._limit
        return Accepted(
            is_live=is_live, tokens=tokens, counts=taken, outputs_then=computed - self._before_output,
            is_at_limit=is_at_limit, is_plain=is_single and plan.is_everybody and not (is_at_limit & is_live).any(),
        )  # fmt: skip

    def _read_log(self) -> None:
        for request in self.slots:
            if request is not None:
                _ = request.output
        self._log.clear()

    def leave(self, request: RequestT) -> None:
        """Take back slot and pages."""
        slot, rank = request.decode_slot, request.decode_slot // self._per_rank
        _ = request.output  # read while it is known whose tokens they are
        request.unread = None
        self.pools[rank].release(self._table[slot, : self._held[slot]].copy())
        self.slots[slot] = None
        self._held[slot] = self._most_pages[slot] = self._limit[slot] = 0
        self._progress.in_flight[slot] = self._progress.computed[slot] = 0
        self._is_running[slot] = False
        self._running = None
        self._generation += 1
        self._epoch[slot] = -1
        self._load[rank] -= 1
        self.num_free_slots += 1
        request.decode_slot = -1

    def _will_run(self, hold: Bool[np.ndarray, "slots"] | None) -> Bool[np.ndarray, "slots"]:
        runs = self._is_running & (self._progress.computed + self._progress.in_flight < self._limit)
        return runs if hold is None else runs & ~hold

    def _on(self, rank: int) -> slice:
        return slice(rank * self._per_rank, (rank + 1) * self._per_rank)

    def _horizon(self, request: RequestT) -> int:
        # No output is longer than max_model_len, so the shift needs no more than its bits.
        doublings = min(request.num_preemptions, self._config.max_model_len.bit_length())
        return self._config.reserve_output_tokens << doublings

    def _reserved_pages(self, request: RequestT) -> int:
        """Pages for its known tokens, its reserve of output and the drafts after it; never more than it can need."""
        tokens = request.num_tokens + self._horizon(request) + self._config.decode_rows - 1
        return self._config.pages_of(min(tokens, request.most_tokens - 1))

    def check(self) -> None:
        """Assert every invariant; for tests."""
        computed, in_flight = self._progress.computed, self._progress.in_flight
        for rank, pool in enumerate(self.pools):
            pool.check()
            mine = range(*self._on(rank).indices(len(self.slots)))
            held = [page for slot in mine for page in self._table[slot, : self._held[slot]].tolist()]
            assert np.array_equal(np.bincount(held, minlength=pool.num_pages), pool.references())
            assert pool.references().max() <= 1 and pool.num_cached == 0
            assert self._load[rank] == sum(self.slots[slot] is not None for slot in mine)
        for slot, request in enumerate(self.slots):
            if request is None:
                assert self._held[slot] == 0 and not self._is_running[slot] and self._epoch[slot] == -1
                assert in_flight[slot] == 0
            else:
                assert request.decode_slot == slot and request.epoch == self._epoch[slot] >= 0
                assert 0 < self._held[slot] <= self._most_pages[slot]
                assert computed[slot] == request.num_tokens - 1
                least = int(computed[slot] + in_flight[slot])
                # Accepted drafts may bring a slot to its limit while more steps than it needs are in flight.
                assert least <= self._limit[slot] or self._config.decode_rows > 1
                assert self._config.pages_of(min(least, int(self._limit[slot]))) <= self._held[slot]
        assert self.num_free_slots == self.slots.count(None)
