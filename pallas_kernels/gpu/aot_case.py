"""One kernel call at one shape, to be compiled ahead of time: what `KERNELS` in an op's `aot.py` lists."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from widemesh.pallas_kernels.gpu.targets import TARGETS

WGMMA = "wgmma.mma_async"
TCGEN05 = "tcgen05.mma"


@dataclasses.dataclass(frozen=True, kw_only=True)
class AotCase:
    """A call of one op that must compile for every target in `targets`.

    `function(*args)` runs with a topology's device as the default one, so that `choose` takes the kernel there; give
    `implementation="mosaic"` all the same. `args` are trees of `jax.ShapeDtypeStruct` without shardings. `mma` names,
    by architecture ("sm_90a", "sm_100a", "sm_103a"), the tensor-core instruction that must appear in the PTX of at
    least one kernel of the call; an architecture that is missing needs none, and one with "sm_100a" alone holds for
    "sm_103a" too.
    """

    name: str  # of the case: unique within the op, such as "decode"
    op: str  # name of the op folder
    shape: str  # the shape in words or numbers, for the table
    function: Callable[..., Any]
    args: tuple[Any, ...]
    floor_bytes: float  # the least that must cross HBM: each input that is needed once, each output once
    floor_flops: float
    moved_bytes: float  # what the kernel moves through HBM, by arithmetic over its tiling
    mma: Mapping[str, str | None] = dataclasses.field(default_factory=dict)
    targets: tuple[str, ...] = tuple(TARGETS)

    def __post_init__(self) -> None:
        unknown = [target for target in self.targets if target not in TARGETS]
        if unknown:
            raise ValueError(f"target={unknown[0]!r} must be one of {', '.join(TARGETS)}")
        if self.moved_bytes < self.floor_bytes:
            raise ValueError(f"moved_bytes={self.moved_bytes} is less than floor_bytes={self.floor_bytes}: count again")

    def instruction(self, arch: str) -> str | None:
        """The tensor-core instruction that must appear for `arch`, None if none must."""
        if arch == "sm_103a" and arch not in self.mma:
            arch = "sm_100a"
        return self.mma.get(arch)
