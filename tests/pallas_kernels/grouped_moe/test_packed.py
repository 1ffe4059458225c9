"""The grouped MoE on FP4 matrices: the reference against the MoE on decoded values, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from widemesh.pallas_kernels.formats import encode_mxfp4
from widemesh.pallas_kernels.gpu import interpreted
from widemesh.pallas_kernels.grouped_moe import ExpertMath, PackedExperts, PackedMatrix, grouped_moe, grouped_moe_packed

T, K, X, D, F = 9, 2, 3, 80, 48  # the last group of a row of D is short
RNG = np.random.default_rng(0)
MATH = ExpertMath(limit=1.0, act_quant=True, bf16_rounding=True)


def packed(*shape):
    codes, scales = encode_mxfp4(RNG.standard_normal(shape).astype(np.float32))
    return PackedMatrix(codes=jnp.asarray(codes), scales=jnp.asarray(scales))


EXPERTS = PackedExperts(w1=packed(X, F, D), w3=packed(X, F, D), w2=packed(X, D, F))
INPUT = jnp.asarray(RNG.standard_normal((T, D)), jnp.bfloat16)
SLOTS = np.array([[0, 2], [-1, 2], [X, 0], [2, 0], [-1, -1], [2, -7], [0, 2], [2, 0], [X + 5, 2]], np.int32)
WEIGHTS = RNG.random((T, K), np.float32) + 0.1


def test_values_and_counts():
    found, counts = jax.jit(lambda *arrays: grouped_moe_packed(*arrays, MATH))(INPUT, SLOTS, WEIGHTS, EXPERTS)
    assert found.dtype == jnp.float32 and counts.dtype == jnp.int32
    np.testing.assert_array_equal(counts, [5, 0, 7])
    matrices = [matrix.decode() for matrix in (EXPERTS.w1, EXPERTS.w3, EXPERTS.w2)]
    expected = grouped_moe(INPUT.astype(jnp.float32), SLOTS, WEIGHTS, *matrices, MATH)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    assert not np.asarray(found)[4].any() and np.asarray(found)[0].any()


def test_no_rows():
    found, counts = grouped_moe_packed(INPUT[:0], SLOTS[:0], WEIGHTS[:0], EXPERTS, MATH)
    assert found.shape == (0, D) and not np.asarray(counts).any() and counts.shape == (X,)


def test_sizes():
    assert (EXPERTS.held, EXPERTS.hidden, EXPERTS.width) == (X, D, F)
    assert EXPERTS.w1.shape == (X, F, D) and EXPERTS.w1.scales.shape == (X, F, 3)


def refused(message, *, x=INPUT, experts=EXPERTS, implementation=None):
    with pytest.raises(ValueError, match=message):
        grouped_moe_packed(x, SLOTS, WEIGHTS, experts, MATH, implementation=implementation)


def test_matrices_that_do_not_fit():
    refused(r"w1 holds matrices \(3, 48, 80\) for rows of 64 values; make it \(3, 48, 64\)", x=INPUT[:, :64])
    swapped = PackedExperts(w1=EXPERTS.w1, w3=EXPERTS.w3, w2=EXPERTS.w1)
    refused(r"w2 holds matrices \(3, 48, 80\) .* make it \(3, 80, 48\)", experts=swapped)
    short = PackedMatrix(codes=EXPERTS.w3.codes, scales=EXPERTS.w3.scales[..., :2])
    refused(
        r"w3.scales is \(3, 48, 2\); with a byte per 32 columns it is \(3, 48, 3\)",
        experts=PackedExperts(w1=EXPERTS.w1, w3=short, w2=EXPERTS.w2),
    )


def test_implementations():
    refused("implementation='fast' of grouped_moe_packed must be one of", implementation="fast")
    with interpreted("H200"):
        refused("hidden size 80 must be a multiple of 256 for the H200 kernel; pad to 256")
