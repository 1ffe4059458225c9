"""Chunks and single tokens through the caches give what one forward gives, and what is golden."""

import numpy as np
import pytest

from widemesh.model.forward import ForwardModel, Mode
from widemesh.model.numerics import NUMERICS


@pytest.fixture(scope="module")
def models():
    """Loaded models by folder; each keeps its programs."""
    return {}


def test_packed_pages_of_any_size(golden, distance):
    """Through FP8 rings and FP4 pages, in chunks with odd edges: golden, but for a value on a rounding boundary."""
    ids, wanted = golden.inputs["long"][0], golden.outputs["kvq"]["logits"][0]
    good = []
    for page_size, chunk in ((2, 5), (4, 7), (16, 3), (64, 1)):
        found = ForwardModel.load(golden.folder, NUMERICS["kvq"], page_size).logits(ids, Mode(chunk=chunk))
        errors = distance(found, wanted)
        good.append(np.median(errors) < 1e-5 and np.mean(errors < 1e-4) >= 0.95)
        assert np.median(errors) < 0.15
    assert sum(good) >= 3


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
