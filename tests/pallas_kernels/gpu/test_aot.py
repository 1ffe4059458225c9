"""Compiling for every target without a GPU, in one process per architecture."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from widemesh.pallas_kernels.gpu import aot
from widemesh.pallas_kernels.gpu.aot_case import AotCase
from widemesh.pallas_kernels.gpu.cases import find_cases
from widemesh.pallas_kernels.gpu.processes import environment, run_targets
from widemesh.pallas_kernels.gpu.targets import TARGETS
from widemesh.pallas_kernels.gpu.toolchain import ToolchainError, has_plugin

needs_aot = pytest.mark.skipif(not has_plugin(), reason="needs pip install 'widemesh[aot]'")
INSTRUCTION = {"sm_90a": "wgmma.mma_async", "sm_100a": "tcgen05.mma", "sm_103a": "tcgen05.mma"}


def check(targets, names=()):
    """Compiles cases, all of them or those named, for targets of one architecture."""
    (report,) = run_targets(targets, names)
    assert report["broken"] == {} and report["targets"] == list(targets)
    wrong = {f"{case['target']} {case['op']} {case['case']}": case["problems"] for case in report["cases"]}
    assert {case: problems for case, problems in wrong.items() if problems} == {}
    for case in report["cases"]:  # the same again, from the facts themselves
        target = case["target"]
        for kernel in case["kernels"]:
            assert kernel["arch"] == TARGETS[target].arch
            assert kernel["spill_bytes"] == 0
            assert kernel["smem_bytes"] <= 232_448
            assert 0 < kernel["registers"] <= 255
        expected = case["instruction"]
        assert expected is None or expected == INSTRUCTION[TARGETS[target].arch]
        assert expected is None or any(kernel["instructions"][expected] for kernel in case["kernels"])


@needs_aot
@pytest.mark.parametrize(("target", "which"), [("B200", 0), ("H200", -1)])
def test_kernels_of_every_op(target, which):
    # A compilation takes seconds: the first case of every op for Blackwell, the last one for Hopper, which are decode
    # and prefill. All cases for all targets are the slow test, and what REPORT.md holds.
    cases, broken = find_cases()
    assert broken == {}
    of_op = {op: list(found) for op, found in itertools.groupby(cases, key=lambda case: case.op)}
    check([target], [f"{op}/{found[which].name}" for op, found in of_op.items()])


@pytest.mark.slow
@needs_aot
@pytest.mark.parametrize("targets", [("H100", "H200"), ("B200",), ("B300",)], ids=" ".join)
def test_every_kernel_of_every_op(targets):
    check(targets)


@pytest.mark.parametrize("refused", [RuntimeError("start another one"), ToolchainError("pip install")])
def test_what_cannot_be_compiled_is_one_sentence(monkeypatch, capsys, refused):
    def topology(target):
        raise refused

    monkeypatch.setattr(aot, "prepare", lambda: None)
    monkeypatch.setattr(aot, "find_cases", lambda ops: ([], {}))
    monkeypatch.setattr(aot, "topology", topology)
    assert aot.main(["H100", "B200"]) == 1
    assert capsys.readouterr() == ("", f"{refused}\n")


@pytest.fixture(scope="module", params=["H100", "B300"])
def compiled(request):
    """What `square.py` says of one target."""
    script = Path(__file__).with_name("square.py")
    process = subprocess.run([sys.executable, script, request.param], capture_output=True, text=True, env=environment())
    assert process.returncode == 0, process.stderr[-2000:]
    return request.param, json.loads(process.stdout.splitlines()[-1])


@needs_aot
def test_facts_of_a_kernel(compiled):
    target, report = compiled
    (kernel,) = report["cases"][0]["kernels"]
    assert report["cases"][0]["problems"] == []
    assert (kernel["name"], kernel["arch"], kernel["spill_bytes"]) == ("square", TARGETS[target].arch, 0)
    assert 32 <= kernel["registers"] <= 255
    operands, product = 2 * (2 + 1) * 64 * 64, 4 * 2 * 64 * 64
    barriers = 2 if TARGETS[target].is_blackwell else 1
    assert kernel["smem_bytes"] == operands + product + 8 * barriers
    # 128 x 64 x 64: wgmma takes 64 rows and 16 of the 64 summands at a time, tcgen05 128 rows.
    expected = {"wgmma.mma_async": 0, "tcgen05.mma": 4} if barriers == 2 else {"wgmma.mma_async": 8, "tcgen05.mma": 0}
    assert {name: kernel["instructions"][name] for name in expected} == expected
    assert kernel["instructions"]["cp.async.bulk"] >= 3  # two operands in, one product out


@needs_aot
def test_what_is_wrong_is_said(compiled):
    target, report = compiled
    said = {case["case"]: case["problems"] for case in report["cases"][1:]}
    other = INSTRUCTION["sm_90a" if TARGETS[target].is_blackwell else "sm_100a"]
    assert said["misnamed"] == ["kernel_name='square' must begin with the op's name 'cube'"]
    assert said["no kernel"][0] == "the program calls no Mosaic kernel: the reference was compiled"
    assert said["refused"][0].startswith("ValueError: Swizzle 128")
    assert said["other cores"] == [f"no kernel has the instruction {other}"]
    assert re.fullmatch(r"square_hoard spills [1-9]\d* bytes of registers", *said["hoard"])
    assert "exceeds available shared memory: smem_bytes=262152 > max_smem_bytes=232448" in said["vast"][0]


@needs_aot
def test_a_program_of_eight_devices(compiled):
    program = compiled[1]["program"]
    assert [kernel["name"] for kernel in program["kernels"]] == ["square"]
    assert program["calls"] == [{"name": "square", "count": 3, "runs": 5}]
    rows = 128 * 64 * 2
    assert {found["kind"]: (found["runs"], found["num_bytes"]) for found in program["collectives"]} == {
        "all-gather": (1, 8 * rows),
        "reduce-scatter": (1, 8 * rows),
    }
    memory = program["memory"]
    assert memory["argument_bytes"] == rows + 64 * 64 * 2
    assert memory["output_bytes"] == memory["alias_bytes"] == rows  # the first argument is donated
    assert memory["temp_bytes"] >= 8 * rows
    assert program["spill_bytes"] == 0


@needs_aot
def test_one_architecture_per_process(compiled):
    target, report = compiled
    assert report["refusal"].startswith(f"this process compiles for {TARGETS[target].arch}; start another one for ")


def test_a_case_counts_its_bytes():
    told = {"name": "n", "op": "o", "shape": "s", "function": print, "args": (), "floor_bytes": 2, "floor_flops": 1}
    with pytest.raises(ValueError, match="moved_bytes=1 is less than floor_bytes=2"):
        AotCase(**told, moved_bytes=1)
    with pytest.raises(ValueError, match="target='A100' must be one of"):
        AotCase(**told, moved_bytes=2, targets=("A100",))
    case = AotCase(**told, moved_bytes=2, mma={"sm_90a": None, "sm_100a": "tcgen05.mma"})
    assert [case.instruction(arch) for arch in ("sm_90a", "sm_100a", "sm_103a")] == [None, "tcgen05.mma", "tcgen05.mma"]
