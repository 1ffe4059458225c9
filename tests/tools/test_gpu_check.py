"""The check for people with a card, as far as a CPU goes: its cases, its processes, its report."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from widemesh.pallas_kernels.gpu.cases import find_cases
from widemesh.pallas_kernels.layout import PageLayout
from widemesh.pallas_kernels.paged_cache import read_keys, read_rows
from widemesh.tools.gpu_check import __main__ as command
from widemesh.tools.gpu_check import ceilings, supervise, timing, worker
from widemesh.tools.gpu_check.case import Case
from widemesh.tools.gpu_check.cases import MODULES, draw, load
from widemesh.tools.gpu_check.compare import close, equal
from widemesh.tools.gpu_check.report import Results, floors
from widemesh.tools.gpu_check.supervise import Limits, run_ops
from widemesh.tools.gpu_check.timing import Timed

ROOT = Path(__file__).parents[2]
KEY = jnp.uint32(0)
SCRIPT = ROOT / "tools" / "gpu_check.sh"

# A worker that speaks and misbehaves as its op says; it imports nothing, so it starts at once.
WORKER = """
import json, os, sys, time
names = {"good": ["one"], "hangs": ["one"], "silent": [],
         "bad": ["fine", "loses the device", "crashes", "hangs", "last"]}
op = sys.argv[sys.argv.index("--op") + 1]
left = [name for name in names[op] if name not in sys.argv]
def say(event, **fields):
    print(json.dumps({"event": event, **fields}), flush=True)
print("a library says something")
if op == "silent":
    sys.exit("cannot start")
say("cases", names=left)
for name in left:
    say("begin", case=name)
    if name == "crashes":
        os.abort()
    if "hangs" in (name, op):
        time.sleep(600)
    say("result", case=name, status="raised" if name == "loses the device" else "ok")
    if name == "loses the device":
        sys.exit(3)
"""


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


@pytest.fixture
def run(tmp_path):
    """Runs ops with that worker; gives their records by (op, case)."""
    file = tmp_path / "worker.py"
    file.write_text(WORKER)

    def records_of(*ops, seconds, silence_s, at_once):
        records: list[dict] = []
        limits = Limits(deadline=time.monotonic() + seconds, silence_s=silence_s)
        run_ops(ops, ("check",), records.append, limits=limits, at_once=at_once, environment=environment(),
                worker=(sys.executable, str(file)))  # fmt: skip
        found = {(record["op"], record["case"]): record for record in records}
        assert len(found) == len(records), "a case was reported twice"
        return found

    return records_of


def test_what_crashes_or_hangs_loses_no_other_result(run):
    found = run("bad", "silent", "good", seconds=300, silence_s=2.0, at_once=2)
    assert {name: record["status"] for name, record in found.items()} == {
        ("bad", "fine"): "ok", ("bad", "loses the device"): "raised", ("bad", "crashes"): "crashed",
        ("bad", "hangs"): "timeout", ("bad", "last"): "ok", ("silent", "*"): "crashed", ("good", "one"): "ok",
    }  # fmt: skip
    assert "signal 6" in found["bad", "crashes"]["message"]
    assert found["bad", "hangs"]["message"] == "nothing came for 2 s"
    assert "cannot start" in found["silent", "*"]["message"]


def test_the_budget_ends_it(run):
    found = run("hangs", "good", seconds=2.0, silence_s=60.0, at_once=1)
    assert {record["status"] for record in found.values()} == {"skipped"}
    assert ("good", "*") in found and all(record["message"] == "no time was left" for record in found.values())


def _case(name, kernel):
    """Twice x, by `kernel`."""
    return Case(op="op", name=name, build=lambda key: (draw.normal(key, 3, 4),), is_tiny=True,
                call=lambda implementation, x: 2 * x if implementation == "reference" else kernel(x),
                compare=lambda args, a, b: (close("out", a, b, tolerance=1e-3, worst=1e-2),))  # fmt: skip


def _refuse(x):
    raise ValueError("no such shape")


def _lose_the_device(x):
    raise jax.errors.JaxRuntimeError("INTERNAL: illegal address")


CASES = (
    _case("right", lambda x: x + x),
    _case("one row off", lambda x: (2 * x).at[1].multiply(1.5)),
    _case("nan", lambda x: 2 * x / 0 * 0),
    _case("refuses", _refuse),
    _case("loses the device", _lose_the_device),
    _case("last", lambda x: x + x),
)


def test_a_wrong_kernel_is_reported_as_wrong(capsys):
    def work(*flags):
        status = worker.main(["check", "--op", "op", "--interpret", "H200", *flags], load_cases=lambda op: CASES)
        events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        return status, events[0]["names"], {e["case"]: e for e in events if e["event"] == "result"}

    status, names, found = work()
    assert names == [case.name for case in CASES] and status == supervise.START_AGAIN
    assert {name: result["status"] for name, result in found.items()} == {
        "right": "ok", "one row off": "wrong", "nan": "wrong", "refuses": "raised", "loses the device": "raised",
    }  # fmt: skip
    (output,) = found["one row off"]["outputs"]
    assert not output["ok"] and output["worst_row"] == pytest.approx(0.5) and 0 < output["error"] < 0.5
    assert found["nan"]["error"] == "inf"
    assert found["refuses"]["message"] == "ValueError: no such shape"
    status, names, found = work(*(flag for name in found for flag in ("--done", name)))
    assert status == 0 and names == ["last"] and found["last"]["status"] == "ok"


def test_the_command_in_the_interpreter(tmp_path):
    """One op for real: exit status, the last line, the file, and what was imported."""
    out = tmp_path / "results.json"
    arguments = ["bash", str(SCRIPT), "--interpret", "--op", "engram_gate", "--out", str(out)]
    process = subprocess.run(arguments, env={**environment(), "PYTHON": sys.executable}, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    *lines, last = process.stdout.splitlines()
    summary = json.loads(last)
    assert summary["interpreted"] == "H200" and summary["problems"] == summary["timings"] == []
    cases = [case.name for case in load("engram_gate") if case.is_tiny]
    assert [check["case"] for check in summary["checks"]] == cases and len(lines) == len(cases) >= 3
    for check in summary["checks"]:
        assert check.keys() == {"op", "case", "status", "error", "tolerance", "outputs", "seconds"}
        assert check["op"] == "engram_gate" and check["status"] == "ok" and check["error"] <= check["tolerance"]
    *records, whole = map(json.loads, out.read_text().splitlines())
    assert whole == summary
    assert records == [{"record": "check", **check} for check in summary["checks"]]


# What a worker prints on a GPU, by stage.
ON_GPU = """
import json, os, sys
stage, *rest = sys.argv[1:]
def say(event, **fields):
    print(json.dumps({"event": event, **fields}), flush=True)
if stage == "ceilings":
    say("device", device="NVIDIA H200", platform="gpu", compute_capability="9.0", target="H200", jax="0.12")
    for name, rate in (("copy_bytes", 4e12), ("bf16_flops", 8e14)):
        say("result", ceiling=name, per_second=rate)
    say("result", ceiling="fp8_flops", per_second=None, why="unknown")
    os.abort()
say("cases", names=["decode"])
say("begin", case="decode")
if stage == "check":
    say("result", case="decode", status="ok", error=0.001, tolerance=0.002, outputs=[], seconds=1.0)
else:
    assert os.path.exists(rest[rest.index("--turn") + 1])
    say("waiting")
    say("result", case="decode", status="ok", shape="64 rows", microseconds=30.0, low=29.0, high=32.0, repeats=15,
        sets=6, exceeds_l2=True, dispatch_microseconds=2.0, floor_bytes=8e7, floor_flops=8e9, seconds=1.0)
"""


def test_the_whole_run_on_a_gpu(tmp_path, capsys):
    """Ceilings, checks, timings, in this order; the ceilings that came before a crash are used."""
    file, out = tmp_path / "worker.py", tmp_path / "results.json"
    file.write_text(ON_GPU)
    assert command.main(["--out", str(out), "--op", "mhc", "--op", "compress"], worker=(sys.executable, str(file))) == 0
    *_, last = capsys.readouterr().out.splitlines()
    summary = json.loads(last)
    assert summary["device"]["target"] == "H200" and summary["problems"] == []
    assert summary["ceilings"] == {"copy_bytes": 4e12, "bf16_flops": 8e14, "fp8_flops": None}
    assert {(timing["op"], timing["bound"], round(timing["ratio"], 6)) for timing in summary["timings"]} == {
        ("mhc", "bytes", 1.5), ("compress", "bytes", 1.5),
    }  # fmt: skip
    kinds = [json.loads(line).get("record") for line in out.read_text().splitlines()]
    assert kinds == ["device", *["ceiling"] * 3, *["check"] * 2, *["time"] * 2, None]


def test_ceilings_are_measured(monkeypatch):
    """On a CPU, small: the code runs, and the numbers are rates."""
    monkeypatch.setattr(ceilings, "_COPY_BYTES", 1 << 16)
    monkeypatch.setattr(ceilings, "_SIZES", (64,))
    monkeypatch.setattr(timing, "_SAMPLE_S", 1e-3)
    found = {record["ceiling"]: record["per_second"] for record in ceilings.measure()}
    assert found.keys() == {"copy_bytes", "bf16_flops", "fp8_flops"}
    assert 1e6 < found["copy_bytes"] < 1e13 and 1e6 < found["bf16_flops"] < 1e13


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    assert command.main([]) == 2
    said = capsys.readouterr().err
    assert "sm_100a (B200)" in said and "jax runs on a cpu; on a CPU use --interpret" in said


def test_cases_are_those_of_the_report():
    """Every released shape is timed, with arguments as they are compiled ahead of time."""
    released, broken = find_cases()
    assert broken == {}
    timed = {(op, case.floor.name): case for op in MODULES for case in load(op) if case.floor}
    assert timed.keys() == {(case.op, case.name) for case in released}
    for case in released:
        built = jax.eval_shape(timed[case.op, case.name].build, KEY)
        assert jax.tree.structure(built) == jax.tree.structure(case.args), case.name
        assert [(x.shape, x.dtype) for x in jax.tree.leaves(built)] == [
            (x.shape, x.dtype) for x in jax.tree.leaves(case.args)
        ], (case.op, case.name)


@pytest.mark.parametrize("op", MODULES)
def test_names_are_unique(op):
    names = [case.name for case in load(op)]
    assert len(set(names)) == len(names) and {case.op for case in load(op)} == {op}
    assert any(case.is_tiny for case in load(op))


def test_nothing_but_jax_and_the_project_is_imported():
    """A machine with a card may have jax alone. jaxtyping and ml_dtypes are what the kernels import themselves."""
    allowed = {*sys.stdlib_module_names, "jax", "jaxlib", "jaxtyping", "numpy", "ml_dtypes", "widemesh"}
    rooms = ("widemesh.pallas_kernels", "widemesh.tools.gpu_check")
    for folder in ("tools/gpu_check", "pallas_kernels"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                names += [node.module] if isinstance(node, ast.ImportFrom) else []
                for name in names:
                    assert name.split(".")[0] in allowed, (path, name)
                    assert not name.startswith("widemesh") or name.startswith(rooms), (path, name)


def test_close_sees_one_row():
    wanted = jnp.ones((1000, 8))
    assert close("x", wanted, wanted, tolerance=0, worst=0).is_ok
    off = close("x", wanted.at[7].set(0.5), wanted, tolerance=0.1, worst=0.4)
    assert off.worst == 0.5 and off.error < 0.02 and not off.is_ok
    zero = wanted.at[3].set(0.0)
    assert not close("x", zero.at[3, 0].set(1e-6), zero, tolerance=1, worst=1e6).is_ok, "nothing where zeros must be"
    for bad in (jnp.nan, jnp.inf):
        assert not close("x", wanted.at[3, 3].set(bad), wanted, tolerance=1, worst=1).is_ok
    assert not close("x", wanted.astype(jnp.bfloat16), wanted, tolerance=1, worst=1).is_ok
    assert close("x", wanted[:0], wanted[:0], tolerance=0, worst=0).is_ok


def test_equal_counts_what_differs():
    wanted = jnp.arange(8)
    assert equal("x", wanted.at[1].set(0), wanted).error == 1 / 8
    assert equal("x", wanted.at[1].set(0), wanted, share=0.5, among=2).is_ok
    assert not equal("x", wanted[:4], wanted, share=1.0).is_ok


def test_draws_are_spread():
    """The hash is no great generator; it must not repeat itself, and the values must have their size."""
    x, y = (np.asarray(draw.normal(key, 100, 100)) for key in draw.split(KEY, 2))
    assert abs(x.mean()) < 0.05 and abs(x.std() - 1) < 0.03 and abs(np.corrcoef(x.ravel(), y.ravel())[0, 1]) < 0.05
    assert abs(np.corrcoef(x[:-1].ravel(), x[1:].ravel())[0, 1]) < 0.05 and np.isfinite(x).all()
    assert len(np.unique(draw.bits(KEY, 10_000))) == 10_000
    numbers = np.asarray(draw.between(KEY, -3, 4, 7000))
    assert set(numbers) == set(range(-3, 4)) and np.bincount(numbers + 3).min() > 800
    assert sorted(np.asarray(draw.shuffled(KEY, 50))) == [*range(50)]


def test_chosen_numbers_are_valid():
    visible = jnp.asarray([0, 3, 8, 15, 16, 17, 1000])
    chosen = np.asarray(draw.chosen(KEY, visible, 8))
    for row, bound in zip(chosen, (0, 3, 8, 15, 16, 17, 1000), strict=True):
        real = row[: min(8, bound)]
        assert (np.diff(real) > 0).all() and (real >= 0).all() and (real < bound).all()
        assert (row[len(real) :] == -1).all()
    assert (np.diff(chosen[-1]) > 1).any()


def test_pages_are_finite():
    """Every row and key of a pool decodes to a number of ordinary size."""
    layout = PageLayout.build(page_size=8, ratios=(2, 1), head_dim=32, index_dim=32, record="packed")
    pool, table = jax.jit(lambda a, b: (draw.pages(a, layout, 5), draw.table(b, 2, 2, 5)))(*draw.split(KEY, 2))
    assert pool.shape == (5, layout.page_bytes) and len(np.unique(table)) == 4
    for source in layout.sources:
        rows, keys = (
            np.asarray(jax.jit(read, static_argnums=2)(pool, table, source)) for read in (read_rows, read_keys)
        )
        assert 0.3 < np.abs(rows).mean() < 3 and np.abs(rows).max() <= 6
        assert 1 < np.abs(keys).mean() < 8 and np.abs(keys).max() <= 12


@pytest.mark.parametrize("carried", [0, 1])
def test_a_case_is_timed_over_sets_of_its_own(carried):
    """Shared and carried arguments are drawn once; every call has the rest to itself."""

    def build(key):
        return jnp.zeros(()), jnp.full((3,), 2.0), draw.normal(key, 3)

    def call(implementation, total, shared, own):
        assert implementation == "mosaic"
        return total + jnp.sum(shared * own), shared * own

    floor = SimpleNamespace(floor_bytes=100, floor_flops=10)
    case = Case(op="op", name="x", build=build, call=call, compare=lambda *_: (), floor=floor, shared=(1,),
                carried=carried)  # fmt: skip
    timed = Timed(case, KEY)
    assert timed.sets == 2
    carried_args, shared = timed._fixed(jax.jit(timed._first)(KEY))
    sets = [timed._rest(key) for key in draw.split(KEY, 2)]
    assert [x is None for x in sets[0]] == [bool(carried), True, False]
    last, outs = timed.program(carried_args, shared, sets)
    own = np.stack([np.asarray(given[2]) for given in sets])
    if carried:
        assert float(last[0]) == pytest.approx(2 * own.sum(), rel=1e-5) and outs == []
    else:
        np.testing.assert_allclose([np.asarray(out[1]) for out in outs], 2 * own, rtol=1e-6)
    found = timed.measure()
    assert 0 < found["low"] <= found["microseconds"] <= found["high"] and found["sets"] == 2


def test_floors_are_of_the_measured_ceilings():
    record = {"status": "ok", "floor_bytes": 4e6, "floor_flops": 1e9, "microseconds": 3.0}
    found = floors(record, {"copy_bytes": 4e12, "bf16_flops": 5e14, "fp8_flops": None})
    assert found == pytest.approx({"bytes_microseconds": 1.0, "flops_microseconds": 2.0, "floor_microseconds": 2.0,
                                   "bound": "flops", "ratio": 1.5})  # fmt: skip
    assert floors(record, {"copy_bytes": 4e12})["ratio"] is None
    assert floors({"status": "timeout"}, {}) == {}


def test_a_wrong_kernel_is_exit_status_1(tmp_path, capsys):
    file = tmp_path / "worker.py"
    wrong = [{"name": "out", "ok": False, "error": "inf", "worst_row": 0.5}, {"name": "rest", "ok": True, "error": 0.0}]
    fields = {"case": "tiny", "status": "wrong", "error": "inf", "tolerance": 1e-3, "outputs": wrong}
    file.write_text(f"print({json.dumps(json.dumps({'event': 'result', **fields}))})")
    assert command.main(["--interpret", "--op", "mhc"], worker=(sys.executable, str(file))) == 1
    said = capsys.readouterr()
    assert json.loads(said.out.splitlines()[-1])["problems"] == said.err.splitlines() == [
        "check mhc/tiny: wrong, out off by inf (worst row 0.5)"
    ]  # fmt: skip


def test_a_timing_that_was_not_reached_is_no_problem(capsys):
    results = Results(None, interpreted=None)
    results.take_timing({"op": "op", "case": "a", "status": "skipped", "message": "no time was left"})
    assert results.problems == []
    results.take_check({"op": "op", "case": "a", "status": "skipped", "message": "no time was left"})
    assert results.problems == ["check op/a: skipped, no time was left"]
    assert "time op/a: skipped no time was left" in capsys.readouterr().out
