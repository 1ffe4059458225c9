"""Reshuffles under load on eight ranks change no token, compile nothing and never part weights from maps.

The model has 16 experts and its draft 8, each with a controller of its own, and drafts are tried and accepted all the
while. Twenty-four reshuffles in each test run; two hundred of both models for each number of redundant experts, and
sums in any order, are slow: `pytest -m slow tests/serving/test_reshuffles.py`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from widemesh.model.forward import ForwardModel
from widemesh.model.numerics import NUMERICS

HERE = Path(__file__).parent
TIE = 1e-5  # sums in another order move router and index scores by 1e-6 at most
MOST_TIES = 2


def _near_ties():
    """The module beside this file; tests are imported without a path of their own."""
    spec = importlib.util.spec_from_file_location("widemesh_test_near_ties", HERE / "near_ties.py")
    module = sys.modules.setdefault(spec.name, importlib.util.module_from_spec(spec))
    spec.loader.exec_module(module)
    return module


near_ties = _near_ties()


def run(folder: Path, reshuffles: int, *names: str, timeout_s: float) -> dict[str, Any]:
    """In a process with more devices than a test has: eight ranks decode, and another device prefills."""
    flags = [flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag]
    done = subprocess.run(
        [sys.executable, str(HERE / "reshuffle_runs.py"), str(folder), str(reshuffles), *names],
        env=os.environ | {"XLA_FLAGS": " ".join(flags)}, capture_output=True, text=True, timeout=timeout_s, check=False,
    )  # fmt: skip
    print(done.stderr)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def check(found: dict[str, Any], folder: Path, name: str, reshuffles: int) -> None:
    """What one setting came to, beside the engine without EPLB."""
    one, off = found[name], found["off"]
    assert one["problems"] == []
    assert one["compiles"] == off["compiles"] == 0
    assert len(one["models"]) == 2
    for model in one["models"]:
        ended = model["rebalances"]
        assert ended["committed"] >= reshuffles and ended["abandoned"] == 0, model["last_failure"]
        assert model["commits"] > reshuffles and model["moved_rows"] == model["least_rows"] > reshuffles
    assert one["imported"] > 0 and one["asked"] > 0
    # Steps were taken in the middle of migrations, of both models at a time too, with many placements on the way.
    assert one["migrating_dispatches"] > reshuffles and one["versions"] > reshuffles
    assert 0 < one["migrating_both"] < one["migrating_dispatches"]
    assert 0 < one["accepted"] < one["drafts"]
    check_tokens(found, folder, name)


def check_tokens(found: dict[str, Any], folder: Path, name: str) -> None:
    """Equal; with sums in any order, and where a preempted request's rows ran in a prefill, but for near ties."""
    tokens, wanted = found[name]["tokens"], found["off"]["tokens"]
    assert 40 <= len(tokens) <= len(wanted)
    ties = []
    for prompt, one, other in zip(found["prompts"], tokens, wanted[: len(tokens)], strict=False):
        if one == other:
            continue
        assert len(one) == len(other)
        parted = next(i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)
        ties.append(np.array([*prompt, *one[:parted]]))
    assert len(ties) <= MOST_TIES
    if ties:
        model = ForwardModel.load(folder, NUMERICS["plain"])
        for ids in ties:
            choice = near_ties.closest_choice(model, ids)
            assert choice.margin < TIE, (choice, ids)


def test_reshuffles_change_no_token(tmp_path: Path) -> None:
    folder, each = tmp_path / "model", 4
    found = run(folder, each, "0", "8", "32", timeout_s=600)
    for name in ("0", "8", "32"):
        check(found, folder, name, each)
        assert found[name]["tokens"] == found["off"]["tokens"][: len(found[name]["tokens"])]
    assert sum(found[name]["preemptions"] for name in ("0", "8", "32")) > 0


@pytest.mark.slow
def test_two_hundred_reshuffles_of_each_kind(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    found = run(folder, 200, timeout_s=5400)
    for name in ("0", "8", "32", "8, sums in any order"):
        check(found, folder, name, 200)
