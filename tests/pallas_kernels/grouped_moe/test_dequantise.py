"""FP4 decoding: the array form, and the register arithmetic of the kernels on NumPy words, for every byte."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from widemesh.pallas_kernels.formats import E2M1
from widemesh.pallas_kernels.formats.scales import decode_e8m0
from widemesh.pallas_kernels.grouped_moe import dequantise
from widemesh.pallas_kernels.grouped_moe.dequantise import RESIDUE, decode_arrays, pair_bits, pair_scale

BYTES = np.arange(256, dtype=np.uint8)


def bf16_halves(words):
    """The two bfloat16 values of each word, [..., 2] in float64."""
    return words.astype(np.uint32)[..., None].view(np.uint16).view(ml_dtypes.bfloat16).astype(np.float64)


@pytest.mark.parametrize("high", [False, True], ids=["low", "high"])
def test_pairs_of_values_for_all_pairs_of_bytes(high):
    first, second = np.meshgrid(BYTES.astype(np.uint32), BYTES.astype(np.uint32))
    values = bf16_halves(pair_bits(first | second << 16, high=high)) * 2.0**126
    table = np.asarray(E2M1.table, np.float64)
    nibble = (lambda b: b >> 4) if high else (lambda b: b & 15)
    np.testing.assert_array_equal(values[..., 0], table[nibble(first)])
    np.testing.assert_array_equal(values[..., 1], table[nibble(second)])
    assert np.array_equal(np.signbit(values[..., 0]), nibble(first) >= 8)


def test_scales_leave_the_residue_out():
    """Code times 2^-126, times the factor, times the residue, is code times scale; exactly, in bfloat16 and f32."""
    usable = np.arange(65, 193, dtype=np.uint32)  # 2^-62 .. 2^65, infinity from there on
    factors = bf16_halves(pair_scale(usable))[..., 0]
    np.testing.assert_array_equal(factors[:-1] * 2.0**-126 * RESIDUE, decode_e8m0(usable[:-1].astype(np.uint8)))
    assert np.isposinf(factors[-1]) and usable[-1] == dequantise._LARGEST_SCALE
    smallest = np.float64(0.5) * 2.0**-126 * factors[0]
    assert smallest >= 2.0**-126, "a decoded weight must not be subnormal"


def test_array_form():
    codes = np.tile(BYTES, (64, 1))  # 256 bytes a row: 16 groups of 16
    scales = np.random.default_rng(0).integers(120, 134, (16, 64)).astype(np.uint8)
    decode = jax.jit(lambda codes, scales: decode_arrays(codes, list(scales)))
    factor = decode_e8m0(scales).T.repeat(16, axis=1)
    for values, nibbles in zip(decode(jnp.asarray(codes), jnp.asarray(scales)), (codes & 15, codes >> 4), strict=True):
        assert values.dtype == jnp.bfloat16
        np.testing.assert_array_equal(np.asarray(values, np.float32), E2M1.table[nibbles] * factor)
