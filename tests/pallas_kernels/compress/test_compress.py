"""Pooling of a group."""

import numpy as np
import pytest

from widemesh.pallas_kernels.compress import pool_group

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("ratio", [1, 2, 4])
def test_channelwise_softmax_over_the_group(ratio):
    values, gates = RNG.standard_normal((2, 3, 5, ratio, 8)).astype(np.float32)
    share = np.exp(gates.astype(np.float64))
    share /= share.sum(-2, keepdims=True)
    np.testing.assert_allclose(pool_group(values, gates), (share * values).sum(-2), rtol=1e-5, atol=1e-6)


def test_each_channel_has_its_own_gate():
    values = np.array([[1.0, 1.0], [5.0, 5.0]], np.float32)
    gates = np.array([[100.0, -100.0], [-100.0, 100.0]], np.float32)
    assert np.asarray(pool_group(values, gates)).tolist() == [1.0, 5.0]


def test_large_gates_do_not_overflow():
    values, gates = np.ones((2, 4), np.float32), np.full((2, 4), 1e30, np.float32)
    assert np.array_equal(pool_group(values, gates), np.ones(4))
