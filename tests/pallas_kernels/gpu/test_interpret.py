"""The interpreter: right values, races found, and no traces left behind."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from widemesh.pallas_kernels.gpu import interpret, interpreted, is_interpreted, kernel_options


@pytest.fixture(scope="module")
def operands(square):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal(shape.shape), shape.dtype) for shape in (square.A, square.B)]


@pytest.mark.parametrize("has_store", [True, False])  # as in jax 0.12, as in jax 0.11
@pytest.mark.parametrize("target", ["H200", "B200"])
def test_a_kernel_gives_the_product(square, operands, target, has_store, monkeypatch):
    if not has_store:
        monkeypatch.delattr(plgpu, "store", raising=False)
    a, b = operands
    with interpreted(target) as facts:
        assert facts.name == target and is_interpreted()
        product = np.asarray(jax.jit(lambda a, b: square.square(a, b))(a, b))  # traced anew
    np.testing.assert_allclose(product, np.asarray(a, np.float32) @ np.asarray(b, np.float32), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("target", ["H200", "B200"])
def test_a_missing_wait_is_a_race_and_spoils_nothing(square, operands, target):
    a, b = operands
    with pytest.raises(Exception, match="RACE DETECTED"), interpreted(target):
        np.asarray(square.square(a, b, wait=False))
    with interpreted(target):
        product = np.asarray(square.square(a, b))
    np.testing.assert_allclose(product, np.asarray(a, np.float32) @ np.asarray(b, np.float32), rtol=1e-5, atol=1e-5)


def test_outside_nothing_is_interpreted():
    with interpreted():
        assert kernel_options()["interpret"].detect_races
    assert not is_interpreted() and kernel_options() == {}


def test_an_unknown_target_is_an_error():
    with pytest.raises(ValueError, match="target='A100' must be one of H100, H200, B200, B300"), interpreted("A100"):
        pass


def test_a_swap_is_declared_once(monkeypatch):
    monkeypatch.setattr(interpret, "_swaps", [])
    told = {"kernel": "k", "missing": "wgmma with A in registers", "staged": "A written to shared memory first"}
    assert interpret.swap(**told) == interpret.swap(**told)
    assert interpret.swaps() == (interpret.Swap(**told),)
