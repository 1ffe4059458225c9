"""Golden vectors of single operations, made by a public PyTorch implementation of the architecture."""

from pathlib import Path

import numpy as np
import pytest

from widemesh.model.checkpoint.tensor_file import TensorFile

STANDALONE = Path(__file__).parents[1] / "golden" / "standalone"


@pytest.fixture(scope="session")
def micro() -> dict[str, np.ndarray]:
    """`sinkhorn.{logits,iters1,iters2,iters20}` and `candidates.*`."""
    file = TensorFile.open(STANDALONE / "micro.safetensors")
    return {name: np.asarray(file.tensor(name)) for name in file.entries}
