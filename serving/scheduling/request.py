"""A request as the scheduler sees it."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable

import numpy as np
from jaxtyping import Int32, UInt8

from widemesh.serving.request import FinishReason
from widemesh.serving.scheduling.page_hash import DIGEST_BYTES, hash_pages


class RequestState(enum.StrEnum):
    """Where a request is. QUEUED -> PREFILLING -> READY -> RUNNING -> FINISHED; one token needs no prefill."""

    QUEUED = "queued"
    PREFILLING = "prefilling"  # holds a prefill slot and a decode slot, with all their pages
    READY = "ready"  # prefilled; waits for its turn to be loaded into its decode slot
    RUNNING = "running"
    PREEMPTED = "preempted"  # waits again, with what it has produced so far
    FINISHED = "finished"


@dataclasses.dataclass(eq=False, kw_only=True)
class ScheduledRequest:
    """What the scheduler must know of a request, and what it keeps of it. May be subclassed with further fields.

    The first group is the caller's and constant (`max_tokens` is clipped by `submit`); the rest belongs to the
    scheduler, the caller reads it.
    """

    request_id: str
    prompt: Int32[np.ndarray, "N"]
    page_hashes: UInt8[np.ndarray, "P 16"]  # of the prompt's full pages; extended when outputs are prefilled again
    max_tokens: int
    priority: int = 0  # lower is more important
    reads_cache: bool = True  # False: all rows of the prompt are wanted, so none may come from the prefix cache
    salt: bytes = b""  # of the page hashes

    known_output: list[int] = dataclasses.field(default_factory=list)  # accepted tokens, without the `unread` ones
    unread: Callable[[], list[int]] | None = None  # while it holds a decode slot: the tokens since the last call
    state: RequestState = RequestState.QUEUED
    finish_reason: FinishReason | None = None
    entered_s: dict[RequestState, float] = dataclasses.field(default_factory=dict)  # last time each state began
    tokens: Int32[np.ndarray, "n"] = dataclasses.field(init=False)  # all but the last are prefilled; see `rewind`
    arrival: int = -1  # number of the submission
    epoch: int = -1  # number of the admission; -1 = not admitted. Work planned under another one is stale
    generation: int = -1  # of the prefix cache when its first row was planned
    prefill_slot: int = -1
    decode_slot: int = -1
    hit_tokens: int = 0  # taken from the prefix cache by this admission, whole pages
    cached_tokens: int = 0  # by its first one: later ones also find what it has left there itself
    start: int = 0  # first token that is run
    next_row: int = 0  # first token that is not planned yet
    num_preemptions: int = 0
    num_overtaken: int = 0  # requests admitted past it while it did not fit
    kept_prefill_rank: int = -1  # the ranks that take nobody behind it in the queue; -1 = none
    kept_decode_rank: int = -1
    counted_hits: dict[int, tuple[int, int]] = dataclasses.field(default_factory=dict)  # rank -> pool version, pages

    def __post_init__(self) -> None:
        self.tokens = self.prompt

    @property
    def importance(self) -> tuple[int, int]:
        """Order of preference, the most important first. No two requests are equal."""
        return self.priority, self.arrival

    @property
    def output(self) -> list[int]:
        """Accepted tokens."""
        if self.unread is not None:
            self.known_output += self.unread()
        return self.known_output

    @property
    def num_tokens(self) -> int:
        """Tokens known so far."""
        return len(self.prompt) + len(self.output)

    @property
    def prefill_tokens(self) -> int:
        """Tokens whose state prefill makes; the last known one is left to decode, which samples every output."""
        return len(self.tokens) - 1

    @property
    def most_tokens(self) -> int:
        """Prompt and output at the longest."""
        return len(self.prompt) + self.max_tokens

    @property
    def is_at_limit(self) -> bool:
        """Whether it has all the output it may have."""
        return len(self.output) >= self.max_tokens

    def recent(self, position: int, count: int) -> Int32[np.ndarray, "count"]:
        """The `count` ids before `position`, oldest first, -1 before the start."""
        ids = np.full(count, -1, np.int32)
        first, prompt_len = max(0, position - count), len(self.prompt)
        head = self.prompt[first:position]
        tail = self.output[max(0, first - prompt_len) : max(0, position - prompt_len)]
        ids[count - len(head) - len(tail) : count - len(tail)] = head
        ids[count - len(tail) :] = tail
        return ids

    def rewind(self, page_size: int) -> None:
        """After a preemption: prompt and output so far are prefilled together."""
        self.tokens = np.concatenate([self.prompt, np.asarray(self.output, np.int32)])
        done = len(self.page_hashes)
        parent = self.page_hashes[-1].tobytes() if done else bytes(DIGEST_BYTES)
        more = hash_pages(self.tokens[done * page_size :], page_size, parent=parent, salt=self.salt)
        if len(more):
            self.page_hashes = np.concatenate([self.page_hashes, more])
