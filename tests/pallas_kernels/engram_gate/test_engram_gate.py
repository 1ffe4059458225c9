"""Gate and update of Engram."""

import numpy as np
import pytest

from widemesh.pallas_kernels.engram_gate import engram_gate, engram_update

RNG = np.random.default_rng(0)
T, C, D = 6, 3, 16


def gate_of(match):
    """The gate as a function of the match."""
    root = np.copysign(np.sqrt(np.maximum(np.abs(match), 1e-6)), match)
    return 1 / (1 + np.exp(-root))


@pytest.mark.parametrize("size", [1.0, 1e-12])
def test_gate(size):
    """Each stream and each key is divided by its own RMS; eps 1e-20 shows in values of 1e-12."""
    streams, key = (size * RNG.standard_normal((2, T, C, D))).astype(np.float32)
    streams[:, 0] *= 1000
    qk = RNG.standard_normal((C, D)).astype(np.float32)
    unit = lambda x: x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-20)  # noqa: E731
    match = (unit(streams) * qk * unit(key)).sum(-1) * D**-0.5
    np.testing.assert_allclose(engram_gate(streams, key, qk, eps=1e-20), gate_of(match), rtol=1e-4)


@pytest.mark.parametrize("match", [1e-7, -1e-7, 0.0, 4.0, -4.0])
def test_small_matches_keep_their_sign(match):
    """Below 1e-6 the size of a match counts as 1e-6; its sign stays."""
    streams = np.ones((1, 1, 4), np.float32)
    key = np.ones((1, 1, 4), np.float32)
    qk = np.full((1, 4), match / 2, np.float32)  # four products, divided by the root of 4
    found = float(engram_gate(streams, key, qk, eps=0.0)[0, 0])
    assert found == pytest.approx(gate_of(match), abs=1e-7)
    assert (found > 0.5) == (np.copysign(1, match) > 0)


def test_update_adds_one_value_to_every_stream():
    streams = RNG.standard_normal((T, C, D)).astype(np.float32)
    gate, value = RNG.random((T, C)).astype(np.float32), RNG.standard_normal((T, D)).astype(np.float32)
    found = engram_update(streams, gate, value)
    np.testing.assert_allclose(found, streams + gate[:, :, None] * value[:, None], rtol=1e-6, atol=1e-6)
    assert np.array_equal(engram_update(streams, gate * 0, value), streams)
