"""A request inside the engine: what the scheduler keeps of it, how it samples, and where its tokens go."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
from jaxtyping import Int32, UInt8

from widemesh.serving.decode_state import JoinRow
from widemesh.serving.mailbox import Mailbox
from widemesh.serving.metrics import RequestTrace
from widemesh.serving.prompt_scores import PromptScores
from widemesh.serving.request import Delta, SamplingParams
from widemesh.serving.scheduling import ScheduledRequest
from widemesh.serving.structured import Constraint


@dataclasses.dataclass(eq=False, kw_only=True)
class Request(ScheduledRequest):
    """One sample of a caller's request."""

    prompt: Int32[np.ndarray, "N"]
    page_hashes: UInt8[np.ndarray, "P 16"]
    sampling: SamplingParams
    seed: int
    stop_token_ids: frozenset[int]  # eos ids included unless they are ignored
    deliver: Callable[[Delta], None]  # called by the reader of its mailbox
    mailbox: Mailbox
    constraint: Constraint | None = None  # what its output must look like
    prompt_scores: PromptScores | None = None  # None: nobody asked for the prompt's log-probabilities
    trace: RequestTrace = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.trace = RequestTrace(prompt_tokens=len(self.prompt))

    @property
    def slot(self) -> int:
        """Its decode slot."""
        return self.decode_slot

    def join_row(self, history_len: int) -> JoinRow:
        """Its newest token's row runs next; the last token that it may have is never computed."""
        position = self.num_tokens - 1
        return JoinRow(
            token=self.output[-1] if self.output else int(self.prompt[-1]),
            position=position,
            last=self.most_tokens - 1,
            tail=self.recent(position, history_len),
            stop_token_ids=self.stop_token_ids,
        )
