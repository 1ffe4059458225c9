"""Golden vectors of the quantised formats, made by a public PyTorch implementation of the architecture."""

from pathlib import Path

import numpy as np
import pytest

from widemesh.model.checkpoint.tensor_file import TensorFile

STANDALONE = Path(__file__).parents[2] / "golden" / "standalone"


@pytest.fixture(scope="session")
def cache_quant() -> TensorFile:
    """`{fp8_b32,mxfp4_b32,nvfp4_b16}.f32.{x,codes,scale_bytes,dequant}` and `.bf16.{x,dequant}`, rows of 128."""
    return TensorFile.open(STANDALONE / "cache_quant.safetensors")


@pytest.fixture(scope="session")
def checkpoint_dequant() -> TensorFile:
    """`{fp8_32x32,fp8_row32,fp4_row32}.{weight,scale,dequant_f32}`."""
    return TensorFile.open(STANDALONE / "checkpoint_dequant.safetensors")


@pytest.fixture(scope="session")
def wide_range() -> np.ndarray:
    """float32 [256, 128] over many magnitudes: within groups and between them, with zeros of both signs."""
    rng = np.random.default_rng(7)
    x = rng.normal(size=(256, 128)) * 2.0 ** rng.integers(-8, 3, size=(256, 128))
    x *= 2.0 ** rng.integers(-30, 16, size=(256, 1))
    x[rng.random(x.shape) < 0.05] = 0.0
    x[rng.random(x.shape) < 0.05] = -0.0
    x[3] = 0.0
    # Half the rows on coarse grids, where ties are frequent.
    coarse = np.round(rng.normal(size=(128, 128)) * 8) / 8 * 2.0 ** rng.integers(-6, 6, size=(128, 1))
    return np.concatenate([x[:128], coarse]).astype(np.float32)
