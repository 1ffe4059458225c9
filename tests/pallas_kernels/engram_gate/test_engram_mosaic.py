"""The Engram kernels in the interpreter, with race detection, against their references."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.pallas_kernels.engram_gate.cases import apply_arguments, table_of
from tests.pallas_kernels.thread_rows_options import QUICK
from widemesh.pallas_kernels.engram_gate import engram_apply, engram_rows
from widemesh.pallas_kernels.gpu import interpreted


@pytest.mark.parametrize(("dim", "ids", "dtype"), [
    (256, [[3, 0, 3], [6, 6, 1]], jnp.bfloat16),  # ids repeated
    (512, [[-4, 2]], jnp.float32),  # one outside
    (256, np.zeros((0, 2), np.int32), jnp.bfloat16),
])  # fmt: skip
def test_rows(dim, ids, dtype):
    table, _ = table_of(rows=7, dim=dim)
    ids = jnp.asarray(ids, jnp.int32)
    with interpreted():
        found = jax.jit(lambda *a: engram_rows(*a, dtype=dtype, implementation="mosaic"))(table, ids)
    wanted = engram_rows(table, ids, dtype=dtype, implementation="reference")
    assert found.dtype == dtype
    np.testing.assert_array_equal(found.astype(jnp.float32), wanted.astype(jnp.float32))


@pytest.mark.parametrize(("t", "c", "d", "dtype"), [
    (2, 4, 256, jnp.bfloat16),
    (3, 2, 384, jnp.float32),
    (0, 4, 128, jnp.bfloat16),
])  # fmt: skip
def test_apply(t, c, d, dtype):
    data = apply_arguments(t=t, c=c, d=d, dtype=dtype)
    with interpreted():
        found = jax.jit(lambda kw: engram_apply(**kw, eps=1e-20, implementation="mosaic"), compiler_options=QUICK)(data)
    wanted = engram_apply(**data, eps=1e-20, implementation="reference")
    assert found.dtype == dtype and found.shape == wanted.shape
    tolerance = 1e-6 if dtype == jnp.float32 else 1e-2
    np.testing.assert_allclose(found.astype(jnp.float32), wanted.astype(jnp.float32), rtol=tolerance, atol=tolerance)


def test_sizes_that_the_kernels_cannot_take():
    with interpreted(), pytest.raises(ValueError, match="rows of 64 values must be a multiple of 256"):
        engram_rows(table_of(rows=2, dim=64)[0], jnp.zeros((1, 1), jnp.int32), implementation="mosaic")
    with interpreted(), pytest.raises(ValueError, match=r"hidden=96 .* nearest is 128"):
        engram_apply(**apply_arguments(t=1, c=2, d=96), eps=1e-20, implementation="mosaic")
