"""Processes that come to a program at different times run it for the first time together."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

RANK = Path(__file__).parent / "meeting_rank.py"
LIMIT_S = 90  # for two processes to start on a loaded machine


def test_nobody_runs_a_program_before_all_have_compiled_it(new_port: Callable[[], int]) -> None:
    coordinator = f"127.0.0.1:{new_port()}"
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    ranks = [
        subprocess.Popen([sys.executable, str(RANK), coordinator, str(i)], env=env, text=True,
                         stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for i in range(2)
    ]  # fmt: skip
    try:
        ends = [rank.communicate(timeout=LIMIT_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], [err[-3000:] for _, err in ends]
    lines = [line.split(" ", 1) for out, _ in ends for line in out.splitlines()]  # gloo writes there too
    seen = [json.loads(text) for word, text in (line for line in lines if len(line) == 2) if word == "seen"]
    (first_compiled, first_ran, _), (last_compiled, last_ran, _) = seen
    assert last_compiled - first_compiled > 1.0  # rank 1 is late
    assert min(first_ran, last_ran) > last_compiled
    assert [compiles for *_, compiles in seen] == [1, 1]  # of two calls
