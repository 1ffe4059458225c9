"""The engine's thread: takes requests in, plans and dispatches steps, delivers tokens.

It alone touches the devices and the scheduler. Other threads post requests and aborts and read counters. Two decode
steps are in flight: while one runs, the next is planned and dispatched, and results are read one step late.

With several processes the devices of all of them run each program together. Each process plans for its own slots and
ranks, says what its plan needs, and dispatches what all of them need (`agreement.py`).
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from flax import nnx

from widemesh.eplb.agreed import Agreed
from widemesh.serving.agreement import Agreement, Part, Step
from widemesh.serving.config import EngineConfig
from widemesh.serving.decode_arguments import DecodeArguments
from widemesh.serving.device import DecodeResult, DecodeStep, DeviceEngine, PrefillStep
from widemesh.serving.engine_calls import EngineCalls
from widemesh.serving.engine_request import Request
from widemesh.serving.mailbox import Letter, Mailbox
from widemesh.serving.metrics import EngineMetrics, PageCounts
from widemesh.serving.programs import NOT_FINITE
from widemesh.serving.request import FinishReason, TokenLogprobs
from widemesh.serving.running_set import RunningSet
from widemesh.serving.sampling import RowLogprobs
from widemesh.serving.scheduling import (
    NO_WRITES,
    Accepted,
    DecodePlan,
    PagePool,
    PageWrites,
    PrefillPlan,
    Scheduler,
    StepPlan,
)
from widemesh.serving.step_needs import DECODE_ONLY, NOTHING, StepNeeds
from widemesh.serving.step_work import IDLE, NO_WORK, StepWork, make_work
from widemesh.serving.structured import ConstraintError
from widemesh.sharding.ticket import TicketError

if TYPE_CHECKING:
    from widemesh.eplb.reshuffler import Reshuffler

_STEPS_IN_FLIGHT = 2
_IDLE_STEP_S = 0.0005  # between two looks at what the devices do beside the steps, when there is nothing else to do

_log = logging.getLogger(__name__)


@dataclasses.dataclass(kw_only=True)
class Counters:
    """Totals since start."""

    requests: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0


@dataclasses.dataclass(kw_only=True)
class WeightUpdate:
    """New parameters for both meshes, and who waits for them."""

    prefill: nnx.State[Any, Any]
    decode: nnx.State[Any, Any]
    aborts: bool  # end what has started, instead of letting it finish on the old weights
    is_over: threading.Event = dataclasses.field(default_factory=threading.Event)
    version: int = 0  # after it; 0 = it was never applied


class EngineLoop:
    """Runs until `stop`, or until another process stops. Requests in flight then, and after a defect, end with abort
    or error. `on_end` is called on the loop's thread: with its failure at once, or with None when all is over."""

    def __init__(
        self,
        config: EngineConfig,
        scheduler: Scheduler[Request],
        device: DeviceEngine,
        on_finish: Callable[[Request], None],
        metrics: EngineMetrics,
        agreement: Agreement,
        on_end: Callable[[BaseException | None], None] = lambda _: None,
        reshufflers: tuple[Reshuffler, ...] = (),
    ):
        self._reshufflers = reshufflers  # of the models whose experts move; the target model's is the first
        self._config, self._scheduler, self._device = config, scheduler, device
        self._on_finish, self._metrics, self._agreement, self._on_end = on_finish, metrics, agreement, on_end
        self._in_flight: collections.deque[tuple[DecodePlan | None, DecodeStep]] = collections.deque()
        self._result_s = 0.0  # when the last step's result was there
        self._prefilling: collections.deque[tuple[PrefillPlan[Request] | None, PrefillStep]] = collections.deque()
        self._running = RunningSet(config.max_num_seqs)
        self._arguments = DecodeArguments(config, device.model_config.vocab_size, self._running)
        self._unsent: set[Mailbox] = set()
        self._reported_requests = -1  # that had ended by the last report on pages
        self._planned: StepPlan[Request] | None = None  # the last plan, if `_work` says all of it
        self._work = NO_WORK
        self._lock = threading.Lock()
        self._is_resting = False  # set by the engine's thread before it looks for work a last time and sleeps
        self._told_update = False  # whether the other processes know that this one is ready for new weights
        self._inbox: list[Request] = []
        self._aborts: collections.deque[tuple[Request, FinishReason]] = collections.deque()
        self._live: dict[Request, None] = {}  # in order of arrival; two may have one name, when a reader has ended one
        self._updates: collections.deque[WeightUpdate] = collections.deque()
        self._calls = EngineCalls(self.wake)
        self._is_stopping = False
        self.stopped_by = -1  # the process that has ended the job in good order
        self.weights_version = 0
        self.counters = Counters()
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="widemesh-engine", daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """False once stopped or broken."""
        return self._thread.is_alive() and self.failure is None and not self._is_stopping

    @property
    def num_running(self) -> int:
        """Requests that hold a slot."""
        return self._scheduler.num_running

    @property
    def num_waiting(self) -> int:
        """Requests that hold none yet."""
        return len(self._scheduler.waiting) + len(self._inbox)

    def post(self, requests: Sequence[Request]) -> bool:
        """Hand requests over, all or none. False: the loop has ended. RequestError: the queue has no room for them."""
        with self._lock:
            if self._is_stopping or self.failure is not None:
                return False
            self._scheduler.check_queue(requests, self._inbox)
            self._inbox.extend(requests)
        self.wake()
        return True

    def abort(self, requests: Iterable[Request], reason: FinishReason = FinishReason.ABORT) -> None:
        """End requests at the next step boundary, with another `reason` if their reader has found the end."""
        self.drop(requests, reason)
        self.wake()

    def drop(self, requests: Iterable[Request], reason: FinishReason = FinishReason.ABORT) -> None:
        """As `abort`, but takes no lock and wakes nobody: for destructors.

        A garbage collection may run one on any thread and in any place, also where a lock of the loop is held. The
        next turn sees it, and there is one while a request is running.
        """
        for request in requests:
            self._aborts.append((request, reason))

    def update_weights(self, update: WeightUpdate) -> bool:
        """Apply an update at a step boundary and wait for it. False: the loop has ended before.

        With several processes it is applied when all of them have one and none has started requests.
        """
        with self._lock:
            if self._is_stopping or self.failure is not None:
                return False
            self._updates.append(update)
        self.wake()
        update.is_over.wait()
        return update.version > 0

    def call[R](self, function: Callable[[], R]) -> R:
        """Run a function on the engine's thread between two steps, and return what it returns or raise what it raises.

        Raises EngineError if the loop has ended before.
        """
        return self._calls.ask(function)

    def stop(self) -> None:
        """End everything in flight with abort and wait for the thread, in all processes. May be called twice."""
        self._is_stopping = True
        self.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def lose(self, failure: BaseException) -> None:
        """End all requests with an error at once, from any thread: the loop's own may be stuck in a collective."""
        with self._lock:
            self.failure = self.failure or failure
            left = [*self._live, *self._inbox]
        for request in left:
            request.mailbox.send_now(
                Letter(request, [], len(request.known_output), 0, self.weights_version, FinishReason.ERROR, None)
            )

    def wake(self) -> None:
        """Look for work, from any thread."""
        if self._is_resting:
            self._agreement.wake()

    # --- the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        reason = FinishReason.ABORT
        try:
            while self._take_in():
                self._turn()
        except Exception as err:
            is_ours = not isinstance(err, TicketError)  # else another process is the cause, which the message names
            _log.error("the engine has failed (%s); every request in flight ends with an error", err, exc_info=is_ours)
            reason, self.failure = FinishReason.ERROR, self.failure or err
            self._on_end(self.failure)  # first, since readers of what follows ask why
        with self._lock:
            self._is_stopping = True
            left = [*self._live, *self._inbox]
            self._inbox = []
        for request in left:
            self._finish(request, reason)
        self._send()
        for update in self._updates:
            update.is_over.set()
        self._calls.end()
        for reshuffler in self._reshufflers:
            reshuffler.close()
        self._metrics.step(running=0, waiting=0, prompt_rows=0, step_s=0.0)
        if self.failure is None:
            self._on_end(None)

    def _take_in(self) -> bool:
        """Move posted requests and aborts into the scheduler; rest while there is nothing to do. False: stop."""
        if not self._in_flight:  # else the processes are stepping
            self._rest()
        self._calls.run()
        # Aborts first: what they name was posted before, so it is in the inbox or beyond.
        aborts = [self._aborts.popleft() for _ in range(len(self._aborts))]
        with self._lock:
            if self.stopped_by >= 0 or (self._is_stopping and self._agreement.is_alone):
                return False
            # Under the lock, so that `lose` always finds a request in one of the two, and `post` counts it as waiting.
            arrived, self._inbox = self._inbox, []
            for request in arrived:
                self._live[request] = None
                self._scheduler.submit(request)
        for request, reason in aborts:
            if request in self._live:
                self._finish(request, reason)
        return True

    def _rest(self) -> None:
        """Return when there is a step to take, with the other processes."""
        while not self._agreement.is_stepping and self.stopped_by < 0:
            self._calls.run()
            # Looked at once: a second look may find less, since looking takes in what has become ready, and this thread
            # would sleep without being known to.
            is_due = self._is_due()
            if not is_due:
                self._send()
                self._is_resting = True  # from here on, whoever asks for something wakes this thread
                if self._calls.are_waiting:
                    continue
            may_step = self._agreement.rest(_always if is_due else self._is_due)
            self._is_resting = False
            if may_step:
                return

    def _is_due(self) -> bool:
        """Whether this process has a reason to take a step."""
        has_news = self._is_stopping or (self._can_update and not self._told_update)
        return bool(self._inbox or self._aborts or has_news or self._has_work)

    @property
    def _can_update(self) -> bool:
        """Whether there are new weights and nothing runs on the old ones."""
        return bool(self._updates) and not self._scheduler.has_started

    @property
    def _has_work(self) -> bool:
        """Whether a step can bring anything of this process's forward."""
        if self._in_flight or any(reshuffler.wants_step for reshuffler in self._reshufflers):
            return True
        if self._updates:  # whoever waits for new weights also waits for the other processes
            return self._scheduler.has_started
        return self._scheduler.has_work

    def _turn(self) -> None:
        """Plan a step, agree on it and dispatch it; read the result of the one before."""
        start_s = time.monotonic()
        # Decode does not wait for chunks that are still running: neither by loading what they make, nor behind more.
        while self._prefilling and self._prefilling[0][1].is_done():
            self._prefill_done(*self._prefilling.popleft())
        if self._updates:
            self._make_way(self._updates[0])
        plan = self._scheduler.plan_step(
            self._arguments.hold, prefill=len(self._prefilling) < _STEPS_IN_FLIGHT, only_resumed=bool(self._updates)
        )
        if plan.preempted:
            self._running.store_times()
        if plan is not self._planned or self._running.constrained:  # it is the same in most steps
            decode = IDLE if plan.decode is None else self._arguments.work(
                plan.decode, self._scheduler.decode.running()
            )
            self._work = make_work(plan, decode, self._device)
            self._planned = plan if self._work.needs is DECODE_ONLY else None
        work = self._work
        step = self._agree(plan, work)
        if step is None:
            return
        needs = step.needs
        self._dispatch(plan, work, step)
        self._send()
        if self._in_flight and (not needs.decodes or len(self._in_flight) >= _STEPS_IN_FLIGHT):
            self._settle(*self._in_flight.popleft())
        elif not needs.decodes and self._prefilling:
            self._prefilling[0][1].wait()
        elif needs == NOTHING:
            time.sleep(_IDLE_STEP_S)
        self._report(plan, time.monotonic() - start_s)

    def _agree(self, plan: StepPlan[Request], work: StepWork) -> Step | None:
        """What all processes dispatch; None: nothing, ever again. Applies new weights, if all have them."""
        self._told_update = self._can_update
        reports = tuple(reshuffler.report() for reshuffler in self._reshufflers)
        if self._agreement.is_alone:
            step = Step(
                needs=work.needs, updates_weights=self._told_update, eplb=tuple(Agreed.of((one,)) for one in reports)
            )
        else:
            self._agreement.post(
                Part(needs=work.needs, has_work=self._has_work, stops=self._is_stopping, can_update=self._told_update,
                     weights_version=self.weights_version, eplb=reports)
            )  # fmt: skip
        if plan.prefill is not None or plan.loads:  # which take a while to dispatch
            self._send()
        if not self._agreement.is_alone:
            step = self._agreement.wait()
            self.stopped_by = step.stopped_by
        if step.updates_weights:
            self._update_weights()
        return step if self.stopped_by < 0 else None

    def _make_way(self, update: WeightUpdate) -> None:
        """Abort what has started if an update asks for it. New requests wait meanwhile."""
        if update.aborts:
            for request in [r for r in self._live if r.epoch >= 0 or r.num_preemptions]:
                self._finish(request, FinishReason.ABORT)

    def _update_weights(self) -> None:
        """Apply an update. Nothing runs on the weights that it replaces, in any process."""
        update = self._updates[0]
        self._device.prefill.parameters, self._device.decode.parameters = update.prefill, update.decode
        for reshuffler in self._reshufflers:
            reshuffler.discard()  # rows that were copied from the old weights
        self._scheduler.flush_prefix_cache()
        self._reported_requests = -1  # cached pages have become free
        self.weights_version += 1
        update.version = self.weights_version
        self._updates.popleft()
        self._told_update = False
        self._send()  # those that were aborted for it know before it is over
        update.is_over.set()

    def _dispatch(self, plan: StepPlan[Request], work: StepWork, agreed: Step) -> None:
        """Run what all processes need, in one order; where this one needs less, on idle arguments."""
        now_s, pages, needs = time.monotonic(), plan.decode_pages, agreed.needs
        if needs is not DECODE_ONLY:
            pages = self._dispatch_events(plan, work, needs, now_s)
        records = [reshuffler.act(one, decodes=needs.decodes)
                   for reshuffler, one in zip(self._reshufflers, agreed.eplb, strict=True)]  # fmt: skip
        if needs.decodes:
            step = self._device.decode_step(
                work.decode.rows, pages, self._arguments.sampling, work.decode.mask,
                records=tuple(records),
            )  # fmt: skip
            self._in_flight.append((plan.decode, step))
        if needs.decodes or needs.prefill.rows or needs.prefill.scored_rows:
            self._metrics.dispatched(time.monotonic() - now_s)

    def _dispatch_events(
        self, plan: StepPlan[Request], work: StepWork, needs: StepNeeds, now_s: float
    ) -> PageWrites:
        """Everything that comes before the decode step. Returns the table entries that travel with it."""
        device = self._device
        for request in plan.admitted:
            if request.trace.started_s is None:
                request.trace.started_s = now_s
        for i, size in enumerate(needs.loads):
            device.load(work.loads[i] if i < len(work.loads) else None, size)
        if needs.prefill_writes:
            device.prefill_pages(plan.prefill_pages, needs.prefill_writes)
        if needs.prefill.rows or needs.prefill.scored_rows:
            self._prefilling.append((plan.prefill, device.prefill_step(work.prefill, needs.prefill)))
        for i in range(needs.joins):
            if i < len(work.joins):
                request = work.joins[i]
                device.join(request.decode_slot, request.join_row(device.engram_hash.history_len))
            else:
                device.join(-1, None)
        for i in range(needs.tallies):
            device.set_tally(work.decode.tallies[i] if i < len(work.decode.tallies) else None)
        is_separate = work.needs.decode_writes > 0
        if needs.decode_writes:
            device.decode_pages(plan.decode_pages if is_separate else NO_WRITES, needs.decode_writes)
        return NO_WRITES if is_separate else plan.decode_pages

    def _prefill_done(self, plan: PrefillPlan[Request] | None, step: PrefillStep) -> None:
        if plan is None:
            return
        scored = step.scores()
        if scored is not None:
            for i, request in enumerate(plan.requests):
                part = _logprobs(scored, int(plan.ranks[i]), int(plan.length[i]), request.sampling.prompt_logprobs)
                if part is not None and request.prompt_scores is not None and request.epoch == plan.epochs[i]:
                    request.prompt_scores.add(part, request.epoch)
        self._scheduler.prefill_done(plan)

    def _settle(self, plan: DecodePlan | None, step: DecodeStep) -> None:
        """Take in the result of a step and post its tokens."""
        result = step.wait()
        now_s, running = time.monotonic(), self._running
        self._metrics.device_step(now_s - max(step.dispatched_s, self._result_s))
        self._result_s = now_s
        if plan is None:  # the other processes' step
            return
        self._arguments.settled(plan)
        accepted = self._scheduler.apply_decode(plan, result.tokens, result.count)
        if self._config.num_speculative_tokens:
            counts = accepted.is_live & (result.end < NOT_FINITE)  # the others get none of their tokens
            self._metrics.speculation.add(result.tried * counts, result.count, self._config.num_speculative_tokens)
        looks = running.to_look_at(accepted, result.end)
        if looks is None:  # one token for everybody, and nothing else to say
            got, is_plain, num_tokens = None, None, len(running)
        else:
            counts = accepted.counts * (result.end < NOT_FINITE)
            got, is_plain, num_tokens = counts > 0, accepted.is_live & ~looks, int(counts.sum())
        self.counters.generated_tokens += num_tokens
        self._metrics.generated(num_tokens)
        running.note_times(got, now_s, self._metrics)
        self._unsent.update(running.post(accepted, is_plain, self.weights_version))
        if looks is not None:
            for slot in np.flatnonzero(looks).tolist():
                self._look(slot, accepted, result)

    def _look(self, slot: int, accepted: Accepted, result: DecodeResult) -> None:
        """Take in a step's result for a request that it may end, or that wants more than its tokens."""
        request, count = self._running.requests[slot], int(accepted.counts[slot])
        assert request is not None
        if result.end[slot] & NOT_FINITE:
            _log.error("request %r: the model's logits are not finite", request.request_id)
            output = request.output
            del output[len(output) - count :]
            self._finish(request, FinishReason.ERROR)
            return
        new: list[int] = accepted.tokens[slot, :count].tolist()
        logprobs = _logprobs(result.logprobs, slot, count, request.sampling.logprobs)
        reason = self._end_of(request, new, bool(accepted.is_at_limit[slot]))
        if reason is not None:
            self._finish(request, reason, new, logprobs)
        elif count:
            outputs = int(accepted.outputs[slot])
            request.mailbox.letters.append(
                Letter(request, new, outputs, request.cached_tokens, self.weights_version, None, logprobs)
            )
            self._unsent.add(request.mailbox)

    def _end_of(self, request: Request, new: list[int], is_at_limit: bool) -> FinishReason | None:
        """Why a request ends with its newest tokens, the end of its constraint included."""
        reason = FinishReason.LENGTH if is_at_limit else None
        if new and new[-1] in request.stop_token_ids:  # the device runs nothing behind one
            reason = FinishReason.STOP
        if request.constraint is None or reason is FinishReason.STOP:
            return reason
        try:
            for token in new:
                request.constraint.advance(token)
        except ConstraintError as err:
            _log.error("request %r: %s", request.request_id, err)
            return FinishReason.ERROR
        return FinishReason.STOP if request.constraint.is_done else reason

    def _finish(
        self, request: Request, reason: FinishReason, new: list[int] | None = None,
        logprobs: TokenLogprobs | None = None,
    ) -> None:  # fmt: skip
        self._running.store_time(request.decode_slot, request)
        if request.arrival >= 0:  # the scheduler has it
            self._scheduler.finish(request, reason)
        self._live.pop(request, None)
        self.counters.requests += 1
        self.counters.prompt_tokens += len(request.prompt)
        self._metrics.finished(request.trace, len(request.output), reason, time.monotonic())
        self._on_finish(request)
        request.mailbox.letters.append(
            Letter(request, new or [], len(request.output), request.cached_tokens, self.weights_version, reason,
                   logprobs)
        )  # fmt: skip
        self._unsent.add(request.mailbox)

    def _send(self) -> None:
        """Wake the readers, just before this thread waits itself."""
        unsent, self._unsent = self._unsent, set()
        for mailbox in unsent:
            self.drop(mailbox.send())

    def _report(self, plan: StepPlan[Request], step_s: float) -> None:
        if plan.moves_pages or self._reported_requests != self.counters.requests:  # somebody has come, grown or gone
            self._reported_requests = self.counters.requests
            pools = {"prefill": self._scheduler.prefill.pools, "decode": self._scheduler.decode.pools}
            self._metrics.cache(
                pages={name: _pages(of_mesh) for name, of_mesh in pools.items()},
                prefix_queries=self._scheduler.prefill.asked_tokens, prefix_hits=self._scheduler.prefill.hit_tokens,
                preemptions=self._scheduler.num_preemptions,
            )  # fmt: skip
        rows = 0 if plan.prefill is None else int(plan.prefill.length.sum())
        self._metrics.step(running=self.num_running, waiting=self.num_waiting, prompt_rows=rows, step_s=step_s)


def _always() -> bool:
    return True


def _pages(pools: list[PagePool]) -> PageCounts:
    """The pages of a mesh."""
    return PageCounts(
        used=sum(pool.num_used for pool in pools), cached=sum(pool.num_cached for pool in pools),
        free=sum(pool.num_free for pool in pools),
    )  # fmt: skip


def _logprobs(step: RowLogprobs | None, slot: int, count: int, asked: int | None) -> TokenLogprobs | None:
    """A slot's (or prefill rank's) part of a step's log-probabilities, copied; None if the request did not ask."""
    if step is None or asked is None:
        return None
    return TokenLogprobs(
        chosen=np.array(step.chosen[slot, :count]),
        ranks=np.array(step.rank[slot, :count]),
        top_ids=np.array(step.top_ids[slot, :count, :asked]),
        top=np.array(step.top[slot, :count, :asked]),
    )
