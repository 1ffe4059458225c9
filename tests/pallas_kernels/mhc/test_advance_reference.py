"""The step between two sublayers: the pieces it is made of, with the roundings of the streams' dtype."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.pallas_kernels.mhc.cases import SETTINGS, make
from widemesh.pallas_kernels import mhc
from widemesh.pallas_kernels.rounding import round_bf16


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_advance_is_expand_collapse_norm_and_site(dtype):
    data = make(t=5, d=24, dtype=dtype)
    new, x, site = mhc.mhc_advance(*data.values(), **SETTINGS, implementation="reference")
    stored = lambda v: v.astype(dtype).astype(jnp.float32)  # noqa: E731
    wanted = stored(mhc.expand(data["out"].astype(jnp.float32), data["streams"], data["post"], data["comb"]))
    np.testing.assert_array_equal(new.astype(jnp.float32), wanted)
    collapsed = np.asarray(stored(mhc.collapse(wanted, data["pre"])), np.float64)
    unit = collapsed / np.sqrt((collapsed**2).mean(-1, keepdims=True) + 1e-20) * np.asarray(data["norm_weight"])
    np.testing.assert_allclose(x.astype(jnp.float32), unit, rtol=1e-5 if dtype == jnp.float32 else 5e-3, atol=1e-6)
    assert (new.dtype, x.dtype) == (dtype, dtype)
    again = mhc.mhc_site(new, data["fn"], data["base"], data["scale"], **SETTINGS, implementation="reference")
    for found, value in zip(site, again, strict=True):
        np.testing.assert_allclose(found, value, atol=1e-6)


def test_bf16_streams_round_an_f32_activation():
    """The released rounding on a CPU: activations are held in f32 but lie on the bfloat16 grid."""
    data = make(t=3, d=24, dtype=jnp.bfloat16)
    data["out"] = data["out"].astype(jnp.float32)
    new, x, _ = mhc.mhc_advance(*data.values(), **SETTINGS, implementation="reference")
    assert new.dtype == jnp.bfloat16 and x.dtype == jnp.float32
    np.testing.assert_array_equal(x, round_bf16(x))


def test_bad_shapes_name_what_is_needed():
    data = make(t=3, d=24)
    with pytest.raises(ValueError, match=r"need \(24, 96\)"):
        mhc.mhc_site(data["streams"], data["fn"][:, :-1], data["base"], data["scale"], **SETTINGS)
    with pytest.raises(ValueError, match="post has shape"):
        mhc.mhc_advance(*(data | {"post": data["post"][:2]}).values(), **SETTINGS)
    with pytest.raises(ValueError, match="must be one of"):
        mhc.mhc_advance(*data.values(), **SETTINGS, implementation="fast")
