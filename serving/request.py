"""What a caller asks for and gets: sampling settings, deltas, and the one error type for a bad request."""

from __future__ import annotations

import dataclasses
import enum
import math
from typing import Any

import numpy as np

MAX_SEED = 2**31 - 1


class Status(enum.Enum):
    """Why a request was refused, in gRPC's words."""

    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    ALREADY_EXISTS = "ALREADY_EXISTS"
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

    temperature: float = 1.0  # below 1e-5: greedy
    top_p: float = 1.0  # smallest set of tokens whose probability reaches this; 1 = off
    top_k: int = 0  # 0 = off
    seed: int | None = None  # None: a fresh one for every request
    max_tokens: int | None = None  # None: up to the model's length limit
    stop_token_ids: tuple[int, ...] = ()  # ids that end the request; the one that did is part of the output
    ignore_eos: bool = False  # go on after the model's end-of-text ids

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and 0.0 <= self.temperature <= 100.0):
            raise RequestError("temperature", self.temperature, "must be between 0 and 100; use 0 for greedy decoding")
        if not (math.isfinite(self.top_p) and 0.0 < self.top_p <= 1.0):
            raise RequestError("top_p", self.top_p, "must be above 0 and at most 1; use 1 to switch it off")
        if not 0 <= self.top_k <= MAX_SEED:
            raise RequestError("top_k", self.top_k, "must be a positive count of tokens; use 0 to switch it off")
        if self.seed is not None and not -MAX_SEED - 1 <= self.seed <= MAX_SEED:
            raise RequestError("seed", self.seed, "must fit a signed 32-bit integer")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise RequestError("max_tokens", self.max_tokens, "must be at least 1, or left out for the model's limit")
        if any(i < 0 for i in self.stop_token_ids):
            raise RequestError("stop_token_ids", list(self.stop_token_ids), "must not hold negative token ids")

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken; the limit is vLLM's."""
        return self.temperature < 1e-5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Delta:
    """New tokens of one request. The last delta of a request has a finish_reason; it may hold no token."""

    request_id: str
    token_ids: np.ndarray  # int32 [n], only what is new
    finish_reason: FinishReason | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0  # so far, this delta included
    cached_tokens: int = 0
    matched_token_id: int | None = None  # the stop token that ended it; eos is one


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completion:
    """A finished request."""

    request_id: str
    token_ids: np.ndarray  # int32 [n]
    text: str
    finish_reason: FinishReason
    prompt_tokens: int
    cached_tokens: int = 0
    matched_token_id: int | None = None
