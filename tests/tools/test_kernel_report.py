"""The report on GPU kernels: its text, its exit status, and that the one in the tree lists what is there."""

from __future__ import annotations

import json
import re

import pytest

from widemesh.pallas_kernels.gpu.cases import declared_swaps, find_cases
from widemesh.pallas_kernels.gpu.interpret import Swap
from widemesh.pallas_kernels.gpu.targets import TARGETS
from widemesh.pallas_kernels.gpu.toolchain import ToolchainError
from widemesh.tools import kernel_report


def _kernel(name: str, spill_bytes: int = 0) -> dict:
    instructions = {"wgmma.mma_async": 8, "tcgen05.mma": 0, "mma.sync": 0, "cp.async.bulk": 5}
    return {"name": name, "arch": "sm_90a", "registers": 90, "spill_bytes": spill_bytes, "smem_bytes": 57_352,
            "tmem_columns": 0, "instructions": instructions}  # fmt: skip


def _report(target: str, *kernels: dict, problems: tuple[str, ...] = ()) -> dict:
    """Of a process that compiled for one target."""
    case = {"op": "op", "case": "decode", "shape": "64 rows", "target": target, "seconds": 1.0, "kernels": [*kernels],
            "instruction": "wgmma.mma_async", "floor_bytes": 200, "floor_flops": 1, "moved_bytes": 210,
            "problems": [*problems]}  # fmt: skip
    return {"targets": [target], "jax": "0.12.0", "ptxas": "/a/ptxas", "ptxas_version": "12.9.86", "cases": [case],
            "broken": {}}  # fmt: skip


def _table(text: str, heading: str) -> list[list[str]]:
    """Rows of the table under a heading, its first two lines left out."""
    section = re.split(r"^## ", text, flags=re.MULTILINE)
    body = next(part for part in section if part.startswith(heading + "\n"))
    lines = [line for line in body.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_text_of_a_report():
    swap = Swap(kernel="op_one", missing="wgmma with A in registers", staged="A in shared memory")
    text = kernel_report.markdown([_report("H100", _kernel("op_one"), _kernel("op_two")), _report("H200")], [swap])
    assert "Compiled ahead of time with jax 0.12.0 and ptxas 12.9.86 for H100 and H200.\n" in text
    same = ["90", "0", "57,352", "1.05", "wgmma.mma_async x 8"]
    assert _table(text, "op") == [
        ["decode", "64 rows", "op_one", "H100", *same],
        ["decode", "64 rows", "op_two", "H100", *same],
    ]
    assert _table(text, "Never executed") == [["op_one", "wgmma with A in registers", "A in shared memory"]]
    assert "## Problems" not in text


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    """Runs the command over given reports and gives its exit status, its summary and what it wrote."""
    monkeypatch.setattr(kernel_report, "REPORT", tmp_path / "REPORT.md")

    def command(reports, *flags):
        def run_targets(targets, ops, show_progress):
            return (reports[target] for target in targets)

        monkeypatch.setattr(kernel_report, "run_targets", run_targets)
        status = kernel_report.main(flags)
        summary = json.loads(capsys.readouterr().out.splitlines()[-1])
        written = kernel_report.REPORT.read_text() if kernel_report.REPORT.exists() else None
        return status, summary, written

    return command


def test_the_whole_report_is_written(run):
    status, summary, written = run({target: _report(target, _kernel("op_one")) for target in TARGETS})
    assert status == 0 and [row[3] for row in _table(written, "op")] == list(TARGETS)
    assert (summary["cases"], summary["kernels"], summary["spill_bytes"], summary["problems"]) == (4, 4, 0, [])


@pytest.mark.parametrize(("flags", "cases"), [(("--target", "B200"), 1), (("--op", "op"), 4), (("--print",), 4)])
def test_a_part_writes_nothing(run, flags, cases):
    status, summary, written = run({target: _report(target, _kernel("op_one")) for target in TARGETS}, *flags)
    assert status == 0 and written is None and summary["report"] is None and summary["cases"] == cases


def test_a_problem_is_told_and_fails(run):
    spilling = _report("H200", _kernel("op_one", 48), problems=("op_one spills 48 bytes of registers",))
    reports = {target: _report(target, _kernel("op_one")) for target in TARGETS} | {"H200": spilling}
    reports["B300"]["broken"]["other"] = "ImportError: no"
    status, summary, written = run(reports)
    assert status == 1 and summary["spill_bytes"] == 48
    assert summary["problems"] == [
        "H200 op decode: op_one spills 48 bytes of registers",
        "other: aot.py does not import: ImportError: no",
    ]
    assert all(f"- {problem}\n" in written for problem in summary["problems"])


def test_without_the_compiler_it_says_so(monkeypatch, capsys):
    def refuse(*_, **__):
        raise ToolchainError("compiling needs a plugin")

    monkeypatch.setattr(kernel_report, "run_targets", refuse)
    assert kernel_report.main([]) == 1
    assert capsys.readouterr().err == "compiling needs a plugin\n"


def test_the_report_in_the_tree_lists_every_kernel_and_swap():
    remedy = "run python -m widemesh.tools.kernel_report"
    cases, broken = find_cases()
    assert broken == {}
    text = kernel_report.REPORT.read_text(encoding="utf-8")
    assert "## Problems" not in text
    listed = set()
    for op in {case.op for case in cases}:
        listed |= {(op, row[0], row[1], row[3]) for row in _table(text, op)}
    assert listed == {(case.op, case.name, case.shape, target) for case in cases for target in case.targets}, remedy
    swaps = [[swap.kernel, swap.missing, swap.staged] for swap in declared_swaps()]
    assert _table(text, "Never executed") == swaps, remedy
