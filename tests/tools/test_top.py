"""`widemesh top`: a table of servers that answer and of one that does not, and its JSON."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console

from widemesh.serving.compile_counter import CompileCounter
from widemesh.serving.metrics import EngineMetrics, PageCounts
from widemesh.serving.metrics_endpoint import MetricsEndpoint
from widemesh.tools.cli import main
from widemesh.tools.scrape import Row
from widemesh.tools.top import table_of


class Server:
    """A metrics page of an engine that makes eight tokens every 10 ms, its second rank mostly last."""

    def __init__(self, rank: int):
        compiles = cast(CompileCounter, SimpleNamespace(after_warm_up=0))
        self._metrics = EngineMetrics(model_name="tiny", max_model_len=100, compiles=compiles, rank=rank)
        self._metrics.cache(pages={"decode": PageCounts(used=1, cached=1, free=2)}, prefix_queries=0, prefix_hits=0,
                            preemptions=0)  # fmt: skip
        self._page = MetricsEndpoint()
        self._page.add(self._metrics)
        self.address = f"127.0.0.1:{self._page.start(0)}"
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def _work(self) -> None:
        steps = 0
        while not self._stop.wait(0.01):
            steps += 1
            self._metrics.agreed(0.0005, 0 if steps % 4 == 0 else 1)
            self._metrics.balancedness("draft", 0.5, None)
            self._metrics.balancedness("target", 0.94, 0.99)
            self._metrics.dispatched(0.0002)
            self._metrics.device_step(0.009)
            self._metrics.generated(8)
            self._metrics.step(running=8, waiting=3, prompt_rows=0, step_s=0.01)

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._page.close()


@pytest.fixture
def servers() -> Iterator[list[Server]]:
    started = [Server(rank) for rank in range(2)]
    yield started
    for server in started:
        server.close()


def test_once_prints_a_table_and_json(servers: list[Server], capsys: pytest.CaptureFixture[str],
                                      monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.setenv("COLUMNS", "160")
    addresses = [*(server.address for server in servers), "127.0.0.1:1"]
    assert main(["top", *addresses, "--once", "--interval-s", "0.3"]) == 0
    *table, last = capsys.readouterr().out.splitlines()
    found = json.loads(last)
    assert found["interval_s"] == 0.3
    first, second, absent = found["servers"]
    assert [row["address"] for row in found["servers"]] == addresses
    assert (first["engine"], second["engine"]) == ("0", "1")
    for row in (first, second):
        assert row["error"] is None and (row["running"], row["waiting"], row["kv_usage"]) == (8, 3, 0.25)
        assert row["generated_tokens_per_s"] == pytest.approx(8 * row["steps_per_s"], rel=0.5)
        assert row["step_s"] == pytest.approx(0.01) and row["ticket_wait_s"] == pytest.approx(0.0005)
        assert row["dispatch_s"] == pytest.approx(0.0002) and row["device_step_s"] == pytest.approx(0.009)
        assert row["balancedness"] == {"draft": 0.5, "target": 0.94}
        assert row["last_rank"] == 1 and 0.5 < row["last_rank_share"] <= 1
    assert absent == dict.fromkeys(absent) | {"address": "127.0.0.1:1", "error": absent["error"]}
    lines = "\n".join(table)
    for words in (*addresses, "10.0", "0.50", "0.20", "9.00", "25%", "94%/50%", "all 2",
                  "no answer (Connection refused)"):  # fmt: skip
        assert words in lines, lines


def test_a_table_of_nothing_known() -> None:
    console = Console(width=160, record=True, file=open(os.devnull, "w"))  # noqa: SIM115 - closed with the console
    idle = Row(address="a:1", model="m", engine="0", running=0, waiting=0, kv_usage=0.0)
    rows = [idle, Row(address="b:1", error="no")]
    console.print(table_of(rows))
    text = console.export_text()
    assert "a:1" in text and "b:1" in text and "all" not in text and "even" not in text


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        ([], "addresses=() names no server; use `widemesh top 127.0.0.1:9090`"),
        (["here:x"], "address='here:x' cannot be read"),
        (["here:1", "--interval-s", "0"], "interval_s=0 must be above 0 and at most 3600; use 2"),
    ],
)
def test_mistakes_are_one_sentence(args: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", *args]) == 2
    assert capsys.readouterr().err.startswith(f"widemesh: {sentence}")


def test_the_live_table_follows_until_ctrl_c(servers: list[Server]) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "widemesh.tools.cli", "top", servers[0].address, "--interval-s", "0.05"]
    environment: dict[str, Any] = {**os.environ, "TERM": "xterm", "COLUMNS": "160"}
    process = subprocess.Popen(command, stdout=theirs, stderr=subprocess.PIPE, env=environment)
    try:
        os.close(theirs)
        shown, limit_s = b"", time.monotonic() + 20
        while shown.count(b"10.0") < 2 and time.monotonic() < limit_s:  # the step's time, in two tables
            shown += os.read(ours, 65536)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=10)
        assert process.returncode == 0 and err == b""
        assert shown.count(b"10.0") >= 2
    finally:
        process.kill()
        process.wait()
        os.close(ours)
