"""Processor time of the parts of a turn of the engine's loop, each without the parts inside it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from widemesh.serving.engine import Engine

PARTS = ("plan", "dispatch", "settle", "deliver", "metrics", "rest")


class PartTimer:
    """Wraps the methods that make up a turn while it is entered. The clock's own cost is in what it measures."""

    def __init__(self, engine: Engine):
        loop = engine._loop
        self._methods: list[tuple[Any, str, str]] = [
            (loop, "_turn", "rest"),
            (loop._scheduler, "plan_step", "plan"),
            (loop, "_dispatch", "dispatch"),
            (loop, "_settle", "settle"),
            (loop, "_send", "deliver"),
            (loop, "_report", "metrics"),
            (loop._metrics, "generated", "metrics"),
        ]
        self._inside_ns = [0]  # by the methods under way: time of the parts inside them
        self.num_turns = 0
        self.spent_ns = dict.fromkeys(PARTS, 0)

    def __enter__(self) -> PartTimer:
        for owner, name, part in self._methods:
            setattr(owner, name, self._timed(getattr(owner, name), part))
        return self

    def __exit__(self, *_: object) -> None:
        for owner, name, _part in self._methods:
            delattr(owner, name)  # the class's method shows again

    def us_per_turn(self) -> dict[str, float]:
        """Mean over the turns since it was entered, by part."""
        return {part: ns / 1e3 / max(1, self.num_turns) for part, ns in self.spent_ns.items()}

    def _timed(self, method: Callable[..., Any], part: str) -> Callable[..., Any]:
        def run(*args: Any, **named: Any) -> Any:
            start_ns = time.thread_time_ns()
            self._inside_ns.append(0)
            try:
                return method(*args, **named)
            finally:
                took_ns = time.thread_time_ns() - start_ns
                self.spent_ns[part] += took_ns - self._inside_ns.pop()
                self._inside_ns[-1] += took_ns
                self.num_turns += part == "rest"

        return run
