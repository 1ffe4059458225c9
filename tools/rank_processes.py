"""The processes of one job on one machine: started together, each log line under its rank, stopped together."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, TextIO

_LAST_LINES_S = 1.0  # for the log of a process that has ended, whose pipe a child of its own may hold open
_LOOK_S = 0.2  # Python handles a signal that comes just before its main thread waits when the waiting is over
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # the last one: the terminal has gone


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rank:
    """What to run as one rank, in which environment."""

    command: Sequence[str]
    env: Mapping[str, str]


def run_ranks(
    ranks: Sequence[Rank], *, stop_s: float, say: Callable[[str], None], end_sentence: re.Pattern[str] | None = None
) -> int:
    """Run a job's processes until all have ended; blocks, and handles signals, so call it from the main thread.

    SIGINT, SIGTERM, SIGHUP (not if it was ignored before, as by nohup) and the end of any one of them stop them all:
    each gets SIGTERM and, `stop_s` later, is killed. Returns 0 if they were told to stop and did, else the status
    of the first that ended with another one, where 128 + a signal's number stands for a signal. `say` gets a sentence
    on every end that was not asked for. Raises OSError if one cannot be started; those that were are killed.

    `end_sentence` finds in a process's log what it says of the job's end, with a group `reason`. Several processes end
    at about the same time then, and who is first says little, so the first reason that any has logged is told.
    """
    job = _Job(end_sentence)
    with job.signals():
        try:
            for rank, wanted in enumerate(ranks):
                job.start(rank, wanted)
            return job.supervise(stop_s, say)
        finally:
            job.kill()


class _Job:
    """Running processes by rank; a queue tells the main thread of their ends and, as None, of a signal."""

    def __init__(self, end_sentence: re.Pattern[str] | None) -> None:
        self._end_sentence, self._reason = end_sentence, ""
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._events: queue.SimpleQueue[tuple[int, int] | None] = queue.SimpleQueue()
        self._print = threading.Lock()

    def start(self, rank: int, wanted: Rank) -> None:
        # In a process group of its own, so that a terminal's Ctrl-C reaches it through us alone.
        process = subprocess.Popen(
            wanted.command, env=dict(wanted.env), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, process_group=0,
        )  # fmt: skip
        self._running[rank] = process
        pipes = ((process.stdout, sys.stdout), (process.stderr, sys.stderr))
        pumps = [threading.Thread(target=self._pump, args=(rank, *pipe), daemon=True) for pipe in pipes]
        for pump in pumps:
            pump.start()
        threading.Thread(target=self._wait, args=(rank, process, pumps), daemon=True).start()

    def supervise(self, stop_s: float, say_aloud: Callable[[str], None]) -> int:
        def say(sentence: str) -> None:
            with self._print:  # not between a process's line and its end
                say_aloud(sentence)

        first = self._next(math.inf)
        failures: list[int] = []
        if first is not None:
            rank, status = self._ended(first)
            what = f"rank {rank} has ended with status {status}"
            if status and self._reason:
                what = f"the job has ended with status {status}: {self._reason}"
            say(what + ("; stopping the others" if self._running else ""))
            failures += [status] if status else []
        for process in self._running.values():
            process.terminate()
        deadline_s = time.monotonic() + stop_s
        while self._running:
            try:
                event = self._next(deadline_s)
            except queue.Empty:
                say(f"rank {', '.join(map(str, self._running))} did not stop within {stop_s:g} s; killing it")
                for process in self._running.values():
                    process.kill()
                deadline_s = math.inf
                continue
            if event is None:  # another signal changes nothing
                continue
            rank, status = self._ended(event)
            if status not in (0, 128 + signal.SIGTERM):  # the latter: it had not come as far as to handle it
                say(f"rank {rank} has ended with status {status}")
                failures.append(status)
        return failures[0] if failures else 0

    def kill(self) -> None:
        """End what is left, whatever has gone wrong here."""
        for process in self._running.values():
            process.kill()
            process.wait()

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """Turn signals into events for as long as the context lasts."""
        is_nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        numbers = [number for number in _SIGNALS if not (is_nohup and number == signal.SIGHUP)]
        before = {number: signal.signal(number, lambda *_: self._events.put(None)) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _next(self, deadline_s: float) -> tuple[int, int] | None:
        """The next event. Raises queue.Empty at the deadline."""
        while True:
            left_s = deadline_s - time.monotonic()
            try:
                return self._events.get(timeout=max(0.0, min(left_s, _LOOK_S)))
            except queue.Empty:
                if left_s <= _LOOK_S:
                    raise

    def _ended(self, event: tuple[int, int]) -> tuple[int, int]:
        rank, status = event
        del self._running[rank]
        return rank, status if status >= 0 else 128 - status

    def _wait(self, rank: int, process: subprocess.Popen[bytes], pumps: Sequence[threading.Thread]) -> None:
        status = process.wait()
        for pump in pumps:
            pump.join(_LAST_LINES_S)
        self._events.put((rank, status))

    def _pump(self, rank: int, source: IO[bytes], target: TextIO) -> None:
        for line in source:
            text = line.decode(errors="replace").rstrip("\r\n")
            if not self._reason and self._end_sentence and (found := self._end_sentence.search(text)):
                self._reason = found["reason"]
            with self._print, contextlib.suppress(OSError, ValueError):  # nobody reads any more; the job goes on
                print(f"[rank {rank}] {text}", file=target, flush=True)
