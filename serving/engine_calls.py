"""Functions that other threads have the engine's thread run between two steps."""

from __future__ import annotations

import collections
import concurrent.futures
import threading
from collections.abc import Callable
from typing import Any


class EngineError(RuntimeError):
    """The engine is closed or has failed and cannot take requests."""

    def __init__(self, message: str = "the engine is closed or has failed; start a new one"):
        super().__init__(message)


class EngineCalls:
    """Those that wait to be run. `wake` makes the engine's thread look."""

    def __init__(self, wake: Callable[[], None]):
        self._wake = wake
        self._lock = threading.Lock()
        self._waiting: collections.deque[tuple[Callable[[], Any], concurrent.futures.Future[Any]]] = collections.deque()
        self._is_over = False

    @property
    def are_waiting(self) -> bool:
        """Whether there are any."""
        return bool(self._waiting)

    def ask[R](self, function: Callable[[], R]) -> R:
        """Have it run, and return what it returns or raise what it raises. EngineError if nobody runs it any more."""
        answer: concurrent.futures.Future[R] = concurrent.futures.Future()
        with self._lock:
            if self._is_over:
                raise EngineError
            self._waiting.append((function, answer))
        self._wake()
        return answer.result()

    def run(self) -> None:
        """On the engine's thread."""
        while self._waiting:
            function, answer = self._waiting.popleft()
            try:
                answer.set_result(function())
            except Exception as err:  # it is the caller's
                answer.set_exception(err)

    def end(self) -> None:
        """Refuse all that wait, and all that come."""
        with self._lock:
            self._is_over = True
            left = list(self._waiting)
            self._waiting.clear()
        for _, answer in left:
            answer.set_exception(EngineError())
