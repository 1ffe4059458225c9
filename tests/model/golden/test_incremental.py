"""Chunks and single tokens through the caches give what one forward gives, and what is golden."""

import numpy as np
import pytest

from widemesh.model.forward import ForwardModel, Mode
from widemesh.model.numerics import NUMERICS


@pytest.fixture(scope="module")
def models():
    """Loaded models by folder; each keeps its programs."""
    return {}


@pytest.mark.parametrize("chunk", [None, 1, 3, 7])
def test_chunks_equal_one_forward(golden, models, distance, chunk):
    """An odd length, so that the last chunk is short and a group of two stays open at most chunk edges."""
    if golden.folder not in models:
        models[golden.folder] = ForwardModel.load(golden.folder, NUMERICS["plain"])
    model, ids = models[golden.folder], golden.inputs["long"][0]
    logits = model.logits(ids, Mode(chunk=chunk))
    assert distance(logits, golden.outputs["plain"]["logits"][0]).max() < 2e-5
    errors = distance(logits, model.logits(ids))
    assert np.median(errors) < 1e-5
    assert errors.max() < 5e-5
