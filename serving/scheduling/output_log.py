"""Accepted tokens by step, until somebody asks for the tokens of one slot."""

from __future__ import annotations

import numpy as np
from jaxtyping import Int, Int32

_STEPS = 64  # kept at most


class OutputLog:
    """A step's tokens are written down at once for all slots, and read slot by slot every so often.

    So the cost of a step does not grow with its requests by a list operation each.
    """

    def __init__(self, slots: int, rows: int):
        self._steps: list[tuple[Int32[np.ndarray, "slots rows"], Int[np.ndarray, "slots"]]] = []
        self._tokens = np.zeros((0, slots, rows), np.int32)  # of the first steps
        self._counts = np.zeros((0, slots, 1), np.int64)
        self._row = np.arange(rows)
        self._read = np.zeros(slots, np.int64)  # steps that each slot has been read to

    @property
    def is_full(self) -> bool:
        """Whether every slot must be read and `clear` called before the next step."""
        return len(self._steps) == _STEPS

    def add(self, tokens: Int32[np.ndarray, "slots rows"], counts: Int[np.ndarray, "slots"]) -> None:
        """Write down a step; of each slot the first `counts` tokens. The arrays are kept as they are."""
        self._steps.append((tokens, counts))

    def skip(self, slot: int) -> None:
        """What was written down so far is not of this slot's next owner."""
        self._read[slot] = len(self._steps)

    def read(self, slot: int) -> list[int]:
        """A slot's tokens since they were read last."""
        first, end = int(self._read[slot]), len(self._steps)
        if first == end:
            return []
        self._read[slot] = end
        if len(self._tokens) < end:
            tokens, counts = zip(*self._steps, strict=True)
            self._tokens, self._counts = np.stack(tokens), np.stack(counts)[..., None]
        found: list[int] = self._tokens[first:end, slot][self._row < self._counts[first:end, slot]].tolist()
        return found

    def clear(self) -> None:
        """Start over. Everything has been read."""
        self._read[:] = 0
        self._steps = []
        self._tokens, self._counts = self._tokens[:0], self._counts[:0]
