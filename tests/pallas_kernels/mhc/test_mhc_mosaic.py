"""The hyper-connection kernels in the interpreter, with race detection, against their reference."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.pallas_kernels.mhc.cases import SETTINGS, make
from tests.pallas_kernels.thread_rows_options import QUICK
from widemesh.pallas_kernels import mhc
from widemesh.pallas_kernels.gpu import TARGETS, interpreted
from widemesh.pallas_kernels.mhc import tiles


def run(op, arguments):
    with interpreted():
        jitted = jax.jit(lambda *args: op(*args, **SETTINGS, implementation="mosaic"), compiler_options=QUICK)
        return jax.tree.leaves(jitted(*arguments))


def wide(x):
    return np.asarray(x.astype(jnp.float32))


@pytest.mark.parametrize(("t", "c", "d", "dtype"), [
    (9, 2, 384, jnp.float32),  # a second tile with one row, three pieces
    (3, 4, 128, jnp.bfloat16),
])  # fmt: skip
def test_advance(t, c, d, dtype):
    data = make(t=t, c=c, d=d, dtype=dtype)
    found = run(mhc.mhc_advance, data.values())
    wanted = jax.tree.leaves(mhc.mhc_advance(*data.values(), **SETTINGS, implementation="reference"))
    assert [x.dtype for x in found] == [x.dtype for x in wanted]
    is_exact = dtype == jnp.float32
    for name, a, b in zip(("new", "x", "pre", "post", "comb"), found, wanted, strict=True):
        # bfloat16: a value beside the middle between two may go either way, and its effect on the sums with it.
        np.testing.assert_allclose(wide(a), wide(b), rtol=2e-5 if is_exact else 1e-2, atol=2e-5 if is_exact else 5e-3,
                                   err_msg=name)  # fmt: skip


def test_site():
    data = make(t=5, c=2, d=128)
    arguments = [data[name] for name in ("streams", "fn", "base", "scale")]
    found = run(mhc.mhc_site, arguments)
    wanted = jax.tree.leaves(mhc.mhc_site(*arguments, **SETTINGS, implementation="reference"))
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_no_rows():
    data = make(t=0, d=128)
    assert [x.shape for x in run(mhc.mhc_advance, data.values())] == [(0, 4, 128), (0, 128), (0, 4), (0, 4), (0, 4, 4)]


def test_sizes_that_the_kernel_cannot_take():
    with pytest.raises(ValueError, match=r"hidden=192 must be a multiple of 128 .* nearest is 256"):
        run(mhc.mhc_advance, make(t=1, d=192).values())
    with pytest.raises(ValueError, match="streams=3 must be 2 or 4"):
        run(mhc.mhc_advance, make(t=1, c=3, d=128).values())


def test_tiles():
    """16 rows share a reading of the projection matrix once there are enough blocks without splitting them further."""
    assert tiles.mix_tiles(64, 5120, TARGETS["H200"]).rows == 8
    assert tiles.mix_tiles(2048, 5120, TARGETS["B200"]).rows == 16
    with pytest.raises(ValueError, match="rows=12"):
        tiles.MixTiles(rows=12)


def test_tuned_tiles_override(monkeypatch):
    monkeypatch.setattr(tiles, "_tuned", lambda: {"H200": {"64x5120": {"rows": 16}}})
    assert tiles.mix_tiles(64, 5120, TARGETS["H200"]).rows == 16
    shipped = json.loads(Path(tiles.__file__).with_name("tiles.json").read_text())
    assert list(shipped) == list(TARGETS)
