"""One call of one op with inputs of its own: what is compared with the reference, and timed if it has a floor."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from jaxtyping import Array

from widemesh.pallas_kernels.gpu.aot_case import AotCase


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """How far one output is from the reference's."""

    name: str
    error: float  # of the whole output; NaN where either side holds one
    worst: float  # of the worst row
    tolerance: float
    worst_tolerance: float

    @property
    def is_ok(self) -> bool:
        """Both errors within their tolerance; a NaN is not."""
        return self.error <= self.tolerance and self.worst <= self.worst_tolerance


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """`call(implementation, *build(key))` must be what `compare` accepts, for every key.

    `build` can be traced: it draws everything on the device. `compare(args, found, wanted)` gives one outcome per
    output.
    """

    op: str
    name: str
    build: Callable[[Array], tuple[Any, ...]]
    call: Callable[..., Any]
    compare: Callable[[tuple[Any, ...], Any, Any], tuple[Outcome, ...]]
    floor: AotCase | None = None  # the same call of the op's `aot.py`: floors, and the shapes `build` must give
    is_tiny: bool = False  # small enough for the interpreter
    shared: tuple[int, ...] = ()  # arguments too large to draw anew for every set of inputs, such as a page pool
    carried: int = 0  # so many first arguments are replaced by so many first results: updated in place
