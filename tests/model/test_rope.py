"""Rotary tables and the rotation, against the released settings' golden values."""

from pathlib import Path

import numpy as np
import pytest

from widemesh.model.checkpoint.tensor_file import TensorFile
from widemesh.model.config import RopeScaling
from widemesh.model.presets import PRESETS
from widemesh.model.rope import RopeTable, RopeTables, inverse_frequencies, rotate, table

GOLDEN = Path(__file__).parents[1] / "golden" / "standalone" / "rope.safetensors"
SETTINGS = {"swa": (10000.0, None), "compressed": (160000.0, RopeScaling())}  # released


@pytest.fixture(scope="module")
def golden():
    """`{swa,compressed}.*` at positions up to 1048575."""
    file = TensorFile.open(GOLDEN)
    return {name: np.asarray(file.tensor(name)) for name in file.entries}


@pytest.mark.parametrize("kind", SETTINGS)
def test_frequencies(golden, kind):
    """f32 powers may differ in the last bit from one library to the next."""
    found = inverse_frequencies(64, *SETTINGS[kind])
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, golden[f"{kind}.inv_freq"], rtol=2e-7)
    np.testing.assert_allclose(found, golden[f"{kind}.inv_freq_f64"], rtol=3e-7)


def test_yarn_changes_the_slow_pairs_only():
    """Between the released low and high pair (15 and 25) the two meet; past it all turn 16 times slower."""
    plain, yarn = inverse_frequencies(64, 160000.0, None), inverse_frequencies(64, 160000.0, RopeScaling())
    assert np.array_equal(plain[:16], yarn[:16]) and (yarn[16:] < plain[16:]).all()
    np.testing.assert_allclose(yarn[25:] * 16, plain[25:], rtol=1e-6)


@pytest.mark.parametrize("kind", SETTINGS)
def test_angles_are_f32_products(golden, kind):
    angles = golden["positions"][0].astype(np.float32)[:, None] * golden[f"{kind}.inv_freq"]
    assert np.array_equal(angles, golden[f"{kind}.angles"][0])


@pytest.mark.parametrize("kind", SETTINGS)
def test_functions_of_given_angles(golden, kind):
    """Table rows of the golden angles: position 1 times the angle as frequency."""
    for angle, cos, sin in zip(*(golden[f"{kind}.{name}"][0] for name in ("angles", "cos", "sin")), strict=True):
        row = table(angle, 2)
        np.testing.assert_allclose(row.cos[1], cos, atol=1e-6)
        np.testing.assert_allclose(row.sin[1], sin, atol=1e-6)


@pytest.mark.parametrize("kind", SETTINGS)
def test_small_positions_from_scratch(golden, kind):
    """Frequencies, angles and functions together."""
    positions = golden["positions"][0]
    near = positions < 4096
    found = table(inverse_frequencies(64, *SETTINGS[kind]), 4096)
    np.testing.assert_allclose(found.cos[positions[near]], golden[f"{kind}.cos"][0][near], atol=5e-4)
    np.testing.assert_allclose(found.sin[positions[near]], golden[f"{kind}.sin"][0][near], atol=5e-4)
    first = positions < 64
    np.testing.assert_allclose(found.cos[positions[first]], golden[f"{kind}.cos"][0][first], atol=1e-5)


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("kind", SETTINGS)
def test_rotation(golden, kind, inverse):
    """The last 64 channels in adjacent pairs; the others stay as they are. Row i of the table is golden position i."""
    x = golden[f"{kind}.x"]
    rows = RopeTable(*(np.asarray(golden[f"{kind}.{name}"][0]) for name in ("cos", "sin")))
    found = np.asarray(rotate(x, np.arange(x.shape[1])[None], as_jax(rows), inverse=inverse))
    np.testing.assert_allclose(found, golden[f"{kind}.{'inverse_' if inverse else ''}rotated"], atol=1e-6)
    assert np.array_equal(found[..., :-64], x[..., :-64])


def test_inverse_undoes_the_rotation():
    x = np.random.default_rng(0).standard_normal((2, 5, 3, 16)).astype(np.float32)
    tables = as_jax(table(inverse_frequencies(8, 10000.0, None), 100))
    positions = np.array([[0, 1, 7, 50, 99], [3, 2, 1, 0, 4]])
    back = rotate(rotate(x, positions, tables), positions, tables, inverse=True)
    np.testing.assert_allclose(np.asarray(back), x, atol=1e-6)


def test_only_differences_of_positions_matter():
    rng = np.random.default_rng(1)
    q, k = rng.standard_normal((2, 1, 1, 16)).astype(np.float32)
    tables = as_jax(table(inverse_frequencies(16, 10000.0, None), 100))
    at = lambda x, p: np.asarray(rotate(x[None], np.array([[p]]), tables)).reshape(-1)  # noqa: E731
    assert at(q, 9) @ at(k, 4) == pytest.approx(at(q, 85) @ at(k, 80), abs=1e-5)
    assert at(q, 9) @ at(k, 4) != pytest.approx(at(q, 9) @ at(k, 5), abs=1e-3)


def test_padding_past_the_table_stays_finite():
    """It reads the last row."""
    x = np.ones((1, 2, 16), np.float32)
    tables = as_jax(table(inverse_frequencies(16, 10000.0, None), 8))
    found = np.asarray(rotate(x, np.array([[7, 1000]]), tables))
    assert np.array_equal(found[0, 0], found[0, 1])


def test_tables_of_a_model():
    config = PRESETS["flash"]
    tables = RopeTables.build(config, 50)
    wanted = table(inverse_frequencies(64, 160000.0, config.rope_scaling), 50)
    assert np.array_equal(tables.compressed.cos, wanted.cos)
    assert np.array_equal(tables.plain.sin, table(inverse_frequencies(64, 10000.0, None), 50).sin)


def as_jax(tables):
    """Tables as device arrays, which is how a model gets them."""
    import jax

    return jax.tree.map(jax.numpy.asarray, tables)
