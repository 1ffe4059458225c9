"""The cases of every op. An op's module is imported by the process that runs it, so that one cannot break another."""

from __future__ import annotations

import importlib

from widemesh.tools.gpu_check.case import Case

MODULES = {
    "mhc": "streams",
    "select_entries": "selection",
    "grouped_moe": "experts",
    "compress": "compression",
    "sparse_attention": "attention",
    "engram_gate": "engram",
}
"""By op, in the order in which they run: those that compile the longest first."""


def load(op: str) -> tuple[Case, ...]:
    """The cases of one op, tiny ones first. Raises ValueError for an op that has none."""
    if op not in MODULES:
        raise ValueError(f"op={op!r} must be one of {', '.join(MODULES)}")
    return importlib.import_module(f"{__name__}.{MODULES[op]}").CASES
