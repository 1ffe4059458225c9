"""Rotary positions: tables made on the host, and the rotation of the last dimensions of a vector.

Formulas: docs/model.md, "Rotary positions". Pairs are adjacent (2i, 2i + 1).
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from widemesh.model.config import ModelConfig, RopeScaling


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RopeTable:
    """cos and sin of every position below the model's length limit, one column per pair."""

    cos: Float[Array, "positions pairs"]
    sin: Float[Array, "positions pairs"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RopeTables:
    """`plain` for window-only layers, `compressed` for everything in a layer with compressed attention."""

    plain: RopeTable
    compressed: RopeTable

    @classmethod
    def build(cls, config: ModelConfig, positions: int) -> RopeTables:
        """Tables for positions 0 .. positions - 1 (host arrays)."""
        dims = config.qk_rope_head_dim
        yarn = config.rope_scaling
        return cls(
            plain=table(inverse_frequencies(dims, config.rope_theta, None), positions),
            compressed=table(inverse_frequencies(dims, config.compress_rope_theta, yarn), positions),
        )


def inverse_frequencies(dims: int, theta: float, yarn: RopeScaling | None) -> Float[np.ndarray, "pairs"]:
    """f32 rotation speed of each pair, YaRN-interpolated if `yarn` is given. No attention temperature is applied."""
    exponent = np.arange(0, dims, 2, dtype=np.float32) / np.float32(dims)
    freq = (np.float32(1.0) / np.power(np.float32(theta), exponent)).astype(np.float32)
    if yarn is None:
        return freq

    def dim_of(rotations: float) -> float:
        span = yarn.original_max_position_embeddings / (2 * math.pi * rotations)
        return dims * math.log(span) / (2 * math.log(theta))

    low = max(math.floor(dim_of(yarn.beta_fast)), 0)
    high = min(math.ceil(dim_of(yarn.beta_slow)), dims - 1)
    ramp = (np.arange(dims // 2, dtype=np.float32) - np.float32(low)) / np.float32(max(high - low, 1e-3))
    ramp = np.clip(ramp, 0.0, 1.0).astype(np.float32)
    return (freq / np.float32(yarn.factor) * ramp + freq * (np.float32(1.0) - ramp)).astype(np.float32)


def table(freq: Float[np.ndarray, "pairs"], positions: int) -> RopeTable:
    """cos and sin of position * frequency. The angle is one f32 product, its functions are taken in f64.

    f32 library functions lose range reduction on angles near 1e6; the f32 product itself is what the model learned.
    """
    angle = np.arange(positions, dtype=np.float32)[:, None] * freq[None]
    wide = angle.astype(np.float64)
    return RopeTable(np.cos(wide).astype(np.float32), np.sin(wide).astype(np.float32))  # type: ignore[arg-type]


def rotate(
    x: Float[Array, "B S *heads H"], positions: Int32[Array, "B S"], table: RopeTable, *, inverse: bool = False
) -> Float[Array, "B S *heads H"]:
    """Rotate the last 2 * pairs dimensions of x by +angle (or -angle) of each row's position.

    Positions past the table are those of padding rows; they read its last row, so that padding stays finite.
    """
    cos = table.cos.at[positions].get(mode="clip")  # [B, S, pairs]
    sin = table.sin.at[positions].get(mode="clip")
    extra = x.ndim - 3
    shape = (*positions.shape, *([1] * extra), cos.shape[-1])
    cos, sin = cos.reshape(shape), sin.reshape(shape)
    if inverse:
        sin = -sin
    rest = x.shape[-1] - 2 * cos.shape[-1]
    if x.ndim == 3:
        kept, turned = x[..., :rest], x[..., rest:]
        even, odd = turned[..., 0::2], turned[..., 1::2]
        turned = jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1).reshape(turned.shape)
        return jnp.concatenate([kept, turned], axis=-1)
    # With heads the array is large: one pass over it, with an angle of 0 for the dimensions that stay, instead of two
    # copies (4 % of a prefill on a CPU). Without heads XLA would put that pass into each of its readers again.
    pad = [(0, 0)] * (x.ndim - 1) + [(rest, 0)]
    own = jnp.pad(jnp.repeat(cos, 2, axis=-1), pad, constant_values=1.0)
    other = jnp.pad(jnp.stack([-sin, sin], axis=-1).reshape(*shape[:-1], -1), pad)
    swapped = x.reshape(*x.shape[:-1], -1, 2)[..., ::-1].reshape(x.shape)
    return x * own + swapped * other
