"""The engine's thread: takes requests in, runs prefill and decode steps, delivers tokens.

It alone touches the devices and the scheduler. Other threads post requests and aborts and read counters.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable, Iterable

import numpy as np

from widemesh.serving.config import EngineConfig
from widemesh.serving.device import DecodeRows, DeviceEngine, PrefillRow
from widemesh.serving.request import Delta, FinishReason
from widemesh.serving.sampling import SamplingRows
from widemesh.serving.scheduler import Request, Scheduler

_log = logging.getLogger(__name__)


@dataclasses.dataclass(kw_only=True)
class Counters:
    """Totals since start."""

    requests: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0


class EngineLoop:
    """Runs until `stop`. Requests in flight at that moment, and after a defect, end with abort or error."""

    def __init__(self, config: EngineConfig, device: DeviceEngine, on_finish: Callable[[Request], None]):
        self._config, self._device, self._on_finish = config, device, on_finish
        self._scheduler = Scheduler(config)
        self._wake = threading.Condition()
        self._inbox: list[Request] = []
        self._aborts: set[str] = set()
        self._is_stopping = False
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

    def post(self, request: Request) -> bool:
        """Hand a request over. False: the loop has ended and will not take it."""
        with self._wake:
            if self._is_stopping or self.failure is not None:
                return False
            self._inbox.append(request)
            self._wake.notify()
            return True

    def abort(self, request_id: str) -> None:
        """End a request at the next step boundary."""
        with self._wake:
            self._aborts.add(request_id)
            self._wake.notify()

    def stop(self) -> None:
        """End everything in flight with abort and wait for the thread. May be called twice."""
        with self._wake:
            self._is_stopping = True
            self._wake.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # --- the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        reason = FinishReason.ABORT
        try:
            while self._take_in():
                self._scheduler.admit()
                self._prefill()
                self._decode()
        except Exception as err:
            _log.exception("the engine has failed; every request in flight ends with an error")
            reason, self.failure = FinishReason.ERROR, err
        with self._wake:
            self._is_stopping = True
            left = [*self._scheduler.waiting, *(r for r in self._scheduler.slots if r), *self._inbox]
            self._inbox = []
        for request in left:
            self._finish(request, reason)

    def _take_in(self) -> bool:
        """Move posted requests and aborts into the scheduler; sleep while there is nothing to do. False: stop."""
        with self._wake:
            while not (self._is_stopping or self._inbox or self._aborts or self._has_work()):
                self._wake.wait()
            if self._is_stopping:
                return False
            arrived, self._inbox = self._inbox, []
            aborts, self._aborts = self._aborts, set()
        self._scheduler.waiting.extend(arrived)
        if aborts:
            for request in [*self._scheduler.waiting, *(r for r in self._scheduler.slots if r)]:
                if request.request_id in aborts:
                    self._finish(request, FinishReason.ABORT)
        return True

    def _has_work(self) -> bool:
        return bool(self._scheduler.waiting) or self._scheduler.num_running > 0

    def _prefill(self) -> None:
        """One chunk of every request that is being prefilled; those that are done move to their decode slot."""
        work: list[PrefillRow | None] = []
        history_len = self._device.engram_hash.history_len
        for request in self._scheduler.prefilling:
            if request is None:
                work.append(None)
                continue
            # The last prompt token is left to decode, which samples every output token.
            last = min(request.computed + self._config.chunk_rows, len(request.prompt) - 1)
            ids = request.prompt[request.computed : last]
            work.append(PrefillRow(ids, request.computed, request.recent(request.computed, history_len)))
            request.computed = last
        if not any(work):
            return
        self._device.prefill_step(work)
        for request in list(self._scheduler.prefilling):
            if request is not None and request.computed == len(request.prompt) - 1:
                rank = self._scheduler.prefilled(request)
                self._device.hand_over(rank, request.computed, request.slot)

    def _decode(self) -> None:
        """One token of every request in a slot."""
        decoding = self._scheduler.decoding
        if not decoding:
            return
        tokens, is_finite = self._device.decode_step(self._control(decoding))
        for request in decoding:
            request.computed += 1
            if not is_finite[request.slot]:
                _log.error("request %r: the model's logits are not finite", request.request_id)
                self._finish(request, FinishReason.ERROR)
                continue
            token = int(tokens[request.slot])
            request.output.append(token)
            self.counters.generated_tokens += 1
            reason = self._scheduler.finish_reason(request, token)
            if reason is None:
                self._deliver(request, [token], None)
            else:
                self._finish(request, reason, [token])

    def _control(self, decoding: list[Request]) -> DecodeRows:
        slots = self._config.max_num_seqs
        history_len = self._device.engram_hash.history_len
        ids, positions = np.zeros(slots, np.int32), np.zeros(slots, np.int32)
        is_active = np.zeros(slots, bool)
        history = np.full((slots, history_len), -1, np.int32)
        temperature, top_p = np.zeros(slots, np.float32), np.ones(slots, np.float32)
        top_k, seed = np.zeros(slots, np.int32), np.zeros(slots, np.uint32)
        for request in decoding:
            slot, sampling = request.slot, request.sampling
            ids[slot], positions[slot], is_active[slot] = request.last_token, request.position, True
            history[slot] = request.recent(request.position, history_len)
            temperature[slot] = 0.0 if sampling.is_greedy else sampling.temperature
            top_p[slot], top_k[slot] = sampling.top_p, sampling.top_k
            seed[slot] = request.seed & 0xFFFFFFFF
        rows = SamplingRows(temperature, top_k, top_p, seed)  # type: ignore[arg-type]
        return DecodeRows(ids, positions, is_active, history, rows)

    def _finish(self, request: Request, reason: FinishReason, new: Iterable[int] = ()) -> None:
        self._scheduler.remove(request)
        self.counters.requests += 1
        self.counters.prompt_tokens += len(request.prompt)
        self._on_finish(request)
        self._deliver(request, new, reason)

    def _deliver(self, request: Request, new: Iterable[int], reason: FinishReason | None) -> None:
        token_ids = np.fromiter(new, np.int32)
        matched = int(token_ids[-1]) if reason is FinishReason.STOP else None
        request.deliver(
            Delta(
                request_id=request.request_id,
                token_ids=token_ids,
                finish_reason=reason,
                prompt_tokens=len(request.prompt),
                completion_tokens=len(request.output),
                matched_token_id=matched,
            )
        )
