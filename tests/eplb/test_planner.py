"""Planning in a child process: right plans, and every way in which there is none."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from widemesh.eplb import ChildPlanner, EplbConfig, PlannerError, initial_placement, make_plan

CONFIG = EplbConfig(num_redundant_experts=8)
LAYOUT = CONFIG.layout(num_layers=2, num_experts=16, ranks=8)
LOAD = np.random.default_rng(0).poisson(np.exp(np.random.default_rng(1).normal(4, 1, (2, 16))))
FIRST = initial_placement(LAYOUT)


@pytest.fixture
def planner():
    with contextlib.closing(ChildPlanner(LAYOUT, CONFIG)) as one:
        yield one


def _wait(planner, limit_s=60.0):
    deadline_s = time.monotonic() + limit_s
    while (plan := planner.poll()) is None:
        assert time.monotonic() < deadline_s
        time.sleep(0.005)
    return plan


def _is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _wait_for_end(pid):
    deadline_s = time.monotonic() + 30
    while _is_alive(pid):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_the_child_plans_as_a_call_does_and_lives_on(planner):
    assert planner.poll() is None and planner.pid == 0  # nothing is started before it is needed
    planner.start(LOAD, FIRST)
    found, wanted = _wait(planner), make_plan(LOAD, FIRST, LAYOUT, CONFIG)
    np.testing.assert_array_equal(found.slot_owner, wanted.slot_owner)
    np.testing.assert_array_equal(found.layers, wanted.layers)
    assert (found.before, found.after, found.is_skipped) == (wanted.before, wanted.after, False)
    assert (found.feasible, found.advice) == (wanted.feasible, wanted.advice)
    pid = planner.pid
    planner.start(LOAD, found.slot_owner)
    assert _wait(planner).is_skipped and planner.pid == pid and planner.poll() is None
    planner.close()
    _wait_for_end(pid)


def test_a_failure_in_the_child_is_told_and_the_next_child_is_fresh(planner):
    planner.start(-LOAD, FIRST)
    with pytest.raises(PlannerError, match="ValueError: the load must be finite"):
        _wait(planner)
    assert planner.poll() is None
    planner.start(LOAD, FIRST)
    pid = planner.pid
    assert not _wait(planner).is_skipped and planner.pid != 0 and pid in (0, planner.pid)


def test_a_child_that_is_killed_costs_one_plan(planner):
    planner.start(LOAD, FIRST)
    _wait(planner)
    pid = planner.pid
    os.kill(pid, signal.SIGSTOP)  # so that it does not answer before it dies
    planner.start(LOAD, FIRST)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(PlannerError, match=r"the planner's process has ended: signal 9 \(Killed\)"):
        _wait(planner)
    planner.start(LOAD, FIRST)
    assert not _wait(planner).is_skipped and planner.pid != pid


def test_a_child_that_hangs_is_killed_after_the_deadline():
    heard = []
    command = (sys.executable, "-c", "import time; time.sleep(600)")
    planner = ChildPlanner(LAYOUT, CONFIG, deadline_s=0.5, command=command, on_answer=lambda: heard.append(1))
    planner.start(np.ones((2, 16), np.int64), FIRST)
    deadline_s = time.monotonic() + 30
    while not planner.pid:
        assert time.monotonic() < deadline_s
        time.sleep(0.005)
    pid = planner.pid
    with pytest.raises(PlannerError, match=r"the planner had no plan after 0\.5 s"):
        _wait(planner)
    _wait_for_end(pid)
    planner.close()


@pytest.mark.parametrize(("program", "reason"), [
    ("raise SystemExit(3)", "has ended: status 3"),
    ("import sys; sys.stdin.buffer.read(9); sys.stdout.buffer.write(bytes([5] + 7 * [0]) + b'hello')", "ValueError: "),
])  # fmt: skip
def test_a_child_that_talks_nonsense_or_nothing(program, reason):
    with contextlib.closing(ChildPlanner(LAYOUT, CONFIG, command=(sys.executable, "-c", program))) as planner:
        planner.start(LOAD, FIRST)
        with pytest.raises(PlannerError, match=reason):
            _wait(planner)


def test_a_missing_program_is_one_failure():
    with contextlib.closing(ChildPlanner(LAYOUT, CONFIG, command=("/no/such/program",))) as planner:
        planner.start(LOAD, FIRST)
        with pytest.raises(PlannerError, match="No such file"):
            _wait(planner)


def test_cancelled_plans_are_never_seen(planner):
    heard = []
    planner._on_answer = lambda: heard.append(1)
    planner.start(LOAD, FIRST)
    planner.cancel()
    assert planner.poll() is None and planner.pid == 0
    planner.start(LOAD * 2, FIRST)
    planner.start(LOAD, FIRST)  # instead
    np.testing.assert_array_equal(_wait(planner).slot_owner, make_plan(LOAD, FIRST, LAYOUT, CONFIG).slot_owner)
    assert heard


def test_nothing_waits_for_the_child(planner):
    """More than a pipe holds, to a child that does not read."""
    layout = CONFIG.layout(num_layers=40, num_experts=384, ranks=8)
    slow = ChildPlanner(layout, CONFIG, command=(sys.executable, "-c", "import time; time.sleep(600)"))
    start_s = time.monotonic()
    slow.start(np.ones((40, 384), np.int64), initial_placement(layout))
    for _ in range(100):
        assert slow.poll() is None
    slow.close()
    assert time.monotonic() - start_s < 10


def test_the_child_imports_no_jax():
    code = ("import sys, widemesh.eplb.plan_worker; "
            "print([name for name in sys.modules if name.split('.')[0] in ('jax', 'jaxlib', 'flax', 'torch')])")
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60).stdout == "[]\n"


SCRIPT = """
import os, sys, time
import numpy as np
from widemesh.eplb import ChildPlanner, EplbConfig, initial_placement
config = EplbConfig(num_redundant_experts=8)
layout = config.layout(num_layers=2, num_experts=16, ranks=8)
planner = ChildPlanner(layout, config)
load = np.arange(32).reshape(2, 16)
planner.start(load, initial_placement(layout))
while (plan := planner.poll()) is None:
    time.sleep(0.005)
print(planner.pid, plan.is_skipped, flush=True)
if sys.argv[1] == "killed":
    os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("how", ["killed", "ends"])
def test_a_script_needs_no_guard_and_its_child_ends_with_it(tmp_path, how):
    """The script is no module that could be imported again, and it closes nothing."""
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run([sys.executable, "script.py", how], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    pid, is_skipped = done.stdout.split()  # one line: the script ran once
    assert is_skipped == "False" and done.stderr == ""
    assert done.returncode == (-signal.SIGKILL if how == "killed" else 0)
    _wait_for_end(int(pid))
