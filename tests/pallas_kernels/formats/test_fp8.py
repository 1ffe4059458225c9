"""FP8 rows and blocks: golden vectors, edges, the floor, signs, NaN."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from widemesh.pallas_kernels.formats import decode_fp8_blocks, decode_fp8_rows, encode_fp8_blocks, encode_fp8_rows


@pytest.mark.parametrize("array", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
def test_golden_cache_rows(cache_quant, array):
    codes, scales = encode_fp8_rows(array(cache_quant.tensor("fp8_b32.f32.x")))
    assert np.array_equal(codes, cache_quant.tensor("fp8_b32.f32.codes"))
    assert np.array_equal(scales, cache_quant.tensor("fp8_b32.f32.scale_bytes"))
    assert np.array_equal(decode_fp8_rows(codes, scales), cache_quant.tensor("fp8_b32.f32.dequant"))


@pytest.mark.parametrize("array", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
@pytest.mark.parametrize(("name", "decode"), [("fp8_32x32", decode_fp8_blocks), ("fp8_row32", decode_fp8_rows)])
def test_golden_checkpoint_weights(checkpoint_dequant, array, name, decode):
    codes = array(checkpoint_dequant.tensor(f"{name}.weight").view(np.uint8))
    scales = array(checkpoint_dequant.tensor(f"{name}.scale").view(np.uint8))
    assert np.array_equal(decode(codes, scales), checkpoint_dequant.tensor(f"{name}.dequant_f32"), equal_nan=True)


def test_amax_below_the_floor_uses_the_floor():
    x = np.full((1, 32), 5e-5, np.float32)
    x[0, 1] = -3e-8
    codes, scales = encode_fp8_rows(x)
    assert scales.tolist() == [[127 - 22]]  # 1e-4 / 448 -> 2^-22, whatever the values are
    values = decode_fp8_rows(codes, scales)
    assert values[0, 0] == 208 * 2.0**-22  # 5e-5 * 2^22 = 209.7, in steps of 16
    assert values[0, 1] == -0.125 * 2.0**-22


def test_zeros_keep_their_sign():
    codes, scales = encode_fp8_rows(np.float32([[0.0, -0.0, 1.0, -1e-12]]))
    assert codes[0].tolist() == [0, 128, 120, 128]
    assert np.signbit(decode_fp8_rows(codes, scales)[0]).tolist() == [False, True, False, True]


def test_a_short_last_group_is_as_if_zero_padded():
    x = np.random.default_rng(0).normal(size=(3, 40)).astype(np.float32)
    codes, scales = encode_fp8_rows(x)
    padded_codes, padded_scales = encode_fp8_rows(np.pad(x, [(0, 0), (0, 24)]))
    assert codes.shape == (3, 40) and scales.shape == (3, 2)
    assert np.array_equal(codes, padded_codes[:, :40]) and np.array_equal(scales, padded_scales)


def test_blocks_round_to_their_own_scale_with_partial_edges():
    rng = np.random.default_rng(3)
    w = (rng.normal(size=(72, 80)) * np.repeat(2.0 ** rng.integers(-9, 9, size=(72, 8)), 10, axis=1)).astype(np.float32)
    codes, scales = encode_fp8_blocks(w)
    assert codes.shape == (72, 80) and scales.shape == (3, 3)
    values = decode_fp8_blocks(codes, scales)
    for row in range(0, 72, 32):
        for column in range(0, 80, 32):
            block = w[row : row + 32, column : column + 32]
            _, alone_scales = encode_fp8_rows(block.reshape(1, -1))
            scale = 2.0 ** (scales[row // 32, column // 32] - 127.0)
            assert scale == 2.0 ** np.ceil(np.log2(np.abs(block).max() / 448))  # no amax here is 448 * 2^k
            assert alone_scales.max() == scales[row // 32, column // 32]
            error = np.abs(values[row : row + 32, column : column + 32] - block)
            assert np.all(error <= np.maximum(np.abs(block) / 16, scale * 2.0**-10))
    assert np.array_equal(jax.jit(encode_fp8_blocks)(w)[0], codes)
    assert np.array_equal(jax.jit(encode_fp8_blocks)(w)[1], scales)
    assert np.array_equal(jax.jit(decode_fp8_blocks)(codes, scales), values)


def test_encoding_decoded_values_again_changes_nothing(wide_range):
    values = decode_fp8_blocks(*encode_fp8_blocks(wide_range))
    assert np.array_equal(decode_fp8_blocks(*encode_fp8_blocks(values)), values)


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_spoils_its_group_only(bad):
    x = np.ones((1, 64), np.float32)
    x[0, 3] = bad
    codes, scales = encode_fp8_rows(x)
    assert scales[0, 0] == 255
    values = decode_fp8_rows(codes, scales)
    assert np.isnan(values[0, :32]).all() and (values[0, 32:] == 1).all()
