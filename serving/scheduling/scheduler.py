"""The scheduler: which requests wait, are prefilled, are loaded, decode, or give way.

One thread calls it, once per step: `plan_step`, dispatch, then `prefill_done` and `apply_decode` of earlier plans as
their results come in, in the order of the plans. A plan may be made before the results of the one before it.
"""

from __future__ import annotations

import collections
import itertools
import time
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Bool, Int32

from widemesh.model.config import ConfigError
from widemesh.serving.request import FinishReason, RequestError, Status
from widemesh.serving.scheduling.config import SchedulerConfig
from widemesh.serving.scheduling.decode_side import DecodeSide
from widemesh.serving.scheduling.plan import Accepted, DecodePlan, KvLoad, PageWrites, PrefillPlan, StepPlan
from widemesh.serving.scheduling.prefill_side import PrefillPlace, PrefillSide
from widemesh.serving.scheduling.replay import ReplayRule
from widemesh.serving.scheduling.request import RequestState, ScheduledRequest
from widemesh.serving.scheduling.waiting import WaitingQueue

_LOOKAHEAD = 64  # waiting requests that are tried in a step, beyond those that there are slots for


class Scheduler[RequestT: ScheduledRequest]:
    """The queue, both meshes' slots and pages, and the rules between them.

    Admission takes, at once, a prefill slot with pages for the prompt and a decode slot with pages for the prompt and
    a reserve of output, so an admitted request can always go on to decode. Requests are admitted in order of
    priority and arrival; one that does not fit lets others pass, `max_overtakes` of them, after which one prefill
    rank and one decode rank take nobody from behind it. They empty in time, and every request fits an empty rank.
    """

    def __init__(self, config: SchedulerConfig, replay: ReplayRule, clock_s: Callable[[], float] = time.monotonic):
        longest_tail = replay.shortest_last_chunk(config.max_model_len)
        if config.rows_per_rank < longest_tail:
            raise ConfigError(
                f"max_num_batched_tokens={config.max_num_batched_tokens} must be at least "
                f"{longest_tail * config.prefill_ranks}, a window for each of {config.prefill_ranks} prefill ranks; "
                "use that, or replay the tail in full"
            )
        if config.page_size % replay.max_ratio:
            raise ConfigError(f"page_size={config.page_size} must be a multiple of {replay.max_ratio}, the largest "
                              "compress ratio; use 64")  # fmt: skip
        self.config, self._clock_s = config, clock_s
        self.waiting: WaitingQueue[RequestT] = WaitingQueue()
        self.prefill: PrefillSide[RequestT] = PrefillSide(config, replay)
        self.decode: DecodeSide[RequestT] = DecodeSide(config)
        self.num_preemptions = 0  # since start
        self._ready: collections.deque[RequestT] = collections.deque()
        self._arrivals, self._epochs = itertools.count(), itertools.count()
        self._decode_only: StepPlan[RequestT] | None = None  # the last plan of nothing but a decode step
        self._may_admit = False  # whether anything happened that can make a waiting request fit

    @property
    def num_running(self) -> int:
        """Requests that hold a decode slot, whether they decode yet or not."""
        return self.config.max_num_seqs - self.decode.num_free_slots

    @property
    def has_work(self) -> bool:
        """Whether any request is not finished."""
        return bool(len(self.waiting)) or self.num_running > 0

    def submit(self, request: RequestT) -> None:
        """Queue a request, its `max_tokens` clipped to the room there is. RequestError: refused, nothing is kept."""
        config, prompt_len = self.config, len(request.prompt)
        if prompt_len < 1 or request.max_tokens < 1:
            raise ValueError("a request has at least one prompt token and one output token")
        if len(request.page_hashes) < (prompt_len - 1) // config.page_size:
            raise ValueError(f"{prompt_len} prompt tokens need a hash for each of their full pages")
        if prompt_len >= config.longest_request:
            raise RequestError(
                "prompt", prompt_len,
                f"tokens and an output token are more than the {config.longest_request} tokens that fit, with "
                f"{config.prefill_pages - 1} prefill pages and {config.decode_pages - 1} decode pages of "
                f"{config.page_size} tokens and max_model_len={config.max_model_len}; send a shorter prompt",
            )  # fmt: skip
        request.max_tokens = min(request.max_tokens, config.longest_request - prompt_len)
        request.arrival = next(self._arrivals)
        self._enter(request, RequestState.QUEUED)
        self.waiting.add(request)
        self._may_admit = True

    def check_queue(self, new: Sequence[RequestT], arriving: Sequence[RequestT] = ()) -> None:
        """Raise RequestError if the queue has no room for `new`, behind others that are still to be submitted.

        For whoever hands requests over: `submit` takes what is over the limits, too, so that nobody is refused who was
        accepted before a preempted request came back into the queue. Any thread may call it.
        """
        most_reqs, most_tokens = self.config.max_num_queued_reqs, self.config.max_num_queued_tokens
        if most_reqs is not None and len(self.waiting) + len(arriving) + len(new) > most_reqs:
            raise RequestError("max_num_queued_reqs", most_reqs, "requests are waiting already; try again later",
                               Status.UNAVAILABLE)  # fmt: skip
        if most_tokens is not None:
            tokens = self.waiting.num_tokens + sum(len(request.prompt) for request in arriving)
            new_tokens = sum(len(request.prompt) for request in new)
            if tokens + new_tokens > most_tokens:
                raise RequestError("max_num_queued_tokens", most_tokens,
                                   f"would be passed by {new_tokens} tokens on top of {tokens} that are waiting "
                                   "already; try again later", Status.UNAVAILABLE)  # fmt: skip

    def plan_step(
        self, hold: Bool[np.ndarray, "slots"] | None = None, *, prefill: bool = True, only_resumed: bool = False
    ) -> StepPlan[RequestT]:
        """What to dispatch next. Decode slots set in `hold` sit this step out; without `prefill`, so do all chunks.

        With `only_resumed` nobody is admitted but those that have run before and were preempted.
        """
        preempted: list[RequestT] = []

        def preempt(victim: RequestT) -> None:
            self._preempt(victim)
            preempted.append(victim)

        decode_pages = self.decode.grow(hold, preempt)
        loads = self._load()
        joined = [load.request for load in loads]
        admitted: list[RequestT] = []
        prefill_pages: list[PageWrites] = []
        if self._may_admit and self.decode.num_free_slots:
            self._admit(admitted, prefill_pages, decode_pages, only_resumed)
        for request in admitted:
            if request.prefill_slot < 0:
                self._join(request)
                joined.append(request)
        chunks, rows = self.prefill.plan() if prefill else None, self.decode.plan(hold)
        if not (chunks or loads or admitted or preempted or decode_pages):  # as in most steps
            if self._decode_only is None or self._decode_only.decode is not rows:
                self._decode_only = StepPlan(decode=rows)
            return self._decode_only
        return StepPlan(
            loads=tuple(loads),
            joined=tuple(joined),
            admitted=tuple(admitted),
            preempted=tuple(preempted),
            prefill_pages=PageWrites.join(prefill_pages),
            prefill=chunks,
            decode_pages=PageWrites.join(decode_pages),
            decode=rows,
        )

    def prefill_done(self, plan: PrefillPlan[RequestT]) -> None:
        """The chunks of a plan have run, or will have before anything dispatched from now on needs them.

        Requests whose prompt they end are loaded in the order of these calls.
        """
        for request, epoch, is_last in zip(plan.requests, plan.epochs, plan.is_last.tolist(), strict=True):
            if is_last and request.epoch == epoch:
                self._enter(request, RequestState.READY)
                self._ready.append(request)

    def apply_decode(
        self, plan: DecodePlan, tokens: Int32[np.ndarray, "slots rows"], counts: Int32[np.ndarray, "slots"]
    ) -> Accepted:
        """Take in what a step accepted: the first `counts[slot]` of `tokens[slot]`, at least one where it was active.

        The caller ends the requests that are to end by `finish`. A count of 0 says that the step failed for a live
        one; finish it too.
        """
        return self.decode.apply(plan, tokens, counts)

    def finish(self, request: RequestT, reason: FinishReason) -> bool:
        """End a request wherever it is and free what it holds. False: it had ended before."""
        if request.state is RequestState.FINISHED:
            return False
        if request.state in (RequestState.QUEUED, RequestState.PREEMPTED):
            self.waiting.remove(request)
        else:
            self._free(request)
        request.finish_reason = reason
        self._enter(request, RequestState.FINISHED)
        self._may_admit = True  # also when it only waited: a rank may have been kept for it
        return True

    @property
    def has_started(self) -> bool:
        """Whether any request has begun and not finished."""
        return self.num_running > 0 or any(r.state is RequestState.PREEMPTED for r in self.waiting)

    def flush_prefix_cache(self) -> None:
        """Forget every cached page, for new weights. What is being prefilled now will not be cached."""
        self.prefill.flush()
        self._may_admit = True

    # --- the parts of a step --------------------------------------------------------------------------------------

    def _load(self) -> list[KvLoad[RequestT]]:
        most = self.config.max_new_kv_loads_per_step or len(self._ready)
        loads = []
        for _ in range(min(most, len(self._ready))):
            request = self._ready.popleft()
            source = self.prefill.pages(request.prefill_slot)
            loads.append(
                KvLoad(
                    request=request,
                    prefill_rank=request.prefill_slot // self.config.prefill_slots_per_rank,
                    prefill_slot=request.prefill_slot,
                    decode_rank=request.decode_slot // self.config.slots_per_rank,
                    decode_slot=request.decode_slot,
                    tokens=request.prefill_tokens,
                    source_pages=source,
                    target_pages=self.decode.pages(request.decode_slot, len(source)),
                )
            )
            self.prefill.leave(request)
            self._may_admit = True
            self._join(request)
        return loads

    def _join(self, request: RequestT) -> None:
        self.decode.join(request)
        self._enter(request, RequestState.RUNNING)

    def _admit(
        self, admitted: list[RequestT], prefill: list[PageWrites], decode: list[PageWrites], only_resumed: bool
    ) -> None:
        self._may_admit = only_resumed  # the others are still to be tried
        passed: list[RequestT] = []
        closed_prefill = closed_decode = -1
        for request in self.waiting.first(self.decode.num_free_slots + _LOOKAHEAD):
            if not self.decode.num_free_slots:
                break
            if only_resumed and request.state is not RequestState.PREEMPTED:
                continue
            place = self._place(request, closed_prefill, closed_decode)
            if place is not None:
                prefill_place, decode_rank = place
                self.waiting.remove(request)
                request.epoch = next(self._epochs)
                request.kept_prefill_rank = request.kept_decode_rank = -1
                request.num_overtaken = 0
                decode.append(self.decode.take(request, decode_rank))
                if prefill_place is not None:
                    prefill.append(self.prefill.take(request, prefill_place))
                self._enter(request, RequestState.PREFILLING)
                admitted.append(request)
                for other in passed:
                    other.num_overtaken += 1
            else:
                passed.append(request)
            if closed_decode < 0:
                starved = next((r for r in passed if r.num_overtaken >= self.config.max_overtakes), None)
                if starved is not None:
                    closed_prefill, closed_decode = self._keep_ranks(starved)

    def _keep_ranks(self, request: RequestT) -> tuple[int, int]:
        """A prefill rank (-1 if it needs none) and a decode rank that empty for a request, the same until it is in."""
        if request.kept_decode_rank < 0:
            request.kept_decode_rank = self.decode.calmest_rank()
            request.kept_prefill_rank = self.prefill.calmest_rank() if request.prefill_tokens else -1
        return request.kept_prefill_rank, request.kept_decode_rank

    def _place(
        self, request: RequestT, closed_prefill: int, closed_decode: int
    ) -> tuple[PrefillPlace | None, int] | None:
        """Where a request fits on both meshes; no prefill place for a prompt of one token."""
        if request.prefill_tokens and not self.prefill.num_free_slots:
            return None
        decode_rank = self.decode.choose(request, closed_decode)
        if decode_rank < 0:
            return None
        if not request.prefill_tokens:
            return None, decode_rank
        place = self.prefill.choose(request, closed_prefill)
        return None if place is None else (place, decode_rank)

    def _preempt(self, request: RequestT) -> None:
        """Back to the queue's head. It holds nothing, and what is in flight for it is stale."""
        self._free(request)
        request.rewind(self.config.page_size)
        request.num_preemptions += 1
        self.num_preemptions += 1
        self._enter(request, RequestState.PREEMPTED)
        self.waiting.add(request)
        self._may_admit = True

    def _free(self, request: RequestT) -> None:
        if request.state is RequestState.READY:
            self._ready.remove(request)
        if request.prefill_slot >= 0:
            self.prefill.leave(request)
        self.decode.leave(request)
        request.epoch = -1

    def _enter(self, request: RequestT, state: RequestState) -> None:
        request.state = state
        request.entered_s[state] = self._clock_s()

    def check(self) -> None:
        """Assert every invariant, page by page and request by request; for tests."""
        self.prefill.check()
        self.decode.check()
        keys = [(r.priority, r.state is not RequestState.PREEMPTED, r.arrival) for r in self.waiting]
        assert keys == sorted(set(keys))
        assert self.waiting.num_tokens == sum(r.num_tokens for r in self.waiting)
        for request in self.waiting:
            assert request.state in (RequestState.QUEUED, RequestState.PREEMPTED)
            assert (request.epoch, request.prefill_slot, request.decode_slot) == (-1, -1, -1)
        holders = [r for r in self.decode.slots if r]
        for request in holders:
            is_prefilling = request.state in (RequestState.PREFILLING, RequestState.READY)
            assert is_prefilling == (request.prefill_slot >= 0)
            assert is_prefilling or request.state is RequestState.RUNNING
        assert {id(r) for r in self.prefill.slots if r} <= {id(r) for r in holders}
        assert [r for r in holders if r.state is RequestState.READY] == sorted(self._ready, key=lambda r: r.decode_slot)
