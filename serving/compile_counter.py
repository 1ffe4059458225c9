"""How many programs were compiled, and how many of them when all should have been compiled already."""

from __future__ import annotations

import threading
from typing import Any

import jax

# Recorded by JAX once per program that it hands to XLA or loads from the persistent cache.
_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


class CompileCounter:
    """Counts the programs that this process compiles, or loads from the persistent cache, from construction on.

    A call of a program that is there already counts nothing. `close` stops counting; the numbers stay.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # any thread may compile
        self._total = 0
        self._at_warm: int | None = None
        self._is_closed = False
        jax.monitoring.register_event_duration_secs_listener(self._hear)

    @property
    def total(self) -> int:
        """Programs since construction."""
        return self._total

    @property
    def after_warm_up(self) -> int:
        """Programs since `mark_warm`; 0 before it."""
        return 0 if self._at_warm is None else self._total - self._at_warm

    def mark_warm(self) -> None:
        """Warm-up is over: programs count as late from here on."""
        self._at_warm = self._total

    def close(self) -> None:
        """Stop counting. May be called twice."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        jax.monitoring.unregister_event_duration_listener(self._hear)

    def _hear(self, event: str, duration_secs: float, **_: Any) -> None:
        if event == _COMPILE_EVENT:
            with self._lock:
                self._total += 1
