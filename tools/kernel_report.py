"""`python -m widemesh.tools.kernel_report`: every GPU kernel compiled for every target, without a GPU, as a report.

Writes `pallas_kernels/REPORT.md`, prints progress on standard error, then the table, and one JSON object on its last
line. Exit status 1 if a kernel spills, is of another architecture than its target, lacks its tensor-core instruction,
exceeds the shared memory or does not compile at all. `--print` writes no file, nor do `--op NAME` and `--target NAME`,
which look at a part.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import widemesh.pallas_kernels as room
from widemesh.pallas_kernels.gpu.cases import declared_swaps
from widemesh.pallas_kernels.gpu.interpret import Swap
from widemesh.pallas_kernels.gpu.processes import run_targets
from widemesh.pallas_kernels.gpu.targets import TARGETS
from widemesh.pallas_kernels.gpu.toolchain import ToolchainError

REPORT = Path(next(iter(room.__path__))).resolve() / "REPORT.md"
COLUMNS = (
    "op", "case", "shape", "kernel", "target", "registers", "spills", "shared memory", "moved / floor", "tensor cores",
)  # fmt: skip
_RIGHT = ("registers", "spills", "shared memory", "moved / floor")
_TENSOR_CORES = ("wgmma.mma_async", "tcgen05.mma", "mma.sync")

_HEADER = """\
# GPU kernels, compiled without a GPU

<!-- Made by `python -m widemesh.tools.kernel_report`; do not edit. -->

Compiled ahead of time with jax {jax} and ptxas {ptxas} for {targets}.

Every kernel stands here at its released shapes. Spills are bytes of registers that did not fit, stores and loads
together. Shared memory is in bytes of one block, of {smem} that a block may have. "moved / floor" is what the
kernels of the call move through device memory, by arithmetic over their tiling, over the least that must move.
"tensor cores" is the instruction in the PTX and how often it stands there.

Compiling shows no speed and no result: [docs/gpu.md](../docs/gpu.md) says what is checked and how.
"""
_SWAPS = """\
## Never executed

The interpreter that compares kernels with their references lacks these operations. In their place it runs a staged
form; the operation itself is compiled for every target and was never run.
"""


def rows_of(case: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Lines of the table for one compiled case, one per kernel, in the order of `COLUMNS`."""
    moved = f"{case['moved_bytes'] / case['floor_bytes']:.2f}" if case["floor_bytes"] else "-"
    for kernel in case["kernels"]:
        found = [f"{name} x {n}" for name in _TENSOR_CORES if (n := kernel["instructions"][name])]
        yield (
            case["op"], case["case"], case["shape"], kernel["name"], case["target"], str(kernel["registers"]),
            str(kernel["spill_bytes"]), f"{kernel['smem_bytes']:,}", moved, ", ".join(found) or "none",
        )  # fmt: skip


def problems_of(reports: Sequence[Mapping[str, Any]]) -> list[str]:
    """Everything that is wrong, one sentence each."""
    found = []
    for report in reports:
        found += [f"{op}: aot.py does not import: {why}" for op, why in report["broken"].items()]
        found += [
            f"{case['target']} {case['op']} {case['case']}: {problem}"
            for case in report["cases"]
            for problem in case["problems"]
        ]
    return list(dict.fromkeys(found))


def markdown(reports: Sequence[Mapping[str, Any]], swaps: Sequence[Swap]) -> str:
    """The text of REPORT.md from the reports of all targets."""
    first = reports[0]
    smem = max(target.smem_bytes for target in TARGETS.values())
    names = [target for report in reports for target in report["targets"]]
    targets = f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]
    parts = [_HEADER.format(jax=first["jax"], ptxas=first["ptxas_version"], targets=targets, smem=f"{smem:,}")]
    ops = sorted({case["op"] for report in reports for case in report["cases"]})
    for op in ops:
        cases = [case for report in reports for case in report["cases"] if case["op"] == op]
        cases.sort(key=lambda case: case["case"])  # stable: the targets of a case stay together and in order
        rows = [row[1:] for case in cases for row in rows_of(case)]
        parts.append(f"## {op}\n\n" + _markdown_table(COLUMNS[1:], rows))
    swap_rows = [(swap.kernel, swap.missing, swap.staged) for swap in swaps]
    parts.append(_SWAPS + "\n" + _markdown_table(("kernel", "operation on the GPU", "in the interpreter"), swap_rows))
    if wrong := problems_of(reports):
        parts.append("## Problems\n\n" + "".join(f"- {problem}\n" for problem in wrong))
    return "\n".join(parts)


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    about = __doc__.split("\n\n")[1]
    parser = argparse.ArgumentParser(prog="python -m widemesh.tools.kernel_report", description=about)
    parser.add_argument(
        "--op", action="append", default=[], help="only this op, or one case of it as OP/CASE; may be given again"
    )
    parser.add_argument("--target", action="append", choices=tuple(TARGETS), help="only this target")
    parser.add_argument("--print", action="store_true", help="write no file")
    options = parser.parse_args(argv)
    targets = options.target or tuple(TARGETS)
    begin = time.perf_counter()
    try:
        reports = list(run_targets(targets, options.op, show_progress=True))
    except (ToolchainError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 1
    writes = not (options.print or options.op or options.target)
    if writes:
        REPORT.write_text(markdown(reports, declared_swaps()), encoding="utf-8")
    cases = [case for report in reports for case in report["cases"]]
    _print_table([row for case in cases for row in rows_of(case)])
    wrong = problems_of(reports)
    for problem in wrong:
        print(problem, file=sys.stderr)
    kernels = [kernel for case in cases for kernel in case["kernels"]]
    summary = {
        "cases": len(cases),
        "kernels": len(kernels),
        "spill_bytes": sum(kernel["spill_bytes"] for kernel in kernels),
        "problems": wrong,
        "ptxas": reports[0]["ptxas"],
        "seconds": round(time.perf_counter() - begin, 1),
        "report": str(REPORT) if writes else None,
    }
    print(json.dumps(summary))
    return 1 if wrong else 0


def _markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    rule = ["---:" if column in _RIGHT else "---" for column in columns]
    return "".join("| " + " | ".join(line) + " |\n" for line in (columns, rule, *rows))


def _print_table(rows: Sequence[Sequence[str]]) -> None:
    table = Table()
    for column in COLUMNS:
        table.add_column(column, justify="right" if column in _RIGHT else "left")
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 200).print(table)  # a pipe would cut it at 80


if __name__ == "__main__":
    sys.exit(main())
