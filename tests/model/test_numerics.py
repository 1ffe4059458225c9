"""Named numerics and what each rounds."""

import jax.numpy as jnp
import numpy as np
import pytest

from widemesh.model.numerics import NUMERICS, Numerics, numerics_named
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
    with pytest.raises(ValueError, match="numerics='fp16' is unknown; use one of plain, kvq, w8a8, reference, serving"):
        numerics_named("fp16")
    assert list(NUMERICS) == ["plain", "kvq", "w8a8", "reference", "serving"]


def test_serving_is_packed_on_a_gpu_and_kvq_on_a_cpu():
    """Without a platform it is the one that runs, here a CPU; every other name means the same everywhere."""
    on_gpu = numerics_named("serving", "gpu")
    assert on_gpu == NUMERICS["serving"]
    assert on_gpu.packed_weights and on_gpu.act_quant and on_gpu.cache_quant and not on_gpu.bf16_rounding
    assert on_gpu.round(X).dtype == on_gpu.store(X).dtype == jnp.bfloat16
    assert np.array_equal(on_gpu.round(X).astype(np.float32), np.asarray(round_bf16(X)))
    assert numerics_named("serving") == numerics_named("serving", "cpu") == NUMERICS["kvq"]
    assert all(numerics_named(name, "gpu") is NUMERICS[name] for name in NUMERICS)


def test_packed_weights_need_packed_caches():
    with pytest.raises(ValueError, match="packed_weights=True needs cache_quant=True"):
        Numerics(packed_weights=True)
