"""Lookup of packed rows, and gate and update from one projection."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.pallas_kernels.engram_gate.cases import apply_arguments, table_of
from widemesh.pallas_kernels.engram_gate import engram_apply, engram_gate, engram_rows


def test_rows_are_dequantised_side_by_side():
    table, values = table_of(rows=7, dim=64)
    ids = np.array([[3, 0, 3], [6, 6, 1]], np.int32)
    found = engram_rows(table, jnp.asarray(ids), dtype=jnp.float32, implementation="reference")
    np.testing.assert_array_equal(found, values[ids].reshape(2, -1))
    exact = engram_rows(table, jnp.asarray(ids), implementation="reference")
    assert exact.dtype == jnp.bfloat16
    np.testing.assert_array_equal(exact.astype(jnp.float32), found)


def test_ids_outside_read_the_nearest_row():
    table, values = table_of(rows=3, dim=32)
    found = engram_rows(table, jnp.array([[-1, 3]]), dtype=jnp.float32, implementation="reference")
    np.testing.assert_array_equal(found[0], np.concatenate([values[0], values[2]]))


def test_no_rows():
    table, _ = table_of(rows=3, dim=32)
    assert engram_rows(table, jnp.zeros((0, 2), jnp.int32)).shape == (0, 64)


def test_a_row_of_another_form_names_the_nearest():
    with pytest.raises(ValueError, match="such as 264"):
        engram_rows(jnp.zeros((2, 256), jnp.uint8), jnp.zeros((1, 1), jnp.int32))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_apply_is_gate_and_update(dtype):
    data = apply_arguments(t=3, c=4, d=24, dtype=dtype)
    found = engram_apply(**data, eps=1e-20, implementation="reference")
    both = np.asarray(data["key_value"], np.float32)
    key, value = both[:, :96].reshape(3, 4, 24), both[:, 96:]
    gate = engram_gate(data["streams"], key, data["q_weight"] * data["k_weight"], eps=1e-20)
    wanted = np.asarray(data["streams"], np.float32) + np.asarray(gate)[:, :, None] * value[:, None]
    np.testing.assert_allclose(
        found.astype(jnp.float32), wanted, rtol=1e-6 if dtype == jnp.float32 else 5e-3, atol=1e-6
    )
    assert found.dtype == dtype
    with pytest.raises(ValueError, match=r"need \(3, 120\)"):
        engram_apply(**(data | {"key_value": data["key_value"][:, 1:]}), eps=1e-20)
