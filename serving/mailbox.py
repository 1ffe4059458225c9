"""How tokens leave the engine's thread: it posts short letters, and their reader's thread makes deltas of them.

One wake-up carries all letters that a step has for a reader. Waking a thread gives it the interpreter, so the engine's
thread does it once, when everything else of its turn is done.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Int64

from widemesh.serving.request import Delta, FinishReason, TokenLogprobs

if TYPE_CHECKING:
    from widemesh.serving.engine_request import Request
    from widemesh.serving.scheduling import Accepted


@dataclasses.dataclass(frozen=True, slots=True)
class Letter:
    """What is new of one request."""

    request: Request
    new: list[int]
    num_tokens: int  # of its output, these included
    cached: int  # tokens of its prompt
    version: int  # of the weights
    reason: FinishReason | None  # why it ends
    logprobs: TokenLogprobs | None


@dataclasses.dataclass(frozen=True, slots=True)
class StepLetter:
    """What is new of several requests that go on and have only tokens to tell: a row of a step's arrays each."""

    requests: tuple[Request, ...]
    slots: Int64[np.ndarray, "r"]
    cached: tuple[int, ...]
    accepted: Accepted
    version: int

    def letters(self) -> list[Letter]:
        """One for each request."""
        slots, accepted = self.slots, self.accepted
        rows = zip(self.requests, accepted.tokens[slots].tolist(), accepted.counts[slots].tolist(),
                   accepted.outputs[slots].tolist(), self.cached, strict=True)  # fmt: skip
        return [
            Letter(request, ids[:count], outputs, cached, self.version, None, None)
            for request, ids, count, outputs, cached in rows
        ]


class Mailbox:
    """Letters for one reader. Posted and sent by the engine's thread alone.

    `carry` has a function called on the reader's thread, in the order of its calls; False says that nobody reads.
    """

    def __init__(self, carry: Callable[[Callable[[], None]], bool]):
        self._carry = carry
        self.letters: list[Letter | StepLetter] = []  # for the next `send`

    def send(self) -> list[Request]:
        """Have all letters read, in order. Returns the requests whose tokens nobody reads any more."""
        letters, self.letters = self.letters, []
        if self._carry(functools.partial(_read, letters)):
            return []
        return [letter.request for letter in _single(letters)]

    def send_now(self, letter: Letter) -> None:
        """Have one letter read, past those that wait. From any thread."""
        self._carry(functools.partial(_read, [letter]))


def on_the_spot() -> Mailbox:
    """A mailbox whose reader is called by `send` itself."""

    def carry(read: Callable[[], None]) -> bool:
        read()
        return True

    return Mailbox(carry)


def _single(letters: list[Letter | StepLetter]) -> Iterator[Letter]:
    for letter in letters:
        if isinstance(letter, Letter):
            yield letter
        else:
            yield from letter.letters()


def _read(letters: list[Letter | StepLetter]) -> None:
    for letter in _single(letters):
        request, new, reason = letter.request, letter.new, letter.reason
        is_stop = reason is FinishReason.STOP and bool(new) and new[-1] in request.stop_token_ids
        request.deliver(
            Delta(
                request_id=request.request_id,
                token_ids=np.array(new, np.int32),
                finish_reason=reason,
                prompt_tokens=len(request.prompt),
                completion_tokens=letter.num_tokens,
                cached_tokens=letter.cached,
                matched_token_id=new[-1] if is_stop else None,
                logprobs=letter.logprobs,
                prompt_logprobs=None if request.prompt_scores is None else request.prompt_scores.take(),
                weights_version=letter.version,
            )
        )
