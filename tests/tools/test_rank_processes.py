"""Processes of one job: prefixed logs, one end that ends them all, and signals; with small scripts as ranks."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIMIT_S = 20

# Runs each of its arguments as a rank. The module imports nothing of the project, so it is loaded as a file: quickly.
RUNNER = f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location("rank_processes", {str(ROOT / "tools" / "rank_processes.py")!r})
module = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = module
spec.loader.exec_module(module)
python = [sys.executable, "-S", "-c"]
ranks = [module.Rank(command=[*python, text], env={{"I": str(i)}}) for i, text in enumerate(sys.argv[2:])]
sys.exit(module.run_ranks(ranks, stop_s=float(sys.argv[1]), say=lambda text: print("said:", text, flush=True)))
"""

SERVER = """
import os, signal, sys, time
def stop(*_):
    os.write(1, b"stopping\\n")
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
os.write(1, b"up\\n")
while True:
    time.sleep(0.05)  # a signal just before a long sleep would wait for its end
"""
STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
time.sleep(60)
"""


@pytest.fixture
def run() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """`run(script, ..., stop_s=...)` starts a job of these scripts."""
    started: list[subprocess.Popen[str]] = []

    def start(*scripts: str, stop_s: float = 10, runner: str = RUNNER) -> subprocess.Popen[str]:
        command = [sys.executable, "-S", "-c", runner, str(stop_s), *map(textwrap.dedent, scripts)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


def wait_for(process: subprocess.Popen[str], *lines: str) -> None:
    """Read the job's standard output until all these lines have come, in any order."""
    assert process.stdout is not None
    missing = set(lines)
    while missing:
        line = process.stdout.readline()
        assert line, f"ended without {missing}: {process.stderr and process.stderr.read()}"
        missing.discard(line.rstrip("\n"))


def end(process: subprocess.Popen[str]) -> tuple[int, list[str], list[str]]:
    out, err = process.communicate(timeout=LIMIT_S)
    return process.returncode, out.splitlines(), err.splitlines()


def test_each_line_has_its_rank_and_its_stream(run: Callable) -> None:
    script = """
        import os, sys
        print("a", os.environ["I"], flush=True)
        print("b", os.environ["I"], file=sys.stderr)
        sys.stdout.buffer.write(b"\\xff and no newline")
    """
    status, out, err = end(run(script))
    assert status == 0
    assert out == ["[rank 0] a 0", "[rank 0] \ufffd and no newline", "said: rank 0 has ended with status 0"]
    assert err == ["[rank 0] b 0"]


def test_one_that_fails_stops_the_others_and_gives_its_status(run: Callable, tmp_path: Path) -> None:
    go = tmp_path / "go"
    fails = f"""
        import os, sys, time
        while not os.path.exists({str(go)!r}):
            time.sleep(0.01)
        print("broken", file=sys.stderr)
        sys.exit(70)
    """
    process = run(SERVER, SERVER, fails)
    wait_for(process, "[rank 0] up", "[rank 1] up")
    go.touch()
    status, out, err = end(process)
    assert status == 70
    assert out[0] == "said: rank 2 has ended with status 70; stopping the others"
    assert sorted(out[1:]) == ["[rank 0] stopping", "[rank 1] stopping"]
    assert err == ["[rank 2] broken"]


def test_one_that_ends_stops_the_others(run: Callable) -> None:
    status, out, _ = end(run(SERVER, "import time; time.sleep(0.3)"))
    assert status == 0
    assert "said: rank 1 has ended with status 0; stopping the others" in out


def test_one_that_is_killed_is_named(run: Callable) -> None:
    killed = "import os, signal, time; time.sleep(0.3); os.kill(os.getpid(), signal.SIGKILL)"
    status, out, _ = end(run(SERVER, killed))
    assert status == 128 + signal.SIGKILL
    assert "said: rank 1 has ended with status 137; stopping the others" in out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_all(run: Callable, number: signal.Signals) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup themselves
    try:
        process = run(SERVER, SERVER)
    finally:
        signal.signal(signal.SIGHUP, before)
    wait_for(process, "[rank 0] up", "[rank 1] up")
    process.send_signal(number)
    status, out, err = end(process)
    assert (status, err) == (0, [])
    assert sorted(out) == ["[rank 0] stopping", "[rank 1] stopping"]


def test_a_signal_that_does_not_wake_the_main_thread_is_seen(run: Callable) -> None:
    """One that another thread gets is as one that comes just before the main thread waits."""
    get_it = ("import signal, threading, time; time.sleep(0.3); "
              "signal.pthread_kill(threading.get_ident(), signal.SIGTERM)")  # fmt: skip
    thread = f"import threading; threading.Thread(target=exec, args=({get_it!r}, {{}}), daemon=True).start()\n"
    process = run(SERVER, runner=thread + RUNNER)
    assert end(process) == (0, ["[rank 0] up", "[rank 0] stopping"], [])


def test_a_job_under_nohup_outlives_its_terminal(run: Callable) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        process = run(SERVER)
    finally:
        signal.signal(signal.SIGHUP, before)
    wait_for(process, "[rank 0] up")
    process.send_signal(signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.3)
    process.send_signal(signal.SIGTERM)
    assert end(process) == (0, ["[rank 0] stopping"], [])


def test_one_that_ignores_the_signal_is_killed(run: Callable) -> None:
    process = run(SERVER, STUBBORN, stop_s=0.3)
    wait_for(process, "[rank 0] up", "[rank 1] up")
    start_s = time.monotonic()
    process.send_signal(signal.SIGTERM)
    status, out, _ = end(process)
    assert status == 137 and time.monotonic() - start_s < 5
    assert "said: rank 1 did not stop within 0.3 s; killing it" in out


def test_an_error_while_stopping_is_the_jobs(run: Callable) -> None:
    fails = SERVER.replace("sys.exit(0)", "sys.exit(3)")
    process = run(SERVER, fails)
    wait_for(process, "[rank 0] up", "[rank 1] up")
    process.send_signal(signal.SIGTERM)
    status, out, _ = end(process)
    assert status == 3 and "said: rank 1 has ended with status 3" in out


def test_a_command_that_is_not_there_leaves_nothing_running() -> None:
    from widemesh.tools.rank_processes import Rank, run_ranks

    there = Rank(command=[sys.executable, "-S", "-c", STUBBORN], env={})
    start_s = time.monotonic()
    with pytest.raises(FileNotFoundError):
        run_ranks([there, Rank(command=["/no/such/program"], env={})], stop_s=30, say=print)
    assert time.monotonic() - start_s < 5
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
