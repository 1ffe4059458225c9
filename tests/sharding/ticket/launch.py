"""Runs a function on several ranks, each a process of its own, and gathers what they return.

The processes are forked from one that has imported the ticket and no jax and lives as long as the tests, so that
dozens of them start in no time.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
_GIVE_UP_S = 60.0


def free_port() -> int:
    """A port that nothing listens at, below those that outgoing connections are given."""
    while True:
        port = random.SystemRandom().randrange(15000, 32000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def run(function: Callable[..., Any], size: int, **options: Any) -> list[Any]:
    """What `function(rank, size, address, **options)` returns on each rank; None for one that died or was stopped.

    Its module's `prepare(size, **options)`, if there is one, is called before the ranks are forked. A rank that raises
    fails the test.
    """
    task = {"module": function.__module__, "name": function.__name__, "size": size, "options": options}
    launcher = _launcher()
    assert launcher.stdin is not None and launcher.stdout is not None
    launcher.stdin.write(json.dumps(task) + "\n")
    launcher.stdin.flush()
    if not select.select([launcher.stdout], [], [], _GIVE_UP_S + 10)[0]:
        launcher.kill()
        raise TimeoutError("the launcher does not answer")
    results = json.loads(launcher.stdout.readline())
    traces = [result["traceback"] for result in results if isinstance(result, dict) and "traceback" in result]
    assert not traces, "\n".join(traces)
    return results


@functools.cache
def _launcher() -> subprocess.Popen[str]:
    """Ends when this process does, by the end of its standard input."""
    program = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from tests.sharding.ticket import launch; launch.main()"
    return subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )


def main() -> None:
    """The launching process: tasks on standard input, a line each; results by rank on standard output."""
    for line in sys.stdin:
        task = json.loads(line)
        module = importlib.import_module(task["module"])
        assert "jax" not in sys.modules
        if hasattr(module, "prepare"):
            module.prepare(task["size"], **task["options"])
        print(json.dumps(_run_ranks(getattr(module, task["name"]), task["size"], task["options"])), flush=True)


def _run_ranks(function: Callable[..., Any], size: int, options: dict[str, Any]) -> list[Any]:
    address, pipes, pids = f"127.0.0.1:{free_port()}", [], []
    for rank in range(size):
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                result = function(rank, size, address, **options)
            except BaseException:
                result = {"traceback": traceback.format_exc()}
            os.write(writer, json.dumps(result).encode())
            os._exit(0)
        os.close(writer)
        pipes.append(reader)
        pids.append(pid)
    _await(pids)
    said = []
    for reader in pipes:
        with os.fdopen(reader) as pipe:
            said.append(pipe.read())
    return [json.loads(text) if text else None for text in said]


def _await(pids: list[int]) -> None:
    """Until all are over; what is stopped while nothing else runs, or still runs when it is time, is killed."""
    left, stopped = set(pids), set()
    until_s = time.monotonic() + _GIVE_UP_S
    while left:
        for pid in list(left):
            found, status = os.waitpid(pid, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
            if found and os.WIFSTOPPED(status):
                stopped.add(pid)
            elif found and os.WIFCONTINUED(status):
                stopped.discard(pid)
            elif found:
                left.discard(pid)
        if stopped.issuperset(left) or time.monotonic() > until_s:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
