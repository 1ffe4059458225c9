"""The caller's side of one request: it knows the request's samples, cuts them at stop strings and sees them end."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from tokenizers import Tokenizer

from widemesh.serving.request import Completion, Delta, FinishReason, SamplingParams
from widemesh.serving.stop_strings import StopText


@dataclasses.dataclass(eq=False, kw_only=True)
class _Sample:
    deltas: list[Delta] = dataclasses.field(default_factory=list)
    text: StopText | None = None  # None: nobody looks for stop strings
    is_done: bool = False


class Samples:
    """Takes the deltas of a request as the engine makes them. For one thread at a time.

    `end` ends the sample of an index in the engine; it is called when a stop string was found, which the engine
    does not look for. Only if `keeps_deltas` can completions be made in the end.
    """

    def __init__(
        self,
        request_id: str,
        tokenizer: Tokenizer,
        sampling: SamplingParams,
        end: Callable[[int], None],
        *,
        keeps_deltas: bool,
    ):
        self.request_id = request_id
        self._tokenizer, self._sampling, self._end = tokenizer, sampling, end
        self._keeps_deltas = keeps_deltas
        self._samples = [
            _Sample(text=StopText(tokenizer, sampling) if sampling.stop else None) for _ in range(sampling.n)
        ]

    @property
    def is_done(self) -> bool:
        """Whether every sample has ended."""
        return all(sample.is_done for sample in self._samples)

    def take(self, delta: Delta) -> Delta | None:
        """The delta as the caller may see it; None if its sample has ended already."""
        sample = self._samples[delta.index]
        if sample.is_done:
            return None
        if sample.text is not None:
            delta = self._cut(delta, sample.text)
        sample.is_done = delta.finish_reason is not None
        if self._keeps_deltas:
            sample.deltas.append(delta)
        return delta

    def completions(self) -> list[Completion]:
        """All samples in order of their index. Call when done."""
        return [self._completion(sample) for sample in self._samples]

    def _cut(self, delta: Delta, text: StopText) -> Delta:
        """Look for stop strings in the delta's text; end the sample behind the token that completes one."""
        used = text.feed(delta.shown_ids.tolist())
        if text.matched is None and delta.finish_reason is not None:
            text.flush()
            used = len(delta.token_ids)
        if text.matched is None:
            return delta
        if delta.finish_reason is None:
            self._end(delta.index)
        return dataclasses.replace(
            delta,
            token_ids=delta.token_ids[:used],
            logprobs=None if delta.logprobs is None else delta.logprobs[:used],
            completion_tokens=delta.completion_tokens - len(delta.token_ids) + used,
            finish_reason=FinishReason.STOP,
            matched_token_id=None,
            matched_stop=text.matched,
        )

    def _completion(self, sample: _Sample) -> Completion:
        whole = Delta.join(sample.deltas)
        assert whole.finish_reason is not None
        text = sample.text
        if text is None:
            text = StopText(self._tokenizer, self._sampling)
            text.feed(whole.shown_ids.tolist())
            text.flush()
        return Completion(
            request_id=self.request_id,
            token_ids=whole.token_ids,
            text=text.text,
            finish_reason=whole.finish_reason,
            prompt_tokens=whole.prompt_tokens,
            index=whole.index,
            cached_tokens=whole.cached_tokens,
            matched_token_id=whole.matched_token_id,
            matched_stop=whole.matched_stop,
            logprobs=whole.logprobs,
            prompt_logprobs=whole.prompt_logprobs,
            weights_version=whole.weights_version,
        )
