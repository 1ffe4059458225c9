"""Planning in a process of its own, so that a plan of many milliseconds never holds the engine's interpreter lock."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from jaxtyping import Int32, Num

import widemesh
from widemesh.eplb.config import EplbConfig
from widemesh.eplb.layout import ExpertLayout
from widemesh.eplb.plan import Plan
from widemesh.eplb.plan_messages import PlannerError, decode_answer, encode_question, read_message, write_message

__all__ = ["ChildPlanner", "Planner", "PlannerError"]

_COMMAND = (sys.executable, "-P", "-m", "widemesh.eplb.plan_worker")  # -P: no module of the current folder
_END_S = 1.0  # for an idle child to end when its input is closed
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


class Planner(Protocol):
    """Makes one plan at a time, beside its caller. No method waits for it."""

    def start(self, load: Num[np.ndarray, "L E"], current: Int32[np.ndarray, "L X"]) -> None:
        """Begin a plan; one that is under way is given up."""

    def poll(self) -> Plan | None:
        """The plan, once; None while there is none. Raises PlannerError if there will be none."""

    def cancel(self) -> None:
        """Give the plan under way up, if there is one."""

    def close(self) -> None:
        """End for good."""


class ChildPlanner:
    """A planner in a child process, which lives from the first plan on until it fails or is closed.

    A child that dies, raises or has no plan after `deadline_s` costs that plan; the next one gets a fresh child.
    `on_answer` is called on a thread of the planner's when there is something to poll. The child starts a fresh
    interpreter, so a script that uses it needs no guard around its main part, and ends when this process does.
    """

    def __init__(self, layout: ExpertLayout, config: EplbConfig, *, deadline_s: float = 30.0,
                 on_answer: Callable[[], None] = lambda: None, command: Sequence[str] = _COMMAND):  # fmt: skip
        self._layout, self._config = layout, config
        self._deadline_s, self._on_answer, self._command = deadline_s, on_answer, command
        self._child: _Child | None = None
        self._question: _Question | None = None

    @property
    def pid(self) -> int:
        """Of the child; 0 if there is none."""
        return self._child.pid if self._child is not None else 0

    def start(self, load: Num[np.ndarray, "L E"], current: Int32[np.ndarray, "L X"]) -> None:
        """Begin a plan. The arrays are not to be written until there is an answer."""
        self.cancel()
        if self._child is None:
            self._child = _Child(self._command)
        self._question = _Question(self._child, lambda: encode_question(load, current, self._layout, self._config))
        self._question.ask(self._on_answer)

    def poll(self) -> Plan | None:
        """The plan, once; None while there is none. Raises PlannerError, after which there is nothing under way."""
        question = self._question
        if question is None:
            return None
        if not question.is_over.is_set():
            if time.monotonic() - question.start_s <= self._deadline_s:
                return None
            self.cancel()
            raise PlannerError(f"the planner had no plan after {self._deadline_s:g} s")
        self._question = None
        if question.failure is not None:
            self._drop_child()
            raise PlannerError(question.failure)
        return question.plan

    def cancel(self) -> None:
        """Give the plan under way up, and with it its child: a late answer would be taken for the next one."""
        if self._question is not None:
            self._question = None
            self._drop_child()

    def close(self) -> None:
        """End the child; waits a second for an idle one at the most."""
        self.cancel()
        if self._child is not None:
            self._child.end()
            self._child = None

    def _drop_child(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child = None


class _Question:
    """One plan under way, on a thread: a child may be slow to start, to read and to answer."""

    def __init__(self, child: _Child, content: Callable[[], bytes]):
        self._child, self._content = child, content
        self.start_s = time.monotonic()
        self.is_over = threading.Event()
        self.plan: Plan | None = None
        self.failure: str | None = None

    def ask(self, on_answer: Callable[[], None]) -> None:
        threading.Thread(target=self._ask, args=(on_answer,), name="widemesh-planner", daemon=True).start()

    def _ask(self, on_answer: Callable[[], None]) -> None:
        try:
            self.plan = decode_answer(self._child.ask(self._content()))
        except Exception as err:  # all of it is one failure to the planner's user
            self.failure = str(err) if isinstance(err, PlannerError) else f"{type(err).__name__}: {err}"
        self.is_over.set()
        on_answer()


class _Child:
    """The process. `ask` blocks; `kill` may be called meanwhile, from another thread."""

    def __init__(self, command: Sequence[str]):
        self._command = command
        self._lock = threading.Lock()  # between starting and killing
        self._process: subprocess.Popen[bytes] | None = None
        self._is_killed = False

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    def ask(self, content: bytes) -> bytes:
        process = self._started()
        assert process.stdin is not None and process.stdout is not None
        answer = None
        with contextlib.suppress(OSError, ValueError):  # the pipe is closed; the status says more
            write_message(process.stdin, content)
            answer = read_message(process.stdout)
        if answer is None:
            process.kill()
            raise PlannerError(f"the planner's process has ended: {_said(_reap(process))}")
        return answer

    def kill(self) -> None:
        """End it at once. Nobody waits for it, but what remains of it is taken away."""
        with self._lock:
            self._is_killed = True
            if self._process is not None:
                self._process.kill()
                threading.Thread(target=_reap, args=(self._process,), daemon=True).start()

    def end(self) -> None:
        """End it while it is idle."""
        if self._process is None:
            return
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        self._process.kill()
        _reap(self._process)

    def _started(self) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._is_killed:
                raise PlannerError("the planner's process was given up")
            if self._process is None:
                root = str(Path(str(widemesh.__file__)).parent.parent)
                path = os.pathsep.join(x for x in (root, os.environ.get("PYTHONPATH")) if x)
                # In a process group of its own, so that a terminal's Ctrl-C reaches it through us alone.
                self._process = subprocess.Popen(
                    self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0,
                    env={**os.environ, **_ONE_THREAD, "PYTHONPATH": path},
                )  # fmt: skip
            return self._process


def _reap(process: subprocess.Popen[bytes]) -> int:
    """Wait for a process that ends, and close its pipes. Returns its status."""
    status = process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):  # what could not be written any more
                pipe.close()
    return status


def _said(status: int) -> str:
    if status >= 0:
        return f"status {status}"
    return f"signal {-status} ({signal.strsignal(-status)})"
