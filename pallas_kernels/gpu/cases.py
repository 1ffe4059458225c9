"""Finding what the op folders offer: the cases to compile, and the declared swaps."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator, Sequence

import widemesh.pallas_kernels as room
from widemesh.pallas_kernels.gpu.aot_case import AotCase
from widemesh.pallas_kernels.gpu.interpret import Swap, swaps


def find_cases(ops: Sequence[str] | None = None) -> tuple[list[AotCase], dict[str, str]]:
    """The cases of all ops, or of those named, and for an op whose `aot.py` fails to import, why.

    A name is an op's, or one case's as "op/case". Raises ValueError for one that is not there.
    """
    known = tuple(_ops_with("aot"))
    cases: list[AotCase] = []
    broken: dict[str, str] = {}
    for name in ops or known:
        op, _, only = name.partition("/")
        if op not in known:
            raise ValueError(f"op={op!r} must be one of {', '.join(known) or 'none yet'}")
        try:
            of_op = importlib.import_module(f"{room.__name__}.{op}.aot").KERNELS
        except Exception as error:  # one op that does not import must not hide the others
            broken[op] = f"{type(error).__name__}: {error}"
            continue
        chosen = [case for case in of_op if not only or case.name == only]
        if not chosen:
            raise ValueError(f"op={name!r} names no case; the cases are {', '.join(case.name for case in of_op)}")
        cases.extend(chosen)
    return cases, broken


def declared_swaps() -> tuple[Swap, ...]:
    """All swaps of all ops; imports every module that holds kernels."""
    for op in _ops():
        for module in _modules(op):
            if module.startswith("mosaic"):
                importlib.import_module(f"{room.__name__}.{op}.{module}")
    return swaps()


def _ops() -> Iterator[str]:
    """Names of the op folders."""
    for module in pkgutil.iter_modules(room.__path__):
        if module.ispkg and module.name != "gpu":
            yield module.name


def _ops_with(module: str) -> Iterator[str]:
    return (op for op in _ops() if module in _modules(op))


def _modules(op: str) -> list[str]:
    package = importlib.import_module(f"{room.__name__}.{op}")
    return [module.name for module in pkgutil.iter_modules(package.__path__)]
