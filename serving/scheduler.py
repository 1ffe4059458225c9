"""Who runs when: a queue, a prefill rank and a decode slot per request. Host state only; touches no device.

A request waits in the queue until a decode slot and a prefill rank are free, and takes both at once, so that a
prefilled request always has a slot to go to. Slots are handed out on the rank with the fewest requests.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable

import numpy as np
from jaxtyping import Int32

from widemesh.serving.config import EngineConfig
from widemesh.serving.request import Delta, FinishReason, SamplingParams


@dataclasses.dataclass(eq=False, kw_only=True)
class Request:
    """A request inside the engine. `computed` counts the tokens whose state is in a cache."""

    request_id: str
    prompt: Int32[np.ndarray, "N"]
    sampling: SamplingParams
    seed: int
    max_tokens: int  # already clipped to the room that the length limit leaves
    stop_token_ids: frozenset[int]  # eos ids included unless they are ignored
    deliver: Callable[[Delta], None]
    output: list[int] = dataclasses.field(default_factory=list)
    computed: int = 0
    slot: int = -1
    prefill_rank: int = -1

    @property
    def last_token(self) -> int:
        """The token whose row is decoded next."""
        return self.output[-1] if self.output else int(self.prompt[-1])

    @property
    def position(self) -> int:
        """Position of `last_token`."""
        return len(self.prompt) + len(self.output) - 1

    def recent(self, position: int, count: int) -> Int32[np.ndarray, "count"]:
        """The `count` ids before `position`, oldest first, -1 before the start."""
        ids = np.full(count, -1, np.int32)
        for back in range(1, count + 1):
            place = position - back
            if place >= len(self.prompt):
                ids[count - back] = self.output[place - len(self.prompt)]
            elif place >= 0:
                ids[count - back] = self.prompt[place]
        return ids


class Scheduler:
    """The queue, the prefill ranks and the decode slots, and the rules between them."""

    def __init__(self, config: EngineConfig):
        self._slots_per_rank = config.slots_per_rank
        self.waiting: collections.deque[Request] = collections.deque()
        self.prefilling: list[Request | None] = [None] * config.prefill_devices
        self.slots: list[Request | None] = [None] * config.max_num_seqs

    @property
    def decoding(self) -> list[Request]:
        """Requests in a slot whose prompt is computed but for its last token."""
        return [r for r in self.slots if r is not None and r.prefill_rank < 0]

    @property
    def num_running(self) -> int:
        """Requests that hold a slot."""
        return sum(r is not None for r in self.slots)

    def admit(self) -> None:
        """Move requests from the queue to free slots, in order of arrival."""
        while self.waiting:
            needs_prefill = len(self.waiting[0].prompt) > 1
            rank = self.prefilling.index(None) if None in self.prefilling else -1
            slot = self._free_slot()
            if slot < 0 or (needs_prefill and rank < 0):
                return
            request = self.waiting.popleft()
            request.slot = slot
            self.slots[slot] = request
            if needs_prefill:
                request.prefill_rank = rank
                self.prefilling[rank] = request

    def _free_slot(self) -> int:
        """A free slot on the rank with the fewest requests, the lowest such; -1 when all are taken."""
        per = self._slots_per_rank
        ranks = [self.slots[first : first + per] for first in range(0, len(self.slots), per)]
        load = [sum(r is not None for r in rank) for rank in ranks]
        best = int(np.argmin(load))
        if load[best] == per:
            return -1
        return best * per + ranks[best].index(None)

    def prefilled(self, request: Request) -> int:
        """Free the request's prefill rank; it decodes from now on. Returns the rank."""
        rank, request.prefill_rank = request.prefill_rank, -1
        self.prefilling[rank] = None
        return rank

    def remove(self, request: Request) -> None:
        """Take a request out of wherever it is."""
        if request in self.waiting:
            self.waiting.remove(request)
        if request.prefill_rank >= 0:
            self.prefilled(request)
        if request.slot >= 0:
            self.slots[request.slot] = None
            request.slot = -1

    def finish_reason(self, request: Request, token: int) -> FinishReason | None:
        """Why a request ends with `token`, its newest output; None: it goes on."""
        if token in request.stop_token_ids:
            return FinishReason.STOP
        if len(request.output) >= request.max_tokens:
            return FinishReason.LENGTH
        return None
