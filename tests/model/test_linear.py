"""Linears of the three kinds, and the norm."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from widemesh.model.linear import Linear, RMSNorm
from widemesh.model.numerics import NUMERICS
from widemesh.pallas_kernels.formats import fake_quant_fp8

RNG = np.random.default_rng(0)
X, W = RNG.standard_normal((3, 40)).astype(np.float32), RNG.standard_normal((24, 40)).astype(np.float32)


def with_weight(module, weight):
    """The module with its one parameter set."""
    graph, state = nnx.split(module)
    state["weight"] = state["weight"].replace(jnp.asarray(weight))
    return nnx.merge(graph, state)


def on_grid(x):
    """Whether bfloat16 holds every value."""
    return np.array_equal(x.astype(ml_dtypes.bfloat16).astype(np.float32), x)


@pytest.mark.parametrize("numerics", [name for name, numerics in NUMERICS.items() if not numerics.packed_weights])
@pytest.mark.parametrize("kind", ["quantised", "bf16", "f32"])
def test_linear(kind, numerics):
    """y = x W^T; only `quantised` quantises its input, only `f32` leaves its output unrounded."""
    linear = with_weight(Linear((24, None), (40, None), kind=kind), W)
    found = np.asarray(linear(X, NUMERICS[numerics]))
    quantised = kind == "quantised" and NUMERICS[numerics].act_quant
    exact = np.asarray(fake_quant_fp8(X) if quantised else X, np.float64) @ W.T.astype(np.float64)
    rounded = kind != "f32" and NUMERICS[numerics].bf16_rounding
    np.testing.assert_allclose(found, exact, rtol=2**-8 if rounded else 2e-6, atol=1e-5)
    assert on_grid(found) == rounded


def test_activation_groups_of_32_with_a_short_last_one():
    """40 inputs: a large value in the last 8 leaves the rounding of the first 32 alone."""
    linear = with_weight(Linear((40, None), (40, None), kind="quantised"), np.eye(40))
    x = X[:1].copy()
    first = np.asarray(linear(x, NUMERICS["w8a8"]))[0, :32]
    x[0, 39] = 1e4
    found = np.asarray(linear(x, NUMERICS["w8a8"]))[0]
    assert np.array_equal(found[:32], first)
    assert not (found[32:39] % 2**-4).any()  # 1e4 needs a scale of 32, whose smallest step is 2^-9


@pytest.mark.parametrize("scale", [1.0, 1e-12, 1e12])
def test_norm(scale):
    """The eps of 1e-20 shows in values of 1e-12, whose mean square is 1e-24."""
    weight = RNG.standard_normal(40).astype(np.float32)
    x = (X * scale).astype(np.float32)
    found = np.asarray(with_weight(RMSNorm(40, eps=1e-20), weight)(x, NUMERICS["plain"]))
    wide = x.astype(np.float64)
    wanted = wide / np.sqrt((wide * wide).mean(-1, keepdims=True) + 1e-20) * weight
    np.testing.assert_allclose(found, wanted, rtol=2e-6, atol=1e-7)


def test_norm_multiplies_by_the_weight_before_it_rounds():
    weight = RNG.standard_normal(40).astype(np.float32)
    norm = with_weight(RMSNorm(40, eps=1e-6), weight)
    exact = np.asarray(norm(X, NUMERICS["plain"]))
    found = np.asarray(norm(X, NUMERICS["reference"]))
    assert np.array_equal(found, exact.astype(ml_dtypes.bfloat16).astype(np.float32))
