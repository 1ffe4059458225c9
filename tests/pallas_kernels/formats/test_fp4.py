"""FP4 with both kinds of scales: golden vectors, ties, saturation, packing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from widemesh.pallas_kernels.formats import (
    E2M1,
    E4M3,
    decode_mxfp4,
    decode_nvfp4,
    encode_mxfp4,
    encode_nvfp4,
    pack_nibbles,
    unpack_nibbles,
)
from widemesh.pallas_kernels.formats.fp4 import nvfp4_magnitude_code

CODECS = {"mxfp4_b32": (encode_mxfp4, decode_mxfp4), "nvfp4_b16": (encode_nvfp4, decode_nvfp4)}
ARRAYS = pytest.mark.parametrize("array", [np.asarray, jnp.asarray], ids=["numpy", "jax"])


@ARRAYS
@pytest.mark.parametrize("name", CODECS)
def test_golden_cache_rows(cache_quant, array, name):
    encode, decode = CODECS[name]
    packed, scales = encode(array(cache_quant.tensor(f"{name}.f32.x")))
    assert np.array_equal(unpack_nibbles(packed), cache_quant.tensor(f"{name}.f32.codes"))
    assert np.array_equal(scales, cache_quant.tensor(f"{name}.f32.scale_bytes"))
    assert np.array_equal(decode(packed, scales), cache_quant.tensor(f"{name}.f32.dequant"))


@ARRAYS
def test_golden_checkpoint_weights(checkpoint_dequant, array):
    packed = array(checkpoint_dequant.tensor("fp4_row32.weight").view(np.uint8))
    scales = array(checkpoint_dequant.tensor("fp4_row32.scale").view(np.uint8))
    assert np.array_equal(decode_mxfp4(packed, scales), checkpoint_dequant.tensor("fp4_row32.dequant_f32"))


@ARRAYS
def test_the_low_nibble_is_the_even_column(array):
    codes = array(np.uint8([[1, 2, 15, 0]]))
    packed = pack_nibbles(codes)
    assert packed.tolist() == [[0x21, 0x0F]]
    assert unpack_nibbles(packed).tolist() == codes.tolist()
    every_byte = array(np.arange(256, dtype=np.uint8)[None])
    assert np.array_equal(pack_nibbles(unpack_nibbles(every_byte)), every_byte)


def test_an_odd_width_is_refused():
    with pytest.raises(ValueError, match="33 values cannot be packed two to a byte"):
        encode_mxfp4(np.zeros((2, 33), np.float32))


def test_a_tie_that_a_reciprocal_would_break():
    x, scale = np.float32(0.03662109375), np.float32(0.029296875)
    assert x / scale == 1.25 and x * (np.float32(1) / scale) > 1.25
    row = np.zeros((1, 16), np.float32)
    row[0, :3] = x, -x, 6 * scale  # amax / 6 is exactly the scale, 15 * 2^-9
    for encode, decode in ((encode_nvfp4, decode_nvfp4), (jax.jit(encode_nvfp4), jax.jit(decode_nvfp4))):
        packed, scales = encode(row)
        assert unpack_nibbles(np.asarray(packed))[0, :3].tolist() == [2, 10, 7]
        assert decode(packed, scales)[0, :3].tolist() == [scale, -scale, 6 * scale]


def test_nvfp4_codes_are_those_of_the_true_quotient():
    # Every scale, magnitudes at every midpoint and the float32 values next to it, and random ones.
    scale = E4M3.decode(np.arange(1, 127, dtype=np.uint8))[:, None]
    middle = scale * np.float32([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    random = scale * np.random.default_rng(0).uniform(0, 7, size=(126, 100)).astype(np.float32)
    x = np.concatenate([middle, np.nextafter(middle, 0), np.nextafter(middle, np.float32(1e9)), random], axis=1)
    want = E2M1.magnitude_code(E2M1.round_magnitude(np.minimum(x / scale, np.float32(6))))
    assert np.array_equal(nvfp4_magnitude_code(x, scale), want)
    assert np.array_equal(jax.jit(nvfp4_magnitude_code)(x, scale), want)


def test_nvfp4_saturates_above_2784():
    x = np.zeros((2, 16), np.float32)
    x[0, :3] = 2785, 2000, -100
    x[1, :3] = 1e30, -np.inf, 2688
    for encode in (encode_nvfp4, jax.jit(encode_nvfp4)):
        packed, scales = encode(x)
        assert scales.tolist() == [[126], [126]]
        assert decode_nvfp4(packed, scales)[:, :3].tolist() == [[2688, 1792, -0.0], [2688, -2688, 2688]]


def test_the_scale_of_zeros_is_the_smallest():
    zeros = np.zeros((1, 32), np.float32)
    assert encode_mxfp4(zeros)[1].tolist() == [[1]]  # 2^-126
    assert encode_nvfp4(zeros)[1].tolist() == [[1, 1]]  # 2^-9


@pytest.mark.parametrize("name", CODECS)
def test_zeros_keep_their_sign(name):
    encode, decode = CODECS[name]
    packed, scales = encode(np.float32([[0.0, -0.0, 6.0, -1e-3]]))
    assert unpack_nibbles(packed)[0].tolist() == [0, 8, 7, 8]
    assert np.signbit(decode(packed, scales)[0]).tolist() == [False, True, False, True]


@pytest.mark.parametrize("name", CODECS)
def test_a_short_last_group_is_as_if_zero_padded(name):
    encode, decode = CODECS[name]
    x = np.random.default_rng(0).normal(size=(3, 40)).astype(np.float32)
    packed, scales = encode(x)
    padded_packed, padded_scales = encode(np.pad(x, [(0, 0), (0, 24)]))
    groups = scales.shape[1]
    assert np.array_equal(packed, padded_packed[:, :20]) and np.array_equal(scales, padded_scales[:, :groups])
    assert np.array_equal(decode(packed, scales), decode(padded_packed, padded_scales)[:, :40])


def test_encoding_decoded_mxfp4_again_changes_nothing(wide_range):
    values = decode_mxfp4(*encode_mxfp4(wide_range))
    assert np.array_equal(decode_mxfp4(*encode_mxfp4(values)), values)


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("name", CODECS)
def test_nan_spoils_its_group_only(name):
    encode, decode = CODECS[name]
    x = np.full((1, 64), 1.5, np.float32)
    x[0, 3] = np.nan
    size = 32 if name == "mxfp4_b32" else 16
    values = decode(*encode(x))
    assert np.isnan(values[0, :size]).all() and (values[0, size:] == 1.5).all()
