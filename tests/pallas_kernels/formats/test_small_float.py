"""E4M3 and E2M1 against ml_dtypes: every code, and rounding between all neighbours."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from widemesh.pallas_kernels.formats import E2M1, E4M3

PEERS = [(E4M3, ml_dtypes.float8_e4m3fn, 256), (E2M1, ml_dtypes.float4_e2m1fn, 16)]
IDS = ["E4M3", "E2M1"]


def same_bits(got, want) -> bool:
    """Equality of float32 arrays down to the sign of zero; all NaN are one value."""
    got, want = np.asarray(got, np.float32), np.asarray(want, np.float32)
    both_nan = np.isnan(got) & np.isnan(want)
    return bool(np.all((got.view(np.int32) == want.view(np.int32)) | both_nan))


@pytest.mark.parametrize(("small", "peer", "count"), PEERS, ids=IDS)
def test_every_code_decodes_like_ml_dtypes(small, peer, count):
    codes = np.arange(count, dtype=np.uint8)
    want = codes.view(peer).astype(np.float32)
    assert same_bits(small.decode(codes), want)
    assert same_bits(small.decode(jnp.asarray(codes)), want)
    assert same_bits(jax.jit(small.decode)(codes), want)


def test_e2m1_magnitudes_are_the_published_ones():
    assert E2M1.decode(np.arange(16, dtype=np.uint8)).tolist() == [
        0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6,
    ]  # fmt: skip


@pytest.mark.parametrize(("small", "peer", "count"), PEERS, ids=IDS)
def test_rounding_at_and_around_every_midpoint(small, peer, count):
    magnitudes = np.unique(small.decode(np.arange(count // 2, dtype=np.uint8)))
    magnitudes = magnitudes[np.isfinite(magnitudes)]
    middle = ((magnitudes[1:].astype(np.float64) + magnitudes[:-1]) / 2).astype(np.float32)
    y = np.concatenate([magnitudes, middle, np.nextafter(middle, 0), np.nextafter(middle, np.float32(1e9))])
    want = y.astype(peer).astype(np.float32)
    for rounded in (small.round_magnitude(y), jax.jit(small.round_magnitude)(y)):
        assert same_bits(rounded, want)
        assert np.array_equal(small.magnitude_code(np.asarray(rounded)), want.astype(peer).view(np.uint8))
    assert np.array_equal(jax.jit(small.magnitude_code)(want), want.astype(peer).view(np.uint8))


def test_e2m1_ties_go_to_even():
    ties = np.float32([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert E2M1.round_magnitude(ties).tolist() == [0, 1, 1, 2, 2, 4, 4]


@pytest.mark.parametrize(("small", "peer", "count"), PEERS, ids=IDS)
def test_rounding_random_magnitudes(small, peer, count):
    rng = np.random.default_rng(1)
    y = (rng.random(50_000) * 2.0 ** rng.integers(-20, 12, 50_000)).astype(np.float32)
    y = y[y <= small.largest]
    want = y.astype(peer).astype(np.float32)
    assert same_bits(small.round_magnitude(y), want)
    assert same_bits(jax.jit(small.round_magnitude)(y), want)
