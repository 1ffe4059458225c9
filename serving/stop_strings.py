"""The text of one output, up to the first stop string in it.

The search runs over characters, so what it finds does not depend on how the text is cut into tokens: the string that
is complete first ends the output, and of several that are complete at once the one that begins first.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

from widemesh.serving.request import SamplingParams
from widemesh.serving.tokens import Detokenizer


class StopText:
    """Feed it token ids; once `matched` is set the text is final and no more may be fed."""

    def __init__(self, tokenizer: Tokenizer, sampling: SamplingParams):
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=sampling.skip_special_tokens)
        self._stop = sampling.stop
        self._longest = max((len(string) for string in sampling.stop), default=0)
        self._includes_stop = sampling.include_stop_str_in_output
        self._min_tokens = sampling.min_tokens
        self._tokens = 0
        self._handed_out = 0  # characters that `take` has returned
        self._is_flushed = False
        self.text = ""  # all of it; what follows a stop string is cut off, and the string itself unless it is wanted
        self.matched: str | None = None

    def feed(self, token_ids: Sequence[int]) -> int:
        """Take ids up to the one that completes a stop string; returns how many that is."""
        for count, token in enumerate(token_ids, 1):
            self._tokens += 1
            self._extend(self._detokenizer.feed((token,)))
            if self.matched is not None:
                return count
        return len(token_ids)

    def flush(self) -> None:
        """The output has ended: add what was held back because it might have been half a character."""
        if self.matched is None:
            self._is_flushed = True
            self._extend(self._detokenizer.flush())

    def take(self) -> str:
        """Text that is new since the last call and can no longer become a part of a stop string."""
        end = len(self.text)
        if self.matched is None and not self._is_flushed:
            end -= self._num_open()
        new = self.text[self._handed_out : end]
        self._handed_out = max(self._handed_out, end)
        return new

    def _extend(self, new: str) -> None:
        before = len(self.text)
        self.text += new
        if self._tokens <= self._min_tokens or not new:
            return
        low = max(before - self._longest + 1, 0)
        found = [
            (start + len(string), start, string)
            for string in self._stop
            if (start := self.text.find(string, max(before - len(string) + 1, low))) >= 0
        ]
        if found:
            end, start, self.matched = min(found)
            self.text = self.text[: end if self._includes_stop else start]

    def _num_open(self) -> int:
        """Characters at the end that may be the beginning of a stop string."""
        for count in range(min(self._longest - 1, len(self.text)), 0, -1):
            tail = self.text[-count:]
            if any(len(string) > count and string.startswith(tail) for string in self._stop):
                return count
        return 0
