"""One process per op, a few at once: what hangs is killed, what crashes is reported, the other cases go on."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any

Report = Callable[[dict[str, Any]], None]

START_AGAIN = 3  # the exit status of a worker that asks for it, see worker.py
WORKER = (sys.executable, "-m", "widemesh.tools.gpu_check.worker")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """When to stop. Deadlines are times of `time.monotonic`."""

    deadline: float
    silence_s: float  # the longest that one case may take
    start_s: float = 60.0  # the longest until a process says its first word: importing jax, starting the device


def run_ops(
    ops: Sequence[str], arguments: Sequence[str], report: Report, *, limits: Limits, at_once: int,
    environment: Mapping[str, str], worker: Sequence[str] = WORKER,
) -> None:  # fmt: skip
    """Runs `worker *arguments --op OP` for every op and hands each case's record to `report`, one at a time.

    A record has op, case and status: what the worker found, or "crashed", "timeout", or "skipped" when there was no
    time left. A case that crashes or hangs ends its process; a new one goes on with the cases behind it.
    """
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    for op in ops:
        waiting.put(op)
    lock = threading.Lock()

    def told(record: dict[str, Any]) -> None:
        with lock:
            report(record)

    def serve() -> None:
        while True:
            try:
                op = waiting.get_nowait()
            except queue.Empty:
                return
            _run_op(op, [*worker, *arguments, "--op", op], told, limits, environment)

    threads = [threading.Thread(target=serve) for _ in range(at_once)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _run_op(op: str, command: Sequence[str], report: Report, limits: Limits, environment: Mapping[str, str]) -> None:
    done: list[str] = []
    names: list[str] | None = None
    while True:
        if time.monotonic() >= limits.deadline:
            break
        current, is_fresh = None, True
        skip = [argument for name in done for argument in ("--done", name)]
        for event in follow([*command, *skip], limits, environment):
            kind = event.pop("event")
            if kind == "cases":
                names = names or event["names"]
            elif kind == "begin":
                current = event["case"]
            elif kind == "result":
                done.append(event["case"])
                report({"op": op, **event})
                current, is_fresh = None, False
            elif kind == "end" and event["status"] in ("crashed", "timeout"):
                culprit = current or next((name for name in names or () if name not in done), None)
                report({"op": op, "case": culprit or "*", **event})
                if culprit is None:
                    return
                done.append(culprit)
                is_fresh = False
            elif kind == "end" and event["status"] == "done":
                return
        if is_fresh:  # out of time, or a worker that asks to be started again and did nothing
            break
    left = [name for name in names or ("*",) if name not in done]
    for name in left:
        report({"op": op, "case": name, "status": "skipped", "message": "no time was left"})


def follow(command: Sequence[str], limits: Limits, environment: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """The events that a process prints, and last how it ended: {"event": "end", "status": ..., "message": ...}.

    The status is "done", "again", "crashed", "timeout", or "late" when the deadline came. The process and all that
    it started are gone afterwards.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env={**environment},
                                   start_new_session=True)  # fmt: skip
        assert process.stdout is not None
        lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=_read, args=(process.stdout, lines), daemon=True).start()
        try:
            yield from _events(lines, limits)
            status, message = _ending(process.wait(timeout=limits.silence_s))
        except _Late as late:
            status, message = late.status, late.message
        except subprocess.TimeoutExpired:
            status, message = "timeout", "the process did not end"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if status == "crashed":
            errors.seek(0)
            message = f"{message}: {errors.read()[-500:].strip()}"
        yield {"event": "end", "status": status, "message": message}


class _Late(Exception):
    """A process takes too long."""

    def __init__(self, status: str, message: str) -> None:
        super().__init__(status)
        self.status, self.message = status, message


def _events(lines: queue.SimpleQueue[str | None], limits: Limits) -> Iterator[dict[str, Any]]:
    """Until the process closes its output. Raises _Late."""
    patience = limits.start_s
    while True:
        left = limits.deadline - time.monotonic()
        try:
            line = lines.get(timeout=max(min(patience, left), 0.01))
        except queue.Empty:
            if left < patience:
                raise _Late("late", "") from None
            raise _Late("timeout", f"nothing came for {patience:g} s") from None
        if line is None:
            return
        with contextlib.suppress(ValueError):  # a line that a library printed
            event = json.loads(line)
            if isinstance(event, dict) and "event" in event:
                patience = limits.silence_s
                yield event


def _ending(code: int) -> tuple[str, str]:
    if code == 0:
        return "done", ""
    if code == START_AGAIN:
        return "again", ""
    return "crashed", f"signal {-code}" if code < 0 else f"exit status {code}"


def _read(stream: IO[str], lines: queue.SimpleQueue[str | None]) -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)
