"""Logits and draws of several processes, raw from the mesh that they make up, are those of one device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.serving.mesh_models import write_model
from tests.serving.mesh_steps import check_steps, read_steps
from widemesh.model.forward import ForwardModel
from widemesh.model.numerics import NUMERICS

ROOT = Path(__file__).parents[3]
RUN_S = 240  # on a loaded machine


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with every kind of layer."""
    return write_model(tmp_path_factory.mktemp("logits") / "small", "small")


@pytest.fixture(scope="module")
def whole(small: Path) -> ForwardModel:
    return ForwardModel.load(small, NUMERICS["plain"])


@pytest.mark.parametrize(("size", "devices"), [(2, 2), (4, 1)])
def test_logits_and_draws_are_those_of_one_device(
    small: Path, whole: ForwardModel, new_port, tmp_path: Path, size: int, devices: int
) -> None:
    """To 1e-5 of a token's largest; four ranks of two requests, with settings of each one's own, the third idle."""
    flags = f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0"
    coordinator, files = f"127.0.0.1:{new_port()}", [tmp_path / f"rank{i}.npz" for i in range(size)]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.serving.mesh_steps", str(small), coordinator, str(size), str(i), str(file)],
            env={**os.environ, "XLA_FLAGS": flags}, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            text=True,
        )
        for i, file in enumerate(files)
    ]  # fmt: skip
    try:
        ends = [(rank.communicate(timeout=RUN_S)[1][-3000:], rank.returncode) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait(10)
    assert all(status == 0 for _, status in ends), ends
    check_steps(read_steps(files), whole)
