"""The golden checkpoints, and copies of them to break."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from widemesh.model.checkpoint.tensor_file import TensorFile, write_tensor_file

GOLDEN = Path(__file__).parents[2] / "golden"


@pytest.fixture(params=["A", "B"])
def golden(request) -> Path:
    """A checkpoint folder in the released, quantised layout, draft included. B has partial edge blocks."""
    return GOLDEN / request.param


@pytest.fixture
def golden_b() -> Path:
    """Golden B alone, where one checkpoint is enough."""
    return GOLDEN / "B"


@pytest.fixture
def rewrite(tmp_path, golden_b) -> Callable[..., Path]:
    """`rewrite(edit)`: a copy of golden B whose dict of stored tensors went through `edit`."""

    def make(edit: Callable[[dict[str, np.ndarray]], object]) -> Path:
        folder = tmp_path / "edited"
        folder.mkdir()
        shutil.copyfile(golden_b / "config.json", folder / "config.json")
        file = TensorFile.open(golden_b / "model.safetensors")
        tensors = {name: file.tensor(name) for name in file.entries}
        edit(tensors)
        write_tensor_file(folder / "model.safetensors", {k: np.ascontiguousarray(v) for k, v in tensors.items()})
        return folder

    return make
