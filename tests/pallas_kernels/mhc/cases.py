"""Inputs of the step between two sublayers."""

import jax.numpy as jnp
import numpy as np

SETTINGS = {"iterations": 3, "hc_eps": 1e-6, "norm_eps": 1e-20}


def make(*, t, d, c=4, dtype=jnp.float32, seed=0):
    """Arguments of `mhc_advance` in order. comb is near a permutation, so that a wrong axis shows."""
    rng = np.random.default_rng(seed)
    normal = lambda *shape, scale=1.0: jnp.asarray((scale * rng.standard_normal(shape)).astype(np.float32))  # noqa: E731
    mixes = c * (c + 2)
    return {
        "out": normal(t, d).astype(dtype),
        "streams": normal(t, c, d).astype(dtype),
        "post": jnp.abs(normal(t, c)),
        "comb": jnp.abs(normal(t, c, c, scale=0.1)) + jnp.roll(jnp.eye(c), 1, axis=1),
        "pre": jnp.abs(normal(t, c)),
        "norm_weight": 1 + normal(d, scale=0.1),
        "fn": normal(mixes, c * d, scale=0.3),
        "base": normal(mixes),
        "scale": normal(3),
    }
