"""Where a prefill restarts, and the lengths of chunks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from widemesh.model.config import ConfigError
from widemesh.serving.scheduling import ReplayConfig, ReplayRule
from widemesh.serving.scheduling.replay import next_chunk


def rule(prefix: str = "bounded", tail: str = "bounded", **model: int) -> ReplayRule:
    return ReplayRule(config=ReplayConfig(prefix=prefix, tail=tail), **{"window": 128, "num_layers": 40,
                                                                         "max_ratio": 2, **model})  # fmt: skip


@pytest.mark.parametrize(("hit", "start", "write_from"), [(0, 0, 0), (64, 0, 0), (128, 0, 0), (192, 64, 192),
                                                          (6400, 6272, 6400)])  # fmt: skip
def test_bounded_runs_one_window_again(hit: int, start: int, write_from: int) -> None:
    assert rule().restart(hit) == (start, write_from)


@pytest.mark.parametrize(("hit", "start"), [(64, 0), (128, 0), (5056, 0), (5120, 38), (6400, 1318)])
def test_exact_runs_all_that_the_last_layer_sees(hit: int, start: int) -> None:
    # 128 + 39 * 127 = 5081 rows; an odd start is lowered so that no pair is split.
    assert rule("exact").restart(hit) == (start, hit)


@pytest.mark.parametrize("prefix", ["bounded", "exact"])
@given(hit=st.integers(0, 200), window=st.integers(1, 9), layers=st.integers(1, 5), ratio=st.sampled_from([1, 2, 4]))
def test_a_start_splits_no_compressed_entry(prefix: str, hit: int, window: int, layers: int, ratio: int) -> None:
    start, write_from = rule(prefix, window=window, num_layers=layers, max_ratio=ratio).restart(hit)
    assert start % ratio == 0 and 0 <= start <= write_from <= hit
    assert write_from in (0, hit) and (start == 0 or hit - start >= window)


@given(rows=st.integers(1, 300), most=st.integers(1, 64), window=st.integers(1, 64), tail=st.booleans())
def test_chunks_cover_all_rows_and_the_last_holds_the_tail(rows: int, most: int, window: int, tail: bool) -> None:
    most = max(most, window)
    shortest = rule(tail="bounded" if tail else "full", window=window).shortest_last_chunk(rows)
    left, lengths = rows, []
    while left:
        lengths.append(next_chunk(left, most, shortest))
        assert 1 <= lengths[-1] <= most
        left -= lengths[-1]
    assert sum(lengths) == rows and lengths[-1] >= min(shortest, rows)
    assert len(lengths) <= -(-rows // most) + 1
    assert all(length == most for length in lengths[:-2])


def test_a_chunk_waits_when_the_rows_left_of_a_step_are_too_few() -> None:
    assert next_chunk(6, 3, 4) == 2
    assert next_chunk(4, 3, 4) == 0
    assert next_chunk(9, 0, 4) == 0


@pytest.mark.parametrize("field", ["prefix", "tail"])
def test_unknown_kinds_are_refused(field: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{field}='some' is no kind of replay; use"):
        ReplayConfig(**{field: "some"})
