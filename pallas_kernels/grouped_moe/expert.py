"""One gated expert on a set of rows: the arithmetic that every implementation of the grouped MoE shares."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from widemesh.pallas_kernels.formats import fake_quant_fp8
from widemesh.pallas_kernels.rounding import maybe_round_bf16


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertMath:
    """Static settings of an expert: clamp limit and roundings."""

    limit: float
    act_quant: bool = False
    bf16_rounding: bool = False
    # Makes an output whole, before it is rounded, where the matrices are parts of an expert's width (w1 and w3 of its
    # rows, w2 of its columns). None: outputs stay sums over the width that is here.
    whole: Callable[[Float[Array, "... D"]], Float[Array, "... D"]] | None = None

    def quantise(self, x: Float[Array, "... K"]) -> Float[Array, "... K"]:
        """FP8 activation rounding in front of a quantised matrix, if on."""
        return fake_quant_fp8(x) if self.act_quant else x

    def round(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """bfloat16 rounding, if on."""
        return maybe_round_bf16(x, self.bf16_rounding)

    def activate(self, gate: Float[Array, "... F"], up: Float[Array, "... F"]) -> Float[Array, "... F"]:
        """silu(min(gate, limit)) * clip(up, -limit, limit): the gate is clamped from above only."""
        gate = jnp.minimum(self.round(gate), self.limit)
        up = jnp.clip(self.round(up), -self.limit, self.limit)
        return jax.nn.silu(gate) * up

    def run(
        self,
        x: Float[Array, "T D"],
        weight: Float[Array, "T"] | None,
        project: Callable[[str, Float[Array, "T K"]], Float[Array, "T O"]],
    ) -> Float[Array, "T D"]:
        """w2(weight * activate(w1 x, w3 x)); `x` is already quantised, `project` multiplies by the named matrix.

        The routing weight acts before w2, as released: after it, the activation rounding would differ.
        """
        hidden = self.activate(project("w1", x), project("w3", x))
        if weight is not None:
            hidden = hidden * weight[..., None]
        return self.finish(project("w2", self.quantise(self.round(hidden))))

    def finish(self, out: Float[Array, "... D"]) -> Float[Array, "... D"]:
        """The output of w2, made whole and rounded."""
        return self.round(out if self.whole is None else self.whole(out))
