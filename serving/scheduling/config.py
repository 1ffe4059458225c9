"""Sizes and limits of the scheduler."""

from __future__ import annotations

import dataclasses

from widemesh.model.config import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """How many ranks, slots and pages there are, and how they are given out. Wrong values raise ConfigError.

    The pools of one mesh are all of one size. A pool's page 0 is the null page, so it holds one page less.
    """

    page_size: int = 64  # tokens
    max_model_len: int = 1024  # most tokens of a request, prompt and output together
    prefill_ranks: int = 1
    prefill_slots_per_rank: int = 1  # requests prefilled together on one rank
    prefill_pages: int = 256  # pages of each prefill rank's pool, the null page included
    max_num_batched_tokens: int = 256  # rows of one prefill step, over all prefill ranks
    decode_ranks: int = 1
    max_num_seqs: int = 8  # decode slots, over all decode ranks
    decode_pages: int = 256  # pages of each decode rank's pool, the null page included
    decode_rows: int = 1  # rows of a request in one decode step: the newest token and its drafts
    reserve_output_tokens: int = 8192  # most output tokens for which decode pages are set aside at admission
    max_new_kv_loads_per_step: int = 4  # prefilled requests that may join the decode batch in one step; 0 = all
    max_num_queued_reqs: int | None = None  # waiting requests beyond which new ones are refused
    max_num_queued_tokens: int | None = None  # their tokens, likewise
    max_overtakes: int = 64  # times that a request which does not fit may be overtaken before a rank is kept for it

    def __post_init__(self) -> None:
        for name in ("page_size", "prefill_ranks", "prefill_slots_per_rank", "max_num_batched_tokens", "decode_ranks",
                     "max_num_seqs", "decode_rows", "reserve_output_tokens"):  # fmt: skip
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1; use 1 or more")
        for name in ("max_new_kv_loads_per_step", "max_overtakes", "max_num_queued_reqs", "max_num_queued_tokens"):
            if (getattr(self, name) or 0) < 0:
                raise ConfigError(f"{name}={getattr(self, name)} must not be negative; use 0 or more")
        for name in ("prefill_pages", "decode_pages"):
            if getattr(self, name) < 2:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 2, because page 0 is never given "
                                  "out; use 2 or more")  # fmt: skip
        if self.max_model_len < 2:
            raise ConfigError(f"max_model_len={self.max_model_len} must be at least 2: a prompt token and an output")
        if self.max_num_seqs % self.decode_ranks:
            raise ConfigError(f"max_num_seqs={self.max_num_seqs} must be a multiple of decode_ranks="
                              f"{self.decode_ranks}; use {-(-self.max_num_seqs // self.decode_ranks) * self.decode_ranks}")  # fmt: skip # noqa: E501
        if self.max_num_batched_tokens < self.prefill_ranks:
            raise ConfigError(f"max_num_batched_tokens={self.max_num_batched_tokens} must be at least "
                              f"prefill_ranks={self.prefill_ranks}; use one row a rank or more")  # fmt: skip

    @property
    def slots_per_rank(self) -> int:
        """Decode slots of one rank. Slot s lies on rank s // slots_per_rank."""
        return self.max_num_seqs // self.decode_ranks

    @property
    def rows_per_rank(self) -> int:
        """Rows of one prefill rank in a step, shared by its slots."""
        return self.max_num_batched_tokens // self.prefill_ranks

    @property
    def longest_request(self) -> int:
        """Most tokens, prompt and output, of a request that has a prefill pool and a decode pool to itself."""
        prefill = (self.prefill_pages - 1) * self.page_size + 1
        # The last output token is never computed, and no draft that stands at or behind it is run.
        decode = (self.decode_pages - 1) * self.page_size + 1
        return min(self.max_model_len, prefill, decode)

    @property
    def pages_per_slot(self) -> int:
        """Width of a page table: pages of the longest request, and of the positions that its last drafts stand at."""
        return self.pages_of(self.max_model_len + self.decode_rows)

    def pages_of(self, tokens: int) -> int:
        """Pages that hold so many tokens."""
        return -(-tokens // self.page_size)
