"""Host side of the sampling settings: which request each slot's row belongs to, and the rows that a step takes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import jax
import numpy as np
from jaxtyping import Int32

from widemesh.serving.request import SamplingParams
from widemesh.serving.sampling.rows import SamplingRows
from widemesh.serving.sampling.tally import TallyRow


class Sampler(Protocol):
    """What this file reads of a request. Two are equal only if they are the same object."""

    prompt: Int32[np.ndarray, "N"]
    sampling: SamplingParams
    seed: int
    stop_token_ids: frozenset[int]

    @property
    def output(self) -> list[int]: ...


class SlotSettings:
    """Rows of all slots. They are rewritten only for slots whose request has changed since the last step."""

    def __init__(self, slots: int, vocab: int):
        self._vocab = vocab
        self._neutral = SamplingRows.neutral(1)
        self._rows = SamplingRows.neutral(slots)
        self._owner: list[tuple[int, Sampler] | None] = [None] * slots

    def sync(self, running: Iterable[tuple[int, int, Sampler]]) -> tuple[SamplingRows, list[TallyRow]]:
        """Rows for a step of these requests, and the tallies to write before it.

        Of each request its slot, a number that changes when it leaves the slot and comes back, and itself. Pass all
        that hold a slot, also those that sit this step out: one that is missing is written anew later. The rows are
        the same object as last time if nothing has changed; their arrays are never written again.
        """
        owner: list[tuple[int, Sampler] | None] = [None] * len(self._owner)
        for slot, stay, request in running:
            owner[slot] = stay, request
        changed = [slot for slot, (now, then) in enumerate(zip(owner, self._owner, strict=True)) if now != then]
        if not changed:
            return self._rows, []
        self._owner = owner
        rows: SamplingRows = jax.tree.map(np.copy, self._rows)
        tallies: list[TallyRow] = []
        for slot in changed:
            _, holder = owner[slot] or (0, None)
            for array, off in zip(jax.tree.leaves(rows), jax.tree.leaves(self._neutral), strict=True):
                array[slot] = off[0]
            if holder is not None:
                _write_row(rows, slot, holder)
                if holder.sampling.has_penalty:
                    tallies.append(TallyRow.of(slot, holder.prompt, holder.output, self._vocab))
        self._rows = rows
        return rows, tallies


def _write_row(rows: Any, slot: int, request: Sampler) -> None:
    """Set a neutral row of host arrays to a request's settings."""
    sampling = request.sampling
    rows.temperature[slot] = 0.0 if sampling.is_greedy else sampling.temperature
    rows.top_k[slot], rows.top_p[slot], rows.min_p[slot] = sampling.top_k, sampling.top_p, sampling.min_p
    rows.seed[slot] = request.seed & 0xFFFFFFFF
    rows.repetition_penalty[slot] = sampling.repetition_penalty
    rows.frequency_penalty[slot] = sampling.frequency_penalty
    rows.presence_penalty[slot] = sampling.presence_penalty
    for place, (token, bias) in enumerate((sampling.logit_bias or {}).items()):
        rows.bias_ids[slot, place], rows.bias_values[slot, place] = token, bias
    stops = sorted(request.stop_token_ids) if sampling.min_tokens else []
    rows.stop_ids[slot, : len(stops)] = stops
    rows.first_stop[slot] = len(request.prompt) + sampling.min_tokens if stops else 0
    rows.logprobs[slot] = -1 if sampling.logprobs is None else sampling.logprobs
