"""Whole packed models against the f32 path over the same weights, and against themselves however a list is fed."""

from __future__ import annotations

import numpy as np
import pytest

from widemesh.model.forward import Mode
from widemesh.model.numerics import NUMERICS, Numerics

IDS = np.random.default_rng(1).integers(3, 120, 16).astype(np.int32)
# The packed ops in f32: the arithmetic of `w8a8` over the bytes of `serving`.
PACKED_F32 = Numerics(cache_quant=True, act_quant=True, packed_weights=True)


def distance(found, wanted):
    return np.linalg.norm(found - wanted, axis=-1) / np.linalg.norm(wanted, axis=-1)


@pytest.fixture(scope="module")
def model(weights):
    return weights("tiny-structure")


@pytest.mark.parametrize("chunk", [None, 1])
def test_packed_ops_in_f32_are_the_f32_path(model, chunk):
    """The same arithmetic up to the order of sums; a row whose value falls over a rounding boundary may differ more."""
    wanted = model.model(NUMERICS["w8a8"]).logits(IDS)
    error = distance(model.model(PACKED_F32).logits(IDS, Mode(chunk=chunk)), wanted)
    assert np.median(error) < 1e-4 and np.mean(error < 0.02) >= 0.8


def test_bfloat16_in_chunks_gives_what_the_whole_list_gives(model):
    """Other shapes sum in another order, which bfloat16 and FP8 make larger: by no more than f32 is away.

    A random model makes a rounding anywhere into 10% of a logit or more, so the distance to f32 is the measure.
    """
    packed = model.model(NUMERICS["serving"])
    wanted = packed.logits(IDS)
    found = packed.logits(IDS, Mode(chunk=5))
    assert np.isfinite(wanted).all() and found.dtype == np.float32
    noise = distance(wanted, model.model(NUMERICS["w8a8"]).logits(IDS))
    error = distance(found, wanted)
    assert error[0] < 1e-5  # nothing but itself
    assert np.median(error) < np.median(noise) < 0.5
