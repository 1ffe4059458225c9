"""How tokens leave the engine's thread: it posts short letters, and their reader's thread makes deltas of them.

One wake-up carries all letters that a step has for a reader. Waking a thread gives it the interpreter, so the engine's
thread does it once, when everything else of its turn is done.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from widemesh.serving.request import Delta, FinishReason, TokenLogprobs

if TYPE_CHECKING:
    from widemesh.serving.engine_request import Request

# The request, its new tokens, how many it has then, how many of its prompt were cached, the weights' version, why it
# ends and its log-probabilities. A plain tuple: one is made for every request in every step.
Letter = tuple["Request", list[int], int, int, int, FinishReason | None, TokenLogprobs | None]


class Mailbox:
    """Letters for one reader. Posted and sent by the engine's thread alone.

    `carry` has a function called on the reader's thread, in the order of its calls; False says that nobody reads.
    """

    def __init__(self, carry: Callable[[Callable[[], None]], bool]):
        self._carry = carry
        self.letters: list[Letter] = []  # for the next `send`

    def send(self) -> list[Request]:
        """Have all letters read, in order. Returns the requests whose tokens nobody reads any more."""
        letters, self.letters = self.letters, []
        if self._carry(functools.partial(_read, letters)):
            return []
        return [letter[0] for letter in letters]


def on_the_spot() -> Mailbox:
    """A mailbox whose reader is called by `send` itself."""

    def carry(read: Callable[[], None]) -> bool:
        read()
        return True

    return Mailbox(carry)


def _read(letters: list[Letter]) -> None:
    for request, new, num_tokens, cached, version, reason, logprobs in letters:
        is_stop = reason is FinishReason.STOP and bool(new) and new[-1] in request.stop_token_ids
        request.deliver(
            Delta(
                request_id=request.request_id,
                token_ids=np.array(new, np.int32),
                finish_reason=reason,
                prompt_tokens=len(request.prompt),
                completion_tokens=num_tokens,
                cached_tokens=cached,
                matched_token_id=new[-1] if is_stop else None,
                logprobs=logprobs,
                prompt_logprobs=None if request.prompt_scores is None else request.prompt_scores.take(),
                weights_version=version,
            )
        )
