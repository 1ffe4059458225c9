"""What is known about a program after it was compiled ahead of time."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelFacts:
    """One compiled Mosaic kernel."""

    name: str
    arch: str  # such as "sm_90a"
    registers: int  # per thread
    spill_bytes: int  # stores and loads together
    smem_bytes: int  # per block: scratch and barriers
    tmem_columns: int
    instructions: Mapping[str, int]  # how often each of `ptx.INSTRUCTIONS` stands in the PTX


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calls:
    """How often a program calls the kernels of one name."""

    name: str
    count: int  # custom calls in the program
    runs: int  # with those in loops counted once per turn


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
    """All collectives of one kind in a program."""

    kind: str  # such as "all-gather"
    count: int  # instructions in the program
    runs: int  # with those in loops counted once per turn
    num_bytes: int  # of all runs, per device: the larger of operand and result


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """Bytes of one device, and of host memory that the program reaches."""

    argument_bytes: int
    output_bytes: int
    alias_bytes: int  # of the outputs, those that lie in donated arguments
    temp_bytes: int
    host_argument_bytes: int
    host_temp_bytes: int

    @property
    def total_bytes(self) -> int:
        """Device memory while the program runs."""
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temp_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiled:
    """A compiled program."""

    target: str
    seconds: float  # tracing, lowering and compiling
    kernels: tuple[KernelFacts, ...]  # each distinct one once
    calls: tuple[Calls, ...]  # of those kernels, by name
    collectives: tuple[Collective, ...]
    memory: MemoryUse
    hlo: str = dataclasses.field(repr=False)

    @property
    def spill_bytes(self) -> int:
        """Of all kernels."""
        return sum(kernel.spill_bytes for kernel in self.kernels)
