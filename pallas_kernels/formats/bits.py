"""Float bits and groups, for NumPy and JAX arrays with the same code.

The codecs work on the IEEE bits of float32 because every rounding decision must come out the same on the host, under
XLA and in a kernel. Two habits of compilers shape them: a division by a constant or by a broadcast value may become a
multiplication by a rounded reciprocal, so no result here depends on one; and XLA flushes float32 subnormals (below
2^-126) to zero, so JAX results are exact except there, while NumPy results are exact everywhere.
"""

from __future__ import annotations

from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float32, Int32, Shaped

AnyArray = np.ndarray | jax.Array
SIGN_BIT = np.int32(-(2**31))
MAGNITUDE_BITS = np.int32(2**31 - 1)


def namespace(x: AnyArray) -> ModuleType:
    """`jax.numpy` for JAX arrays (traced ones too), else `numpy`."""
    return jnp if isinstance(x, jax.Array) else np


def to_bits(x: Float32[AnyArray, "*G"]) -> Int32[AnyArray, "*G"]:
    """The float32 bits as int32. Magnitudes (sign bit clear) order as their floats do, NaN above infinity."""
    if isinstance(x, jax.Array):
        return jax.lax.bitcast_convert_type(x, jnp.int32)
    return np.asarray(x, np.float32).view(np.int32)


def from_bits(bits: Int32[AnyArray, "*G"]) -> Float32[AnyArray, "*G"]:
    """The float32 values with these bits."""
    if isinstance(bits, jax.Array):
        return jax.lax.bitcast_convert_type(bits, jnp.float32)
    return np.asarray(bits, np.int32).view(np.float32)


def as_float32(x: AnyArray) -> Float32[AnyArray, "*G"]:
    """`x` widened to float32; no copy when it already is."""
    return x.astype(np.float32) if x.dtype != np.float32 else x


def split_groups(x: Shaped[AnyArray, "*G D"], size: int) -> Shaped[AnyArray, "*G groups size"]:
    """Cut the last axis into groups of `size`; a short last group is filled with zeros."""
    *lead, width = x.shape
    groups = -(-width // size)
    if groups * size != width:
        x = namespace(x).pad(x, [(0, 0)] * len(lead) + [(0, groups * size - width)])
    return x.reshape(*lead, groups, size)


def join_groups(x: Shaped[AnyArray, "*G groups size"], width: int) -> Shaped[AnyArray, "*G D"]:
    """Undo `split_groups` for a last axis of `width`."""
    *lead, groups, size = x.shape
    joined = x.reshape(*lead, groups * size)
    return joined if groups * size == width else joined[..., :width]
