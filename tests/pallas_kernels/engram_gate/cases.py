"""Inputs of the Engram operations."""

import jax.numpy as jnp
import numpy as np

from widemesh.pallas_kernels.formats import decode_fp8_rows, encode_fp8_rows


def table_of(*, rows, dim, seed=0):
    """A packed table and the values of its rows. The scales differ from group to group."""
    rng = np.random.default_rng(seed)
    size = 2.0 ** rng.integers(-8, 9, (rows, dim // 32, 1))
    values = (size * rng.standard_normal((rows, dim // 32, 32))).reshape(rows, dim).astype(np.float32)
    codes, scales = encode_fp8_rows(values)
    return jnp.asarray(np.concatenate([codes, scales], axis=1)), np.asarray(decode_fp8_rows(codes, scales))


def apply_arguments(*, t, c, d, dtype=jnp.float32, seed=0):
    """Arguments of `engram_apply`; the keys resemble the streams, so that gates are far from one half."""
    rng = np.random.default_rng(seed)
    normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    streams, noise = normal(t, c, d), normal(t, c, d)
    key = np.where(np.arange(c)[:, None] % 2, 1, -1) * streams + 0.3 * noise
    return {
        "streams": jnp.asarray(streams).astype(dtype),
        "key_value": jnp.asarray(np.concatenate([key.reshape(t, c * d), normal(t, d)], axis=1)).astype(dtype),
        "q_weight": jnp.asarray(1 + 0.1 * normal(c, d)),
        "k_weight": jnp.asarray(1 + 0.1 * normal(c, d)),
    }
