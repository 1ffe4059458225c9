"""Settings that cannot be run are refused in one sentence."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from widemesh.model.config import ConfigError
from widemesh.serving.scheduling import ReplayConfig, ReplayRule, Scheduler, SchedulerConfig


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"page_size": 0}, "page_size=0 must be at least 1; use 1 or more"),
        ({"reserve_output_tokens": 0}, "reserve_output_tokens=0 must be at least 1; use 1 or more"),
        ({"max_new_kv_loads_per_step": -1}, "max_new_kv_loads_per_step=-1 must not be negative; use 0 or more"),
        ({"max_num_queued_reqs": -2}, "max_num_queued_reqs=-2 must not be negative; use 0 or more"),
        ({"decode_pages": 1}, "decode_pages=1 must be at least 2, because page 0 is never given out; use 2 or more"),
        ({"max_model_len": 1}, "max_model_len=1 must be at least 2: a prompt token and an output"),
        ({"max_num_seqs": 6, "decode_ranks": 4}, "max_num_seqs=6 must be a multiple of decode_ranks=4; use 8"),
        ({"max_num_batched_tokens": 1, "prefill_ranks": 2}, "max_num_batched_tokens=1 must be at least prefill_ranks"),
    ],
)
def test_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SchedulerConfig(**settings)
    assert str(caught.value).startswith(message)


def test_longest_request_has_a_pool_to_itself() -> None:
    config = SchedulerConfig(page_size=4, max_model_len=100, prefill_pages=9, decode_pages=11, decode_rows=3)
    # The decode pool holds 40 rows, with drafts and without: none is run at or behind the last token.
    assert config.longest_request == min(100, 8 * 4 + 1, 10 * 4 + 1)
    assert dataclasses.replace(config, prefill_pages=99).longest_request == 41
    assert SchedulerConfig(max_model_len=50).longest_request == 50


def test_chunks_must_hold_a_tail_and_pages_whole_entries() -> None:
    config = SchedulerConfig(max_num_batched_tokens=200, prefill_ranks=2)
    model = {"window": 128, "num_layers": 4, "max_ratio": 2}
    with pytest.raises(ConfigError, match="max_num_batched_tokens=200 must be at least 256, a window for each of 2"):
        Scheduler(config, ReplayRule(**model))
    Scheduler(config, ReplayRule(config=ReplayConfig(tail="full"), **model))
    with pytest.raises(ConfigError, match="page_size=64 must be a multiple of 3"):
        Scheduler(SchedulerConfig(), ReplayRule(window=8, num_layers=4, max_ratio=3))
