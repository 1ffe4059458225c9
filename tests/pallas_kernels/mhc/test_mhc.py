"""Coefficients, collapse and expand of the residual streams."""

import numpy as np
import pytest

from widemesh.pallas_kernels import mhc

RNG = np.random.default_rng(0)
T, C, D = 5, 4, 24


def normal(*shape, scale=1.0):
    return (scale * RNG.standard_normal(shape)).astype(np.float32)


@pytest.mark.parametrize("iterations", [1, 2, 20])
def test_sinkhorn_is_golden(micro, iterations):
    found = np.asarray(mhc.sinkhorn(micro["sinkhorn.logits"], iterations=iterations, eps=1e-6))
    assert np.abs(found - micro[f"sinkhorn.iters{iterations}"]).max() < 2e-7
    assert np.abs(found - micro["sinkhorn.iters20" if iterations < 20 else "sinkhorn.iters2"]).max() > 1e-5


def test_sinkhorn_ends_on_columns():
    """Sums over the input streams are 1 but for the epsilon; those over the output streams only nearly."""
    comb = np.asarray(mhc.sinkhorn(normal(T, C, C, scale=3), iterations=3, eps=1e-6))
    np.testing.assert_allclose(comb.sum(-2), 1, atol=5e-6)
    assert np.abs(comb.sum(-1) - 1).max() > 1e-4


@pytest.mark.parametrize("streams", [1, 2, 4])
def test_sinkhorn_of_any_batch_shape(streams):
    logits = normal(3, T, streams, streams)
    found = np.asarray(mhc.sinkhorn(logits, iterations=4, eps=1e-6))
    flat = np.asarray(mhc.sinkhorn(logits.reshape(-1, streams, streams), iterations=4, eps=1e-6))
    assert np.array_equal(found, flat.reshape(logits.shape))


def expected(streams, fn, base, scale, norm_eps):
    """pre, post and the logits of comb by the formula, in float64."""
    v = streams.reshape(len(streams), -1).astype(np.float64)
    m = v @ fn.T.astype(np.float64) / np.sqrt((v * v).mean(-1, keepdims=True) + norm_eps)
    sigmoid = lambda x: 1 / (1 + np.exp(-x))  # noqa: E731
    logits = (m[:, 2 * C :] * scale[2] + base[2 * C :]).reshape(-1, C, C)
    pre, post = sigmoid(m[:, :C] * scale[0] + base[:C]), sigmoid(m[:, C : 2 * C] * scale[1] + base[C : 2 * C])
    return pre + 1e-6, 2 * post, logits


@pytest.mark.parametrize(("size", "rows"), [(1.0, T), (1e-12, T), (1e6, T), (1.0, 256)])
def test_coefficients(size, rows):
    """One statistic over all streams; an eps of 1e-20 shows in streams of 1e-12. Many rows have a product of their
    own."""
    streams, fn, base, scale = normal(rows, C, D, scale=size), normal(24, C * D, scale=0.3), normal(24), normal(3)
    found = mhc.coefficients(streams, fn, base, scale, iterations=5, hc_eps=1e-6, norm_eps=1e-20)
    pre, post, logits = expected(streams, fn, base, scale, 1e-20)
    np.testing.assert_allclose(found[0], pre, atol=1e-6)
    np.testing.assert_allclose(found[1], post, atol=2e-6)
    comb = mhc.sinkhorn(logits.astype(np.float32), iterations=5, eps=1e-6)
    np.testing.assert_allclose(found[2], comb, atol=5e-6)


def test_collapse():
    streams, pre = normal(2, T, C, D), normal(2, T, C)
    wanted = np.einsum("btc,btcd->btd", pre, streams)
    np.testing.assert_allclose(mhc.collapse(streams, pre), wanted, rtol=1e-5, atol=1e-5)


def test_expand_sums_over_the_input_streams():
    out, streams, post, comb = normal(T, D), normal(T, C, D), normal(T, C), normal(T, C, C)
    wanted = post[:, :, None] * out[:, None] + np.einsum("tjk,tjd->tkd", comb, streams)
    np.testing.assert_allclose(mhc.expand(out, streams, post, comb), wanted, rtol=1e-5, atol=1e-5)
    assert np.abs(np.asarray(mhc.expand(out, streams, post, comb.swapaxes(1, 2))) - wanted).max() > 0.1


def test_a_permutation_moves_the_streams():
    """comb[j, k] = 1 sends input stream j to output stream k."""
    streams = normal(1, C, D)
    comb = np.zeros((1, C, C), np.float32)
    comb[0, [0, 1, 2, 3], [2, 0, 3, 1]] = 1
    found = np.asarray(mhc.expand(np.zeros((1, D), np.float32), streams, np.zeros((1, C), np.float32), comb))
    assert np.array_equal(found[0, [2, 0, 3, 1]], streams[0])
