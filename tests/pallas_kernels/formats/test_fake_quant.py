"""Fake quantisation equals decode(encode(x)) bit for bit inside compiled programs."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from widemesh.pallas_kernels.formats import (
    decode_fp8_rows,
    decode_mxfp4,
    decode_nvfp4,
    encode_fp8_rows,
    encode_mxfp4,
    encode_nvfp4,
    fake_quant_fp8,
    fake_quant_mxfp4,
    fake_quant_nvfp4,
)

FORMATS = {
    "fp8_b32": (fake_quant_fp8, encode_fp8_rows, decode_fp8_rows),
    "mxfp4_b32": (fake_quant_mxfp4, encode_mxfp4, decode_mxfp4),
    "nvfp4_b16": (fake_quant_nvfp4, encode_nvfp4, decode_nvfp4),
}
EACH = pytest.mark.parametrize("name", FORMATS)


def bits(x) -> np.ndarray:
    """float32 bits, so that zeros of different sign differ."""
    return np.asarray(x, np.float32).view(np.int32)


@EACH
def test_golden_values_float32_and_bfloat16(cache_quant, name):
    fake = jax.jit(FORMATS[name][0])
    for dtype in ("f32", "bf16"):
        got = fake(cache_quant.tensor(f"{name}.{dtype}.x"))
        want = cache_quant.tensor(f"{name}.{dtype}.dequant")
        assert got.dtype == want.dtype and np.array_equal(got, want)


@EACH
def test_equals_the_codec_on_many_magnitudes(wide_range, name):
    fake, encode, decode = FORMATS[name]
    want = bits(decode(*encode(wide_range)))
    assert np.array_equal(bits(fake(wide_range)), want)
    assert np.array_equal(bits(jax.jit(fake)(wide_range)), want)
    assert np.array_equal(bits(jax.jit(lambda x: decode(*encode(x)))(wide_range)), want)


@EACH
def test_fused_between_other_arithmetic(wide_range, name):
    fake, encode, decode = FORMATS[name]
    program = jax.jit(lambda a, b: fake((a + b).reshape(16, 16, 128)) * 2)
    a, b = wide_range, wide_range[::-1].copy()
    assert np.array_equal(bits(program(a, b)), bits(2 * decode(*encode((a + b).reshape(16, 16, 128)))))


@EACH
def test_is_idempotent_except_for_rescaled_nvfp4(wide_range, name):
    # An NVFP4 group whose largest value rounded down gets a smaller scale the second time.
    fake = jax.jit(FORMATS[name][0])
    once = fake(wide_range)
    unchanged = bits(fake(once)) == bits(once)
    assert unchanged.all() if name != "nvfp4_b16" else unchanged.mean() > 0.5


@EACH
@pytest.mark.parametrize("width", [2, 16, 40, 72])
def test_ragged_widths(name, width):
    fake, encode, decode = FORMATS[name]
    x = np.random.default_rng(width).normal(size=(5, width)).astype(np.float32)
    assert np.array_equal(bits(jax.jit(fake)(x)), bits(decode(*encode(x))))


@EACH
def test_values_are_exact_in_bfloat16(wide_range, name):
    got = np.asarray(jax.jit(FORMATS[name][0])(wide_range))
    assert np.array_equal(got, got.astype(ml_dtypes.bfloat16).astype(np.float32))


@EACH
def test_every_rounding_error_is_within_half_a_step(wide_range, name):
    got = np.asarray(FORMATS[name][0](jnp.asarray(wide_range)))
    size, largest, relative, least_amax = {
        "fp8_b32": (32, 448, 2**-4, 1e-4),
        "mxfp4_b32": (32, 6, 2**-2, 0),
        "nvfp4_b16": (16, 6, 2**-2, 6 * 2**-6),  # below it the scale is a subnormal E4M3
    }[name]
    x, got = wide_range.reshape(-1, size), got.reshape(-1, size)
    amax = np.abs(x).max(axis=1, keepdims=True)
    inside = (amax[:, 0] > least_amax) & (amax[:, 0] < 2688)
    # A scale is at most twice amax / largest; the smallest step is scale / 2 in FP4 and scale / 512 in FP8.
    smallest = 2 * amax / largest * (2**-10 if name == "fp8_b32" else 2**-2)
    bound = np.maximum(np.abs(x) * relative, smallest)
    assert inside.sum() > 100
    assert np.all((np.abs(got - x) <= bound)[inside])


@EACH
def test_nan_is_not_hidden(name):
    x = np.full((1, 64), 1.5, np.float32)
    x[0, 3] = np.nan
    got = np.asarray(jax.jit(FORMATS[name][0])(x))[0]
    size = 16 if name == "nvfp4_b16" else 32
    assert np.isnan(got[:size]).all() and (got[size:] == 1.5).all()
