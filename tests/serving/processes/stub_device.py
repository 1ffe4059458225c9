"""A device for the engine's loop that computes nothing and notes every call, as the devices of all processes would
have to take part in it: name and sizes, not whose arguments they are."""

from __future__ import annotations

import collections
from types import SimpleNamespace
from typing import Any

import numpy as np

from widemesh.serving.config import EngineConfig
from widemesh.serving.device import DecodeResult
from widemesh.serving.programs import ENDED
from widemesh.serving.step_needs import PrefillSize

VOCAB = 64
HAND_OVERS = (1, 2, 4, 8, 16)  # sizes in pages


class StubDevice:
    """Every slot draws its own position until its request's last one."""

    def __init__(self, config: EngineConfig):
        self.config = config
        self.calls: list[tuple[Any, ...]] = []
        self.kinds: collections.Counter[str] = collections.Counter()  # calls that had work of this process
        self.model_config = SimpleNamespace(vocab_size=VOCAB)
        self.engram_hash = SimpleNamespace(history_len=2)
        slots = config.max_num_seqs
        self.prefill = SimpleNamespace(
            ranks=config.prefill_ranks, parameters=0, most_writes=lambda writes: self._most(writes, 1)
        )
        self.decode = SimpleNamespace(parameters=0)
        self._position, self._last = np.zeros(slots, np.int32), np.zeros(slots, np.int32)

    def _note(self, name: str, has_work: bool, *sizes: Any) -> None:
        self.calls.append((name, *sizes))
        self.kinds[name] += has_work

    def _most(self, writes: Any, slots_per_rank: int) -> int:
        return int(np.bincount(writes.slots // slots_per_rank).max()) if len(writes) else 0

    def load_size(self, load: Any) -> int:
        return next(size for size in HAND_OVERS if size >= len(load.source_pages))

    def load(self, load: Any, size: int) -> None:
        assert load is None or len(load.source_pages) <= size
        self._note("load", load is not None, size)

    def prefill_pages(self, writes: Any, most: int) -> None:
        assert self._most(writes, 1) <= most
        self._note("prefill pages", len(writes) > 0, most)

    def prefill_size(self, work: list[Any]) -> PrefillSize:
        plain = [row for row in work if row and row.targets is None]
        scored = [row for row in work if row and row.targets is not None]
        return PrefillSize(
            rows=max((len(row.token_ids) for row in plain), default=0), has_tail=any(row.is_last for row in plain),
            scored_rows=max((len(row.token_ids) for row in scored), default=0),
        )  # fmt: skip

    def prefill_step(self, work: list[Any], size: PrefillSize) -> Any:
        mine = self.prefill_size(work)
        assert mine.rows <= size.rows and mine.has_tail <= size.has_tail and mine.scored_rows <= size.scored_rows
        self._note("prefill", any(work), size)
        return SimpleNamespace(is_done=lambda: True, wait=lambda: None, scores=lambda: None)

    def separate_writes(self, writes: Any, *, is_decoding: bool) -> int:
        most = self._most(writes, self.config.slots_per_rank)
        return 0 if is_decoding and most <= self.config.slots_per_rank else most

    def decode_pages(self, writes: Any, most: int) -> None:
        self._note("decode pages", len(writes) > 0, most)

    def join(self, slot: int, row: Any) -> None:
        self._note("join", slot >= 0)
        if slot >= 0:
            self._position[slot], self._last[slot] = row.position, row.last

    def set_tally(self, row: Any) -> None:
        self._note("tally", row is not None)

    def decode_step(self, rows: Any, pages: Any, sampling: Any, mask: Any, records: tuple[int, ...] = ()) -> Any:
        self._note("decode", rows is not None)
        runs = np.zeros(self.config.max_num_seqs, np.int32) if rows is None else rows.copy()
        runs[self._position >= self._last] = 0
        self._position += runs
        tokens = (self._position % (VOCAB - 1)).astype(np.int32)[:, None]
        end = np.where((runs > 0) & (self._position >= self._last), ENDED, 0).astype(np.int32)
        result = DecodeResult(tokens=tokens, tried=np.zeros_like(runs), count=runs, end=end, logprobs=None)
        return SimpleNamespace(wait=lambda: result, dispatched_s=0.0)
