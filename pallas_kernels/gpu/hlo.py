"""Reading a compiled program: its collectives with their bytes, and its calls of Mosaic kernels.

The text of an optimised HLO module is a list of computations, each a list of instructions; a loop names its body and
how often it turns, so that what stands in a body is counted once per turn. A loop whose turns the compiler does not
know counts once, and so does every branch of a conditional.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping

from widemesh.pallas_kernels.gpu.facts import Calls, Collective

COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)

_COMPUTATION = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(
    r"^\s+(?:ROOT )?%?(?P<name>[\w.\-]+) = (?P<type>\(.*?\)|\S+) (?P<op>[a-z][a-z0-9\-]*)\((?P<rest>.*)$"
)
_SHAPE = re.compile(r"\b([a-z]+\d*(?:e\d+m\d+\w*)?)\[([\d,]*)\]")
_CALLED = re.compile(r"\b(?:body|condition|calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"\b(?:branch_computations|called_computations)=\{([^}]*)\}")
_TURNS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_OPERAND = re.compile(r"%([\w.\-]+)")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_KERNEL_HASH = re.compile(r'kernel_hash = ("(?:[^"\\]|\\.)*")')


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Instruction:
    name: str
    type: str
    op: str
    rest: str  # operands and attributes

    @property
    def num_bytes(self) -> int:
        return type_bytes(self.type)

    def called(self) -> Iterator[str]:
        """Names of the computations that it runs."""
        if self.is_kernel:  # holds the kernel's code, megabytes in a large program
            return
        yield from _CALLED.findall(self.rest)
        for names in _BRANCHES.findall(self.rest):
            yield from _OPERAND.findall(names)

    @property
    def turns(self) -> int:
        """How often it runs what it calls."""
        found = _TURNS.search(self.rest) if self.op == "while" else None
        return int(found[1]) if found else 1

    @property
    def is_kernel(self) -> bool:
        return self.op == "custom-call" and 'custom_call_target="mosaic_gpu' in self.rest

    @property
    def kernel_name(self) -> str:
        """The name that the kernel was given: the last scope around the call."""
        found = _OP_NAME.search(self.rest)
        scopes = found[1].split("/") if found else []
        return scopes[-2] if len(scopes) > 1 else "unknown"


class Program:
    """An optimised HLO module."""

    def __init__(self, text: str) -> None:
        self._computations: dict[str, list[_Instruction]] = {}
        self._entry = ""
        current: list[_Instruction] = []
        for line in text.splitlines():
            if computation := _COMPUTATION.match(line):
                current = self._computations.setdefault(computation["name"], [])
                if computation["entry"]:
                    self._entry = computation["name"]
            elif instruction := _INSTRUCTION.match(line):
                current.append(_Instruction(**instruction.groupdict()))

    @functools.cached_property
    def runs(self) -> Mapping[str, int]:
        """How often each computation runs."""
        callers: dict[str, list[tuple[str, int]]] = collections.defaultdict(list)
        for name, instructions in self._computations.items():
            for instruction in instructions:
                for called in instruction.called():
                    callers[called].append((name, instruction.turns))

        @functools.cache
        def of(name: str) -> int:
            if name == self._entry:
                return 1
            return sum(of(caller) * turns for caller, turns in callers[name])

        return {name: of(name) for name in self._computations}

    def calls(self) -> tuple[Calls, ...]:
        """Calls of Mosaic kernels, by kernel name."""
        count: dict[str, int] = collections.Counter()
        runs: dict[str, int] = collections.Counter()
        for computation, instruction in self._instructions():
            if instruction.is_kernel:
                count[instruction.kernel_name] += 1
                runs[instruction.kernel_name] += self.runs[computation]
        return tuple(Calls(name=name, count=count[name], runs=runs[name]) for name in sorted(count))

    def kernel_hashes(self) -> dict[str, list[str]]:
        """The distinct kernels behind each kernel name."""
        hashes: dict[str, list[str]] = {}
        for _, instruction in self._instructions():
            if instruction.is_kernel and (found := _KERNEL_HASH.search(instruction.rest)):
                of_name = hashes.setdefault(instruction.kernel_name, [])
                if found[1] not in of_name:
                    of_name.append(found[1])
        return hashes

    def collectives(self) -> tuple[Collective, ...]:
        """Collectives by kind. An asynchronous pair counts once."""
        sizes = {instruction.name: instruction.num_bytes for _, instruction in self._instructions()}
        found: dict[str, list[int]] = {}
        for computation, instruction in self._instructions():
            kind = instruction.op.removesuffix("-start")
            if kind not in COLLECTIVES:
                continue
            operands = _OPERAND.findall(instruction.rest.split("), ")[0])
            operand_bytes = sum(sizes.get(operand, 0) for operand in operands)
            result_bytes = instruction.num_bytes
            if instruction.op == "all-gather-start":
                result_bytes -= operand_bytes  # its type holds the operands too
            elif kind == "collective-permute":
                result_bytes = operand_bytes  # the type of its start holds the operands and the start's own state too
            runs = self.runs[computation]
            entry = found.setdefault(kind, [0, 0, 0])
            entry[0] += 1
            entry[1] += runs
            entry[2] += runs * max(operand_bytes, result_bytes)
        return tuple(
            Collective(kind=kind, count=count, runs=runs, num_bytes=num_bytes)
            for kind, (count, runs, num_bytes) in sorted(found.items())
        )

    def _instructions(self) -> Iterator[tuple[str, _Instruction]]:
        for name, instructions in self._computations.items():
            for instruction in instructions:
                yield name, instruction


def type_bytes(type_text: str) -> int:
    """Bytes of an array or of all arrays of a tuple, such as "bf16[64,512]{1,0}"."""
    total = 0
    for dtype, dims in _SHAPE.findall(type_text):
        total += math.ceil(_bits(dtype) * math.prod(int(dim) for dim in dims.split(",") if dim) / 8)
    return total


def _bits(dtype: str) -> int:
    """Bits of an element: the number in the name of its type."""
    if dtype == "pred":
        return 8
    found = re.search(r"\d+", dtype)
    return int(found[0]) if found else 0
