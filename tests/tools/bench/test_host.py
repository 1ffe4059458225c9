"""The host benchmark at a small size: what it prints, what it counts, and that its parts measure what they say."""

from __future__ import annotations

import json
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from widemesh.model.config import ConfigError
from widemesh.tools.bench.host import HostBench
from widemesh.tools.bench.host_device import TOKEN, HostEngine, StepClock
from widemesh.tools.bench.host_lists import ListAdmission
from widemesh.tools.bench.host_parts import PARTS, PartTimer
from widemesh.tools.cli import main

STEP_S = 0.002


@pytest.fixture(scope="module")
def clock() -> StepClock:
    return StepClock(STEP_S)


@pytest.fixture(scope="module")
def engine(clock, tmp_path_factory):
    """Four slots, whose requests get a page whenever their output fills one."""
    config = HostBench(slots=4, short_context=64, long_context=2000)._config(tmp_path_factory.mktemp("model"))
    with HostEngine(config, clock) as engine:
        yield engine


def test_the_last_line_is_the_figures(capsys):
    flags = {"slots": 4, "short-context": 200, "long-context": 3000, "steps": 20, "step-ms": 1, "prompts": 2}
    assert main(["bench", "host", *(str(x) for name, value in flags.items() for x in (f"--{name}", value))]) == 0
    table, _, last = capsys.readouterr().out.rstrip("\n").rpartition("\n")
    figures = json.loads(last)
    assert list(figures) == ["step_us_8k", "step_us_855k", "admit_ms", "admit_ms_lists", "frontend_ms", "dispatches",
                             "slots", "short_context", "long_context"]  # fmt: skip
    assert (figures["short_context"], figures["long_context"]) == (200, 3000)
    assert figures["slots"] == 4 and figures["dispatches"] == 1  # new pages travel with the step
    assert all(figures[name] > 0 for name in figures)
    for words in (*PARTS, "between steps", "3,000 tokens"):
        assert words in table


def test_requests_run_through_the_whole_engine(engine, clock):
    """Prefill, hand-over, decode and delivery; a request ends at its limit, with as many steps as tokens."""
    before = len(clock.marks)
    done = engine.generate([np.arange(3, 150, dtype=np.int32)] * 6, [_sampling(n) for n in (1, 70, 3, 9, 200, 64)])
    assert [one.token_ids.tolist() for one in done] == [[TOKEN] * n for n in (1, 70, 3, 9, 200, 64)]
    assert 200 <= len(clock.marks) - before <= 273  # six requests in four slots
    assert len(clock.chunk_cpu_ns) >= 1 and engine.num_running == 0


def test_steps_follow_each_other_on_the_device(engine, clock):
    before = len(clock.marks)
    engine.generate(np.arange(3, 80, dtype=np.int32), _sampling(40))
    marks = clock.marks[before:]
    assert marks[-1].wall_ns - marks[0].wall_ns >= 37 * STEP_S * 1e9  # two are in flight
    assert marks[-1].cpu_ns - marks[0].cpu_ns < marks[-1].wall_ns - marks[0].wall_ns
    assert clock.thread_id != threading.get_ident() and clock.thread_cpu_ns() >= marks[-1].cpu_ns


def test_parts_are_exclusive_and_leave_no_trace(engine, clock):
    timer = PartTimer(engine)
    with timer:
        engine.generate(np.arange(3, 80, dtype=np.int32), _sampling(20))
    assert timer.num_turns >= 20 and all(us > 0 for us in timer.us_per_turn().values())
    turns = timer.num_turns
    engine.generate(np.arange(3, 80, dtype=np.int32), _sampling(2))
    assert timer.num_turns == turns

    inner = SimpleNamespace(work=lambda: _spin(0.004))
    outer = SimpleNamespace(work=lambda: (_spin(0.002), inner.work()))
    timer = PartTimer(engine)
    inner.work, outer.work = timer._timed(inner.work, "settle"), timer._timed(outer.work, "rest")
    outer.work()
    assert timer.num_turns == 1
    assert timer.spent_ns["settle"] >= 4e6 and 2e6 <= timer.spent_ns["rest"] < timer.spent_ns["settle"] + 2e6


def test_lists_hold_what_a_prompt_needs_and_give_it_back():
    prompt = list(range(1000, 1700))
    lists = ListAdmission(page_size=64, max_len=1024, window=100)
    free = len(lists._free)
    for _ in range(3):
        assert lists.admit(prompt).tolist() == prompt
        assert len(lists._free) == free
    assert lists._hashes(prompt)[:5] == lists._hashes(prompt[:320]) and len(lists._hashes(prompt)) == 10
    full, window = lists._slot_tables
    assert np.count_nonzero(full[:11]) == 11 and np.unique(full[:11]).size == 11
    assert (window[:18] == 0).all() and (window[18:22] > 0).all()  # 600 // 32 pages are before the window


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"slots": 0}, "slots=0 must be at least 1; use 1 or more"),
        ({"short_context": 100}, "short_context=100 must be at least 128"),
        ({"long_context": 8192}, "long_context=8192 must be above short_context=8192"),
        ({"long_context": 1 << 20}, "long_context=1048576 must be at most 983040"),
        ({"steps": 50000}, "steps=50000 must be at most 32768; use 400"),
        ({"step_ms": 0}, "step_ms=0 must be between 1 and 1000; use 5"),
        ({"chunk_rows": 64}, "chunk_rows=64 must be at least 128; use 2048"),
    ],
)
def test_bad_settings_are_refused(fields, words):
    with pytest.raises(ConfigError, match=words.replace("(", r"\(")):
        HostBench(**fields)


def _sampling(max_tokens: int):
    from widemesh.serving.request import SamplingParams

    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def _spin(cpu_s: float) -> None:
    end_ns = time.thread_time_ns() + int(cpu_s * 1e9)
    while time.thread_time_ns() < end_ns:
        pass
