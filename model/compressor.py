"""The compressor: groups of `ratio` tokens become one latent, across chunk edges.

Formula: docs/model.md, "Compressor".
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int32

from widemesh.model.config import ModelConfig
from widemesh.model.linear import Kind, Linear, RMSNorm
from widemesh.model.numerics import Numerics
from widemesh.model.step import StepContext
from widemesh.pallas_kernels.compress import pool_group
from widemesh.pallas_kernels.compress.ring import read_ring, write_ring


@dataclasses.dataclass(frozen=True)
class Latents:
    """Latents of the groups that this step may complete, un-rotated."""

    latent: Float[Array, "B M H"]
    index: Int32[Array, "B M"]  # entry number
    valid: Bool[Array, "B M"]  # whether the group's last token is among the valid rows


class Compressor(nnx.Module):
    """wkv (and wgate for ratios above 1), pooling and norm. A ratio of 1 has no gate: each token is its own group."""

    def __init__(self, config: ModelConfig, ratio: int):
        kind: Kind = "f32" if ratio > 1 else "bf16"
        inp = (config.hidden_size, "embed")
        self.ratio = ratio
        self.wkv = Linear((config.head_dim, "head_dim"), inp, kind=kind)
        if ratio > 1:
            self.wgate = Linear((config.head_dim, "head_dim"), inp, kind=kind)
        self.norm = RMSNorm(config.head_dim, "head_dim", eps=config.rms_norm_eps)

    def __call__(
        self, x: Float[Array, "B S D"], ring: Float[Array, "B open 2 H"], step: StepContext
    ) -> tuple[Latents, Float[Array, "B open 2 H"]]:
        """Latents of the groups ending in this step, and the ring with the values and gates of its rows.

        The ring holds the newest tokens by position, of which the group that `start` is in needs up to ratio - 1.
        """
        rows, r = step.rows, self.ratio
        values, gates = self.project(x, step.numerics)
        if gates is None:
            return Latents(self.norm(values, step.numerics), rows.positions, rows.valid), ring
        new = jnp.stack([values, gates], axis=2)
        before = read_ring(ring, rows.start[:, None] - (r - 1) + jnp.arange(r - 1))
        both = jnp.concatenate([before, new], axis=1)  # row q - start + r - 1 holds position q
        # A step of S rows touches at most S // r + 1 groups (ceil((S + r - 1) / r)), from the one that `start` is in.
        groups = (x.shape[1] + 2 * r - 2) // r
        first = rows.start // r
        index = first[:, None] + jnp.arange(groups)
        place = (index * r)[..., None] + jnp.arange(r) - rows.start[:, None, None] + r - 1
        place = jnp.minimum(place, both.shape[1] - 1).reshape(x.shape[0], -1)
        grouped = jnp.take_along_axis(both, place[:, :, None, None], axis=1)
        grouped = grouped.reshape(x.shape[0], groups, r, 2, -1)
        pooled = step.numerics.round(pool_group(grouped[..., 0, :], grouped[..., 1, :]))
        valid = (index + 1) * r <= (rows.start + rows.length)[:, None]
        return Latents(self.norm(pooled, step.numerics), index, valid), write_ring(ring, new, rows.start, rows.length)

    def project(
        self, x: Float[Array, "B S D"], numerics: Numerics
    ) -> tuple[Float[Array, "B S H"], Float[Array, "B S H"] | None]:
        """Value and gate of each token; no gate at ratio 1."""
        return self.wkv(x, numerics), self.wgate(x, numerics) if self.ratio > 1 else None
