"""Log-probabilities of one prompt's tokens, collected chunk after chunk and given away once."""

from __future__ import annotations

import numpy as np

from widemesh.serving.request import TokenLogprobs


class PromptScores:
    """`num_tokens` have one: all of the prompt but the first.

    A prefill that a preemption broke off begins again; once all values are there, no later prefill changes them. The
    engine's thread adds; whoever reads the request's tokens takes, after the last `add` that counts.
    """

    def __init__(self, num_tokens: int, num_top: int):
        self.num_tokens = num_tokens
        nobody = np.zeros((0, num_top))
        self._parts = [TokenLogprobs(chosen=np.zeros(0, np.float32), ranks=np.zeros(0, np.int32),
                                     top_ids=nobody.astype(np.int32), top=nobody.astype(np.float32))]  # fmt: skip
        self._left, self._epoch = num_tokens, -1
        self._is_taken = False

    def add(self, part: TokenLogprobs, epoch: int) -> None:
        """The next chunk of the admission `epoch`. What it has beyond the prompt is dropped."""
        if self._left == 0:
            return
        if epoch != self._epoch:
            self._parts, self._left, self._epoch = self._parts[:1], self.num_tokens, epoch
        part = part[: self._left]
        self._parts.append(part)
        self._left -= len(part.chosen)

    def take(self) -> TokenLogprobs | None:
        """All of them; None before they are there, and once they have been taken."""
        if self._left or self._is_taken:
            return None
        self._is_taken = True
        whole, self._parts = TokenLogprobs.join(self._parts), []
        return whole
