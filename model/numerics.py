"""Which roundings the model applies, as one frozen value.

`plain` and `kvq` are f32 throughout; `w8a8` adds the activation quantisation of the released engine; `reference`
rounds to bfloat16 at every point where the released engine does (docs/model.md, "Rounding points").
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from widemesh.pallas_kernels.formats import fake_quant_fp8
from widemesh.pallas_kernels.rounding import round_bf16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Numerics:
    """Static numerics of a program. Arithmetic between rounding points is f32 in every setting on a CPU."""

    dtype: str = "float32"  # storage of the residual streams between sublayers
    cache_quant: bool = False  # window FP8, compressed FP4 + E4M3, index keys and queries FP4 + E8M0
    act_quant: bool = False  # FP8 activations in front of linears whose weights are stored in FP8 or FP4
    bf16_rounding: bool = False  # round where the released engine holds bfloat16

    def round(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """f32 in, f32 out, on the bfloat16 grid if this setting rounds."""
        return round_bf16(x) if self.bf16_rounding else x

    def quantise_activation(self, x: Float[Array, "... K"]) -> Float[Array, "... K"]:
        """What a quantised linear sees of its input: groups of 32 along the last axis."""
        return fake_quant_fp8(x) if self.act_quant else x

    def store(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Round and convert to the storage dtype of the residual streams."""
        return self.round(x).astype(jnp.dtype(self.dtype))


NUMERICS = {
    "plain": Numerics(),
    "kvq": Numerics(cache_quant=True),
    "w8a8": Numerics(cache_quant=True, act_quant=True),
    "reference": Numerics(dtype="bfloat16", cache_quant=True, act_quant=True, bf16_rounding=True),
}


def numerics_named(name: str) -> Numerics:
    """Look a setting up. Raises ValueError that lists the names."""
    if name not in NUMERICS:
        raise ValueError(f"numerics={name!r} is unknown; use one of {', '.join(NUMERICS)}")
    return NUMERICS[name]
