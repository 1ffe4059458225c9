"""Jitted programs that stay compiled for as long as somebody holds them.

JAX finds what it has compiled in caches that all of a process share, and that hold a few thousand programs. One that
has fallen out is compiled again at its next call: for an engine beside a notebook's or a test suite's other work, in
the middle of serving. So what serves holds its programs itself. A call costs what one of the jitted function does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate

from widemesh.sharding.processes import meet


class Kept[R]:
    """A jitted program, compiled on its first call. Every later one takes arguments of the same forms.

    `has_collectives`: processes begin to run it for the first time together, when each has compiled it; all must call
    such programs first in the same order (see `processes`).

    Arguments of other shapes, dtypes or shardings raise TypeError or ValueError.
    """

    def __init__(self, program: Any, *, has_collectives: bool):
        self._program, self._has_collectives = program, has_collectives
        self._compiled: Callable[..., R] | None = None
        self.trace, self.lower = program.trace, program.lower

    def eval_shape(self, *args: Any) -> R:
        """Its result with `jax.ShapeDtypeStruct` for arrays, of arguments that may be such. Compiles nothing."""
        shapes: R = self._program.eval_shape(*args)
        return shapes

    def __call__(self, *args: Any) -> R:
        if self._compiled is None:
            compiled = self.lower(*args).compile()
            if self._has_collectives:
                meet()
            self._compiled = compiled
        return self._compiled(*args)


def once[T: Any, **P, R](make: Callable[Concatenate[T, P], R]) -> Callable[Concatenate[T, P], R]:
    """A method that answers the same arguments with the same object. Its owner has a dictionary `_made`."""

    @functools.wraps(make)
    def made(self: T, *args: P.args, **named: P.kwargs) -> R:
        key = (make.__name__, args, tuple(named.items()))
        if key not in self._made:
            self._made[key] = make(self, *args, **named)
        found: R = self._made[key]
        return found

    return made
