"""What a caller asks for and gets: sampling settings, deltas, and the one error type for a bad request."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from widemesh.serving.limits import MAX_LOGIT_BIASES, MAX_LOGPROBS, MAX_SAMPLES, MAX_STOP_IDS, MAX_STOP_STRINGS

MAX_SEED = 2**31 - 1
CONSTRAINTS = ("json_schema", "json_object", "regex", "grammar", "choice")  # at most one of them in a request


class Status(enum.Enum):
    """Why a request was refused, in gRPC's words."""

    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    ALREADY_EXISTS = "ALREADY_EXISTS"
    FAILED_PRECONDITION = "FAILED_PRECONDITION"
    ABORTED = "ABORTED"
    UNAVAILABLE = "UNAVAILABLE"
    UNIMPLEMENTED = "UNIMPLEMENTED"


class RequestError(ValueError):
    """A request that was refused before it reached the model. `str(err)` is one sentence: field, value, remedy."""

    def __init__(self, field: str, value: Any, remedy: str, status: Status = Status.INVALID_ARGUMENT):
        super().__init__(f"{field}={value!r} {remedy}")
        self.field, self.value, self.status = field, value, status


class FinishReason(enum.StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to pick the next token. Values outside their range raise RequestError at construction."""

    temperature: float = 1.0  # up to 100; below 1e-5: greedy
    top_p: float = 1.0  # smallest set of tokens whose probability reaches this; 1 = off
    top_k: int = 0  # 0 = off
    min_p: float = 0.0  # leaves out tokens less likely than this times the most likely one; 0 = off
    repetition_penalty: float = 1.0  # above 1: tokens of the prompt and the output become less likely
    frequency_penalty: float = 0.0  # taken off a token's logit for each time it was put out; -2 to 2
    presence_penalty: float = 0.0  # taken off the logit of every token that was put out; -2 to 2
    logit_bias: Mapping[int, float] | None = None  # added to the logits of these token ids (300 at most); -100 to 100
    n: int = 1  # samples per prompt, up to 128, more than one not if greedy; sample i uses seed + i
    seed: int | None = None  # None: a fresh one for every request
    max_tokens: int | None = None  # None: up to the model's length limit
    min_tokens: int = 0  # the output does not end by a stop token or string before it has this many
    stop: tuple[str, ...] = ()  # strings, 64 at most; the request ends where one first appears in its text
    stop_token_ids: tuple[int, ...] = ()  # ids (at most 64) that end it; the one that did is part of the output
    ignore_eos: bool = False  # go on after the model's end-of-text ids
    include_stop_str_in_output: bool = False  # show the stop string that ended the text
    skip_special_tokens: bool = True  # leave special tokens out of the text, and so out of the search for `stop`
    logprobs: int | None = None  # log-probabilities of the chosen token and of this many most likely, up to 20
    prompt_logprobs: int | None = None  # likewise of the prompt's tokens from the second on, with sample 0
    json_schema: str | None = None  # the output is JSON of this schema; at most one of this and the next four is set
    json_object: bool = False  # the output is a JSON object
    regex: str | None = None  # the output matches this from its first to its last character
    grammar: str | None = None  # the output follows this grammar, in Lark's notation
    choice: tuple[str, ...] = ()  # the output is one of these strings

    def __post_init__(self) -> None:
        _check_range("temperature", self.temperature, 0.0, 100.0, "use 0 for greedy decoding")
        if not (math.isfinite(self.top_p) and 0.0 < self.top_p <= 1.0):
            raise RequestError("top_p", self.top_p, "must be above 0 and at most 1; use 1 to switch it off")
        if not 0 <= self.top_k <= MAX_SEED:
            raise RequestError("top_k", self.top_k, "must be a positive count of tokens; use 0 to switch it off")
        _check_range("min_p", self.min_p, 0.0, 1.0, "use 0 to switch it off")
        self._check_penalties()
        self._check_counts()
        self._check_stops()
        self._check_constraint()

    def _check_penalties(self) -> None:
        if not (math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0.0):
            raise RequestError("repetition_penalty", self.repetition_penalty,
                               "must be above 0; use 1 to switch it off")
        _check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0, "use 0 to switch it off")
        _check_range("presence_penalty", self.presence_penalty, -2.0, 2.0, "use 0 to switch it off")
        biases = self.logit_bias or {}
        if len(biases) > MAX_LOGIT_BIASES:
            raise RequestError("logit_bias", f"{len(biases)} entries",
                               f"is more than the {MAX_LOGIT_BIASES} a request may have; send fewer")
        for token, bias in biases.items():
            if token < 0:
                raise RequestError("logit_bias", token, "must not hold negative token ids; use ids of the vocabulary")
            _check_range("logit_bias", bias, -100.0, 100.0, "use -100 to rule a token out")

    def _check_counts(self) -> None:
        if not 1 <= self.n <= MAX_SAMPLES:
            raise RequestError("n", self.n, f"must be from 1 to {MAX_SAMPLES}; send more requests for more samples")
        if self.n > 1 and self.is_greedy:
            raise RequestError("n", self.n, "would give the same greedy output each time; use 1 or a temperature")
        if self.seed is not None and not -MAX_SEED - 1 <= self.seed <= MAX_SEED:
            raise RequestError("seed", self.seed, "must fit a signed 32-bit integer")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise RequestError("max_tokens", self.max_tokens, "must be at least 1, or left out for the model's limit")
        if not 0 <= self.min_tokens <= MAX_SEED:
            raise RequestError("min_tokens", self.min_tokens, "must be a count of tokens; use 0 to switch it off")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError("min_tokens", self.min_tokens, f"must be at most max_tokens={self.max_tokens}")
        for field in ("logprobs", "prompt_logprobs"):
            count = getattr(self, field)
            if count is not None and not 0 <= count <= MAX_LOGPROBS:
                raise RequestError(field, count, f"must be from 0 to {MAX_LOGPROBS}, or left out to report none")

    def _check_stops(self) -> None:
        if any(i < 0 for i in self.stop_token_ids):
            raise RequestError("stop_token_ids", list(self.stop_token_ids), "must not hold negative token ids")
        if len(self.stop_token_ids) > MAX_STOP_IDS:
            raise RequestError("stop_token_ids", f"{len(self.stop_token_ids)} ids",
                               f"is more than the {MAX_STOP_IDS} a request may have; send fewer")
        if isinstance(self.stop, str):
            raise RequestError("stop", self.stop, "must be a list of strings; write ['...']")
        if len(self.stop) > MAX_STOP_STRINGS:
            raise RequestError("stop", f"{len(self.stop)} strings",
                               f"is more than the {MAX_STOP_STRINGS} a request may have; send fewer")
        if "" in self.stop:
            raise RequestError("stop", "", "must not be empty; leave it out")

    def _check_constraint(self) -> None:
        given = [name for name in CONSTRAINTS if getattr(self, name) not in (None, False, ())]
        if len(given) > 1:
            raise RequestError(given[1], getattr(self, given[1]), f"does not go with {given[0]}; use one of them")
        if isinstance(self.choice, str) or "" in self.choice:
            raise RequestError("choice", self.choice, "must be a list of strings that are not empty")

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken; the limit is vLLM's."""
        return self.temperature < 1e-5

    @property
    def has_penalty(self) -> bool:
        """Whether what was said before changes what comes next."""
        return (self.repetition_penalty, self.frequency_penalty, self.presence_penalty) != (1.0, 0.0, 0.0)

    @property
    def constraint(self) -> str | None:
        """Name of the field that constrains the output's form, if one does."""
        return next((name for name in CONSTRAINTS if getattr(self, name) not in (None, False, ())), None)


def _check_range(field: str, value: float, low: float, high: float, remedy: str) -> None:
    if not (math.isfinite(value) and low <= value <= high):
        raise RequestError(field, value, f"must be between {low:g} and {high:g}; {remedy}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenLogprobs:
    """Natural logarithms of the probabilities that the model itself gave, before any setting changed them."""

    chosen: np.ndarray  # float32 [n], of the tokens themselves
    ranks: np.ndarray  # int32 [n], of the tokens themselves; the most likely token has 1
    top_ids: np.ndarray  # int32 [n, k], the k most likely tokens, best first
    top: np.ndarray  # float32 [n, k]

    def __getitem__(self, part: slice) -> TokenLogprobs:
        return TokenLogprobs(chosen=self.chosen[part], ranks=self.ranks[part], top_ids=self.top_ids[part],
                             top=self.top[part])

    @staticmethod
    def join(parts: list[TokenLogprobs]) -> TokenLogprobs | None:
        """One after the other; None if there are none."""
        if not parts:
            return None
        names = [field.name for field in dataclasses.fields(TokenLogprobs)]
        return TokenLogprobs(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Delta:
    """New tokens of one request. The last delta of a sample has a finish_reason; it may hold no token."""

    request_id: str
    token_ids: np.ndarray  # int32 [n], only what is new
    index: int = 0  # which of the request's samples
    finish_reason: FinishReason | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0  # of this sample so far, this delta included
    cached_tokens: int = 0
    matched_token_id: int | None = None  # the stop token that ended it; eos is one
    matched_stop: str | None = None  # the stop string that ended it
    logprobs: TokenLogprobs | None = None  # of token_ids, if asked for
    prompt_logprobs: TokenLogprobs | None = None  # of prompt tokens 1, 2, ...; in the first delta, if asked for
    weights_version: int = 0  # how many times the weights had been updated

    @property
    def shown_ids(self) -> np.ndarray:
        """`token_ids` without the stop token that ended the sample, which is no part of its text."""
        return self.token_ids if self.matched_token_id is None else self.token_ids[:-1]

    @staticmethod
    def join(deltas: list[Delta]) -> Delta:
        """All deltas of one sample as if they had come at once."""
        return dataclasses.replace(
            deltas[-1],
            token_ids=np.concatenate([delta.token_ids for delta in deltas]),
            logprobs=TokenLogprobs.join([delta.logprobs for delta in deltas if delta.logprobs is not None]),
            prompt_logprobs=next((d.prompt_logprobs for d in deltas if d.prompt_logprobs is not None), None),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completion:
    """A finished sample."""

    request_id: str
    token_ids: np.ndarray  # int32 [n]
    text: str
    finish_reason: FinishReason
    prompt_tokens: int
    index: int = 0  # which of the request's samples
    cached_tokens: int = 0
    matched_token_id: int | None = None
    matched_stop: str | None = None
    logprobs: TokenLogprobs | None = None  # of token_ids, if asked for
    prompt_logprobs: TokenLogprobs | None = None  # of prompt tokens 1, 2, ...; in sample 0, if asked for
    weights_version: int = 0  # how many times the weights had been updated
