"""Named numerics and what each rounds."""

import jax.numpy as jnp
import numpy as np
import pytest

from widemesh.model.numerics import NUMERICS, numerics_named
from widemesh.pallas_kernels.formats import fake_quant_fp8
from widemesh.pallas_kernels.rounding import maybe_round_bf16, round_bf16

X = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)


@pytest.mark.parametrize(
    ("name", "rounds", "activations", "caches", "dtype"),
    [
        ("plain", False, False, False, "float32"),
        ("kvq", False, False, True, "float32"),
        ("w8a8", False, True, True, "float32"),
        ("reference", True, True, True, "bfloat16"),
    ],
)
def test_settings(name, rounds, activations, caches, dtype):
    numerics = numerics_named(name)
    assert numerics.cache_quant == caches
    assert np.array_equal(numerics.round(X), X) != rounds
    assert np.array_equal(numerics.quantise_activation(X), X) != activations
    if activations:
        assert np.array_equal(numerics.quantise_activation(X), fake_quant_fp8(X))
    assert numerics.store(X).dtype == jnp.dtype(dtype)


def test_rounding_is_to_the_nearest_even_bfloat16():
    x = np.array([1.0, 1.00390625, 1.01171875, -1.00390625, 1.0039064, 3e38, 1e-40, 0.0, -0.0], np.float32)
    wanted = x.astype(jnp.bfloat16).astype(np.float32)
    found = np.asarray(round_bf16(x))
    assert found.dtype == np.float32
    assert np.array_equal(found[:6], wanted[:6]) and not found[7:].any()
    assert found[1] == 1.0 and found[2] == 1.015625 and found[4] == 1.0078125  # two ties, and just past one
    assert abs(found[6]) <= 1.1e-38  # below the normal range it may be flushed


def test_rounding_agrees_with_a_cast_everywhere():
    bits = np.random.default_rng(1).integers(0, 2**32, 10000, dtype=np.uint32)
    x = bits.view(np.float32)
    x = x[np.isfinite(x) & (np.abs(x) > 1e-37)]
    assert np.array_equal(np.asarray(round_bf16(x)), x.astype(jnp.bfloat16).astype(np.float32))
    assert np.array_equal(maybe_round_bf16(x, False), x)


def test_unknown_name_lists_the_names():
    with pytest.raises(ValueError, match="numerics='fp16' is unknown; use one of plain, kvq, w8a8, reference"):
        numerics_named("fp16")
    assert list(NUMERICS) == ["plain", "kvq", "w8a8", "reference"]
