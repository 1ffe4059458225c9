"""The requests that decode, as arrays over slots: a step's results are taken in without a turn of Python for each."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np
from jaxtyping import Bool, Int32, Int64

from widemesh.serving.engine_request import Request
from widemesh.serving.mailbox import Mailbox, StepLetter
from widemesh.serving.metrics import EngineMetrics
from widemesh.serving.scheduling import Accepted


@dataclasses.dataclass(frozen=True, slots=True)
class _Readers:
    """The requests of one mailbox, and of each its slot and how much of its prompt was cached."""

    mailbox: Mailbox
    requests: tuple[Request, ...]
    slots: Int64[np.ndarray, "r"]
    hits: tuple[int, ...]


class RunningSet:
    """Made anew from the running requests when one of them comes or goes; for the engine's thread alone."""

    def __init__(self, slots: int):
        self.requests: list[Request | None] = [None] * slots
        self.constrained: tuple[Request, ...] = ()
        self._of: Sequence[Request] = ()
        self._readers: list[_Readers] = []
        self._always_looks = np.zeros(slots, bool)  # has a constraint, or wants log-probabilities
        self._any_looks = False
        self._slots = np.zeros(0, np.int64)
        # Either all requests have got their newest tokens at one time, or (None) each has its own, NaN for none yet.
        self._all_last_s: float | None = None
        self._last_token_s = np.full(slots, np.nan)  # out of date while there is one for all

    def __len__(self) -> int:
        return len(self._of)

    def sync(self, running: Sequence[Request]) -> bool:
        """Take over the requests that run now, each in its decode slot. False: they are the same object as before.

        The sequence is never changed in place.
        """
        if running is self._of:
            return False
        self.store_times()
        self._of = running
        slots = len(self.requests)
        self.requests = [None] * slots
        self.constrained = tuple(request for request in running if request.constraint is not None)
        self._always_looks = np.zeros(slots, bool)
        self._slots = np.array([request.decode_slot for request in running], np.int64)
        self._last_token_s = np.full(slots, np.nan)
        by_mailbox: dict[Mailbox, list[Request]] = {}
        for request in running:
            slot = request.decode_slot
            self.requests[slot] = request
            self._always_looks[slot] = request.constraint is not None or request.sampling.logprobs is not None
            if request.trace.last_token_s is not None:
                self._last_token_s[slot] = request.trace.last_token_s
            by_mailbox.setdefault(request.mailbox, []).append(request)
        self._any_looks = bool(self._always_looks.any())
        self._readers = [
            _Readers(
                mailbox, tuple(mine), np.array([r.decode_slot for r in mine]), tuple(r.cached_tokens for r in mine)
            )
            for mailbox, mine in by_mailbox.items()
        ]
        return True

    def to_look_at(self, accepted: Accepted, end: Int32[np.ndarray, "slots"]) -> Bool[np.ndarray, "slots"] | None:
        """Live slots whose request ends with this step, or needs more than its tokens passed on; None if all go on.

        `end` is what the device says: 0 for a slot that goes on, else a sum of flags. A live slot without a token is
        one whose step has failed.
        """
        if accepted.is_plain and not (self._any_looks or np.count_nonzero(end)):
            return None
        return (self._always_looks | (end > 0) | accepted.is_at_limit | (accepted.counts == 0)) & accepted.is_live

    def post(self, accepted: Accepted, is_plain: Bool[np.ndarray, "slots"] | None, version: int) -> Iterable[Mailbox]:
        """Pass on the new tokens of the slots that are set (None: of all), a letter per mailbox that has some.

        Returns the mailboxes that have got one.
        """
        posted = []
        for readers in self._readers:
            if is_plain is None:
                letter = StepLetter(readers.requests, readers.slots, readers.hits, accepted, version)
                readers.mailbox.letters.append(letter)
                posted.append(readers.mailbox)
                continue
            kept = is_plain[readers.slots]
            if not kept.any():
                continue
            requests, slots, hits = readers.requests, readers.slots, readers.hits
            if not kept.all():
                places = np.flatnonzero(kept).tolist()
                requests, hits = tuple(requests[i] for i in places), tuple(hits[i] for i in places)
                slots = slots[kept]
            readers.mailbox.letters.append(StepLetter(requests, slots, hits, accepted, version))
            posted.append(readers.mailbox)
        return posted

    def note_times(self, got: Bool[np.ndarray, "slots"] | None, now_s: float, metrics: EngineMetrics) -> None:
        """The slots that are set (None: all) have got tokens now."""
        num_got = len(self._of) if got is None else int(np.count_nonzero(got))
        if not num_got:
            return
        if self._all_last_s is not None and num_got == len(self._of):  # as in most steps
            metrics.later_tokens(now_s - self._all_last_s, num_got)
            self._all_last_s = now_s
            return
        self._spread_times()
        slots = self._slots if got is None else np.flatnonzero(got)
        last_s = self._last_token_s[slots]
        is_first = np.isnan(last_s)
        for slot in slots[is_first].tolist():
            request = self.requests[slot]
            assert request is not None
            metrics.first_token(request.trace, now_s)
        for then_s, times in zip(*np.unique(last_s[~is_first], return_counts=True), strict=True):
            metrics.later_tokens(now_s - float(then_s), int(times))
        self._last_token_s[slots] = now_s
        if num_got == len(self._of):
            self._all_last_s = now_s

    def _spread_times(self) -> None:
        if self._all_last_s is not None:
            self._last_token_s[self._slots] = self._all_last_s
            self._all_last_s = None

    def store_times(self) -> None:
        """Write what `note_times` has noted into the requests' traces."""
        self._spread_times()
        for request, last_s in zip(self.requests, self._last_token_s.tolist(), strict=True):
            if request is not None and last_s == last_s:
                request.trace.last_token_s = last_s

    def store_time(self, slot: int, request: Request) -> None:
        """The same for one request, if it is in this slot."""
        if slot >= 0 and self.requests[slot] is request:
            last_s = self._last_token_s[slot] if self._all_last_s is None else self._all_last_s
            if last_s == last_s:
                request.trace.last_token_s = float(last_s)
