"""A process that is lost or told to stop while the model loads: the others say so, and end by themselves."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from widemesh.serving.job import LOSS_EXIT_S, LOST_STATUS

RANK = Path(__file__).parent / "loading_rank.py"
SLACK_S = 8.0  # of a loaded machine
SIZE = 2


@pytest.fixture
def loading(folder: Path, settings: dict[str, Any], new_port: Callable[[], int], tmp_path: Path
            ) -> Iterator[Callable[[str], list[tuple[subprocess.Popen[str], Path]]]]:  # fmt: skip
    """`loading(act)`: processes that are all at loading, as in loading_rank.py, each with the file that it logs to."""
    ranks: list[tuple[subprocess.Popen[str], Path]] = []

    def start(act: str) -> list[tuple[subprocess.Popen[str], Path]]:
        coordinator = f"127.0.0.1:{new_port()}"
        env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2", "PYTHONUNBUFFERED": "1"}
        for i in range(SIZE):
            log, args = tmp_path / f"rank{i}.log", [coordinator, str(SIZE), str(i), json.dumps(settings), act]
            with log.open("w") as file:
                ranks.append((subprocess.Popen([sys.executable, str(RANK), str(folder), *args], env=env, text=True,
                                               stdout=subprocess.PIPE, stderr=file), log))  # fmt: skip
        for process, log in ranks:
            assert process.stdout is not None
            assert "loading\n" in iter(process.stdout.readline, ""), log.read_text()[-3000:]
        return ranks

    yield start
    for process, _ in ranks:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.wait(10)


def test_the_loss_of_process_0_ends_the_other_with_70(loading) -> None:
    """JAX's coordinator is gone with it; its abort signal does not come first."""
    (first, _), (second, log) = loading("waits")
    first.kill()
    assert second.wait(LOSS_EXIT_S + SLACK_S) == LOST_STATUS
    said = log.read_text()
    assert "rank 0 is gone: its connection was closed; this process, rank 1, ends with status 70" in said
    assert "Terminating process" not in said and "Traceback" not in said


def test_a_signal_to_one_ends_both_in_order(loading) -> None:
    ranks = loading("stumbles")
    ranks[1][0].send_signal(signal.SIGTERM)
    assert [process.wait(LOSS_EXIT_S + SLACK_S) for process, _ in ranks] == [0, 0]
    reason = "rank 1 was told to stop while the model was loading"
    assert f"{reason}; this process, rank 0, ends with status 0" in ranks[0][1].read_text()
    assert not any("is gone" in log.read_text() or "Traceback" in log.read_text() for _, log in ranks)
