"""The mixture-of-experts sublayer: gate, routed experts behind an exchange, one shared expert.

Formulas: docs/model.md, "Gate" and "Experts". T rows, K experts per row, E experts, X expert slots held by a rank.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int32

from widemesh.model import packed_ops
from widemesh.model.config import ModelConfig
from widemesh.model.linear import Linear, product
from widemesh.model.params import matrix, param, value
from widemesh.model.step import StepContext
from widemesh.pallas_kernels.grouped_moe import ExpertMath, PackedExperts, grouped_moe
from widemesh.pallas_kernels.route import count_rows

_WEIGHT_EPS = 1e-20  # a constant of the router, whatever the norms use


class Gate(nnx.Module):
    """Chooses experts by biased scores and weighs them by the unbiased ones."""

    def __init__(self, config: ModelConfig):
        self.config = config
        self.weight = param((config.n_routed_experts, None), (config.hidden_size, "embed"), stored="bf16")
        self.bias = param((config.n_routed_experts, None))
        self.bias_vl = param((config.n_routed_experts, None))  # for rows inside an image span

    def __call__(
        self, x: Float[Array, "T D"], step: StepContext
    ) -> tuple[Int32[Array, "T K"], Float[Array, "T K"]]:
        """Expert ids by descending biased score, and their weights. Ties go to the lower id."""
        config = self.config
        logits = product(x, value(self.weight), is_precise=True) / config.gate_temp
        step.record("router_logits", logits)
        scores = jnp.sqrt(jax.nn.softplus(logits))
        _, experts = lax.top_k(scores + value(self.bias), config.num_experts_per_tok)
        weights = jnp.take_along_axis(scores, experts, axis=-1)
        if config.norm_topk_prob and config.num_experts_per_tok > 1:
            weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + _WEIGHT_EPS)
        weights = weights * config.routed_scaling_factor
        step.record("topk_ids", experts)
        step.record("topk_weights", weights)
        return experts, weights


class Experts(nnx.Module):
    """Matrices of the routed experts, stacked. The leading axis is the physical slot once loaded on a mesh."""

    def __init__(self, config: ModelConfig):
        slots = (config.n_routed_experts, "expert")
        width, embed = (config.moe_intermediate_size, "ffn"), (config.hidden_size, "embed")
        self.w1 = param(slots, width, embed, stored="fp4")
        self.w3 = param(slots, width, embed, stored="fp4")
        self.w2 = param(slots, embed, width, stored="fp4")

    @property
    def held(self) -> int:
        """Slots of this rank."""
        return int(value(self.w1).shape[0])

    def __call__(
        self, x: Float[Array, "M D"], slots: Int32[Array, "M K"], weights: Float[Array, "M K"], math: ExpertMath,
        step: StepContext,
    ) -> Float[Array, "M D"]:
        """f32 sum over the slots of this rank; `slots` outside 0..held-1 add nothing. Records the load of each."""
        w1, w3, w2 = value(self.w1), value(self.w3), value(self.w2)
        if step.numerics.packed_weights:
            out, load = packed_ops.grouped_moe_packed(
                x, slots, weights, PackedExperts(w1=w1, w3=w3, w2=w2), math, implementation=step.settings.kernels
            )
            step.record("load", load)
            return out
        step.record("load", count_rows(slots, self.held))
        implementation = step.settings.moe_implementation
        return grouped_moe(x, slots, weights, w1, w3, w2, math, implementation=implementation)


class SharedExpert(nnx.Module):
    """The expert that every row passes through, unweighted."""

    def __init__(self, config: ModelConfig):
        width, embed = (config.moe_intermediate_size, "ffn"), (config.hidden_size, "embed")
        self.w1 = Linear(width, embed, kind="quantised")
        self.w3 = Linear(width, embed, kind="quantised")
        self.w2 = Linear(embed, width, kind="quantised")

    def __call__(self, x: Float[Array, "T D"], math: ExpertMath) -> Float[Array, "T D"]:
        stacks = {"w1": self.w1, "w3": self.w3, "w2": self.w2}
        return math.run(
            math.quantise(x), None, lambda name, v: product(v.astype(x.dtype), matrix(stacks[name].weight))
        )


class MoE(nnx.Module):
    """Gate, routed experts and shared expert."""

    def __init__(self, config: ModelConfig):
        self.config = config
        self.gate = Gate(config)
        self.experts = Experts(config)
        self.shared_experts = SharedExpert(config)

    def __call__(self, x: Float[Array, "B S D"], step: StepContext) -> Float[Array, "B S D"]:
        """Sum of the routed and the shared expert, rounded once. Padding rows go to no routed expert."""
        step.record("input", x)
        num, settings = step.numerics, step.settings
        # Over `tp` each device has a part of every expert's width. Outputs are summed over it once, behind those of all
        # experts; where the release rounds the output of each expert, it must be whole before.
        each_whole = settings.tp.size > 1 and num.bf16_rounding
        math = ExpertMath(
            limit=self.config.swiglu_limit, act_quant=num.act_quant, bf16_rounding=num.bf16_rounding,
            whole=settings.tp.sum if each_whole else None,
        )  # fmt: skip
        flat = x.reshape(-1, x.shape[-1])
        experts, weights = self.gate(flat, step)
        sent = settings.exchange.dispatch(flat, step.slots_of(experts), weights, self.experts.held, experts)
        routed = self.experts(sent.x, sent.slots, sent.weights, math, step)
        y = settings.exchange.combine(routed, sent) + self.shared_experts(flat, math)
        y = num.round(y if each_whole else settings.tp.sum(y)).reshape(x.shape)
        step.record("output", y)
        return y
