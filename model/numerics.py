"""Which roundings the model applies, and in which form it holds weights and activations, as one frozen value.

`plain` and `kvq` are f32 throughout; `w8a8` adds the activation quantisation of the released engine; `reference`
rounds to bfloat16 at every point where the released engine does (docs/model.md, "Rounding points"). `serving` is what
runs on a GPU: weights as the release stores them, bfloat16 activations, and the ops that read both.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from widemesh.pallas_kernels.formats import fake_quant_fp8
from widemesh.pallas_kernels.rounding import round_bf16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Numerics:
    """Static numerics of a program. Sums are f32 in every setting."""

    dtype: str = "float32"  # storage of the residual streams between sublayers
    compute_dtype: str = "float32"  # of activations; with bfloat16, products are of bfloat16 operands
    cache_quant: bool = False  # window FP8, compressed FP4 + E4M3, index keys and queries FP4 + E8M0
    act_quant: bool = False  # FP8 activations in front of linears whose weights are stored in FP8 or FP4
    bf16_rounding: bool = False  # round f32 activations where the released engine holds bfloat16
    packed_weights: bool = False  # weights as bytes of the released formats, and the ops that work on packed bytes

    def __post_init__(self) -> None:
        if self.packed_weights and not self.cache_quant:
            raise ValueError("packed_weights=True needs cache_quant=True: the packed ops read packed caches")

    def round(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """What an activation is held as: cast to `compute_dtype`, or f32 on the bfloat16 grid if this setting rounds.

        f32 in, f32 out for every setting that computes in f32.
        """
        if self.compute_dtype != "float32":
            return x.astype(jnp.dtype(self.compute_dtype))
        return round_bf16(x) if self.bf16_rounding else x

    def quantise_activation(self, x: Float[Array, "... K"]) -> Float[Array, "... K"]:
        """What a quantised linear sees of its input: groups of 32 along the last axis. Same dtype as `x`."""
        return fake_quant_fp8(x) if self.act_quant else x

    def store(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Round and convert to the storage dtype of the residual streams."""
        return self.round(x).astype(jnp.dtype(self.dtype))


NUMERICS = {
    "plain": Numerics(),
    "kvq": Numerics(cache_quant=True),
    "w8a8": Numerics(cache_quant=True, act_quant=True),
    "reference": Numerics(dtype="bfloat16", cache_quant=True, act_quant=True, bf16_rounding=True),
    "serving": Numerics(
        dtype="bfloat16", compute_dtype="bfloat16", cache_quant=True, act_quant=True, packed_weights=True
    ),
}


def numerics_named(name: str, platform: str | None = None) -> Numerics:
    """The setting that `name` stands for on `platform` ("cpu" or "gpu"; None: the one that JAX runs on).

    `serving` is packed weights and bfloat16 where there are kernels for them; on a CPU it stands for `kvq`, the same
    packed caches in f32 arithmetic. Every other name means the same everywhere. Raises ValueError that lists the names.
    """
    if name not in NUMERICS:
        raise ValueError(f"numerics={name!r} is unknown; use one of {', '.join(NUMERICS)}")
    if name == "serving" and (platform or jax.default_backend()) == "cpu":
        return NUMERICS["kvq"]
    return NUMERICS[name]
