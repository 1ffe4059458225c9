"""Powers of two and group scales, against exact arithmetic in float64."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from widemesh.pallas_kernels.formats import decode_e8m0, encode_e8m0, pow2ceil
from widemesh.pallas_kernels.formats.bits import from_bits
from widemesh.pallas_kernels.formats.scales import (
    divide_by_six,
    encode_e4m3_scale,
    fp8_scale,
    mxfp4_scale,
    nvfp4_scale,
    power_reciprocal,
)


def exact_pow2ceil(v: np.ndarray) -> np.ndarray:
    """Smallest power of two >= v for positive float64, by frexp."""
    mantissa, exponent = np.frexp(v)
    return np.ldexp(1.0, np.where(mantissa == 0.5, exponent - 1, exponent))


def test_pow2ceil_of_exact_powers_and_their_neighbours():
    powers = np.ldexp(np.float32(1), np.arange(-125, 127)).astype(np.float32)
    above, below = np.nextafter(powers, np.float32(np.inf)), np.nextafter(powers, np.float32(0))
    for f in (pow2ceil, jax.jit(pow2ceil)):
        assert np.array_equal(f(powers), powers)
        assert np.array_equal(f(above), powers * 2)
        assert np.array_equal(f(below), powers)


def test_pow2ceil_at_the_ends():
    v = np.float32([0.0, 2.0**-126, 2.0**127, 2.0**127 * 1.001, np.inf, np.nan])
    want = np.float32([0.0, 2.0**-126, 2.0**127, np.nan, np.nan, np.nan])
    assert np.array_equal(pow2ceil(v), want, equal_nan=True)
    assert np.array_equal(jax.jit(pow2ceil)(v), want, equal_nan=True)
    assert pow2ceil(np.float32([1e-40]))[0] == np.float32(2.0**-126)


def test_every_e8m0_byte_decodes_like_ml_dtypes():
    byte = np.arange(256, dtype=np.uint8)
    want = byte.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    assert np.isnan(want[255])
    assert np.isnan(decode_e8m0(byte)[255])
    assert np.array_equal(decode_e8m0(byte)[:255], np.ldexp(1.0, np.arange(255) - 127))
    assert np.array_equal(decode_e8m0(byte), want, equal_nan=True)
    decoded = jax.jit(decode_e8m0)(byte)
    assert np.array_equal(np.asarray(decoded), want, equal_nan=True)
    assert np.array_equal(encode_e8m0(decode_e8m0(byte)), byte)
    # Byte 0 is subnormal and only exact while no arithmetic touches it.
    assert np.array_equal(jax.jit(encode_e8m0)(decoded)[1:], byte[1:])
    assert encode_e8m0(np.float32([np.inf]))[0] == 255


def test_reciprocals_of_powers_of_two():
    scale = np.ldexp(1.0, np.arange(-126, 127)).astype(np.float32)
    for f in (power_reciprocal, jax.jit(power_reciprocal)):
        assert np.array_equal(f(scale), 1 / scale)
        assert f(np.float32([np.nan]))[0] == 0


@pytest.mark.parametrize(("scale_of", "divisor", "floor"), [(fp8_scale, 448, 1e-4), (mxfp4_scale, 6, 6 * 2.0**-126)])
def test_power_scales_are_the_exact_ones(scale_of, divisor, floor):
    # The quotient in float32 must not misplace an amax next to divisor * 2^k.
    edges = np.float32(divisor) * np.ldexp(1.0, np.arange(-20, 20)).astype(np.float32)
    steps = np.arange(-2000, 2001, dtype=np.int32)
    amax = from_bits((edges.view(np.int32)[:, None] + steps).ravel())
    rng = np.random.default_rng(0)
    tiny = (floor * np.linspace(0, 1.5, 50)).astype(np.float32)
    amax = np.concatenate([amax, (rng.random(20_000) * 2.0 ** rng.integers(-30, 30, 20_000)).astype(np.float32), tiny])
    want = exact_pow2ceil(np.maximum(amax, np.float32(floor)).astype(np.float64) / divisor)
    assert np.array_equal(scale_of(amax), want)
    assert np.array_equal(jax.jit(scale_of)(amax), want)
    assert np.all(amax / want <= divisor)


def test_fp8_scale_floors_amax_not_the_scale():
    assert fp8_scale(np.float32([0, 1e-9, 1e-4])).tolist() == [2.0**-22] * 3
    assert fp8_scale(np.float32([1.9e-3]))[0] == 2.0**-17


def test_divide_by_six_is_correctly_rounded_under_jit():
    bits = np.int32(127 << 23) + np.arange(1 << 23, dtype=np.int32)  # every float32 of [1, 2)
    v = from_bits(bits)
    want = v / np.float32(6)
    assert np.array_equal(jax.jit(divide_by_six)(v), want)
    assert np.array_equal(divide_by_six(v[::97]), want[::97])
    # What it is there for: XLA's own quotient by a constant may be off. Either way ours is right.
    naive = np.asarray(jax.jit(lambda x: x / 6)(v))
    assert np.abs(naive.view(np.int32) - want.view(np.int32)).max() <= 1


def test_nvfp4_scale_rounds_like_e4m3_between_all_neighbours():
    grid = np.arange(1, 127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    middle = 6 * (grid[1:] + grid[:-1]) / 2
    amax = np.concatenate([6 * grid, middle, np.nextafter(middle, 0), np.nextafter(middle, np.float32(1e9))])
    amax = np.concatenate([amax, np.float32([0, 1e-30, 6 * 2.0**-9, 2688, 2784, 2785, 2800, 1e30, np.inf])])
    quotient = np.minimum(np.maximum(amax, np.float32(6 * 2.0**-9)) / np.float32(6), np.float32(448))
    want = quotient.astype(ml_dtypes.float8_e4m3fn)
    assert np.all(np.isfinite(want.astype(np.float32)))
    for f in (nvfp4_scale, jax.jit(nvfp4_scale)):
        assert np.array_equal(f(amax), want.astype(np.float32))
    assert np.array_equal(encode_e4m3_scale(nvfp4_scale(amax)), want.view(np.uint8))
    assert np.array_equal(jax.jit(lambda a: encode_e4m3_scale(nvfp4_scale(a)))(amax), want.view(np.uint8))


def test_nvfp4_scale_saturates_at_byte_126_and_keeps_nan():
    scale = nvfp4_scale(jnp.float32([2784, 3000, 1e38, np.nan]))
    assert scale[:3].tolist() == [448.0] * 3
    assert encode_e4m3_scale(scale).tolist() == [126, 126, 126, 127]
