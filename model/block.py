"""One layer: Engram (if it has one), attention and mixture of experts, joined by single-pass hyper-connections.

The pre-mix that a site computes is used by the next site, one sublayer late. Formula: docs/model.md, "Single-pass mHC".
"""

from __future__ import annotations

from typing import Any

from flax import nnx
from jaxtyping import Array, Float

from widemesh.model import fused_block
from widemesh.model.attention import Attention
from widemesh.model.cache import LayerCache
from widemesh.model.config import LayerRole, ModelConfig
from widemesh.model.engram import Engram
from widemesh.model.fused_block import Pending
from widemesh.model.linear import RMSNorm
from widemesh.model.moe import MoE
from widemesh.model.params import param, value
from widemesh.model.shared import Shared
from widemesh.model.step import StepContext
from widemesh.pallas_kernels import mhc


class Block(nnx.Module):
    """One backbone layer."""

    def __init__(self, config: ModelConfig, role: LayerRole):
        self.config, self.role = config, role
        c, d = config.hc_mult, (config.hidden_size, "embed")
        mixes = c * (c + 2)
        if role.has_engram:
            self.engram = Engram(config, role.layer)
        self.attn_norm = RMSNorm(*d, eps=config.rms_norm_eps)
        self.attn = Attention(config, role)
        self.ffn_norm = RMSNorm(*d, eps=config.rms_norm_eps)
        self.ffn = MoE(config)
        self.hc_attn_fn = param((mixes, None), (c * config.hidden_size, None))
        self.hc_attn_base = param((mixes, None))
        self.hc_attn_scale = param((3, None))
        self.hc_ffn_fn = param((mixes, None), (c * config.hidden_size, None))
        self.hc_ffn_base = param((mixes, None))
        self.hc_ffn_scale = param((3, None))

    def __call__(
        self,
        streams: Float[Array, "B S C D"],
        pre: Float[Array, "B S C"] | Pending,
        cache: LayerCache,
        shared: Shared,
        step: StepContext,
    ) -> tuple[Float[Array, "B S C D"], Float[Array, "B S C"] | Pending, LayerCache, Shared]:
        """New streams, the pre-mix for the next layer, the layer's new state, and what later layers read.

        Under packed numerics the streams come and go with an output still `Pending`.
        """
        if step.numerics.packed_weights:
            return fused_block.run(self, streams, pre, cache, shared, step)
        assert not isinstance(pre, Pending)
        streams, near, cache, shared = self.write(streams, pre, cache, shared, step)
        streams, handed, shared = self.finish(streams, pre, near, shared, step)
        return streams, handed, cache, shared

    def write(
        self,
        streams: Float[Array, "B S C D"],
        pre: Float[Array, "B S C"],
        cache: LayerCache,
        shared: Shared,
        step: StepContext,
    ) -> tuple[Float[Array, "B S C D"], Any, LayerCache, Shared]:
        """What a layer keeps of its rows: Engram, then the keys of its attention (`Attention.write`).

        For settled streams. Returns them after Engram, the window rows, the layer's new state and the shared state.
        """
        if self.role.has_engram:
            streams = self.engram(streams, step.at("engram"))
        if self.role.feeds_draft:
            shared = shared.feed(streams, step)
        x = self.attention_input(streams, pre, step)
        step.record("attn.input", x)
        near, cache, shared = self.attn.write(x, cache, shared, step.at("attn"))
        return streams, near, cache, shared

    def finish(
        self,
        streams: Float[Array, "B S C D"],
        pre: Float[Array, "B S C"],
        near: Any,
        shared: Shared,
        step: StepContext,
    ) -> tuple[Float[Array, "B S C D"], Float[Array, "B S C"] | Pending, Shared]:
        """The rest of the layer for rows that `write` has been through; all of them, or the newest ones."""
        if step.numerics.packed_weights:
            return fused_block.finish(self, streams, pre, near, shared, step)
        num = step.numerics
        pre_attn, post, comb = self.site("attn", streams, step)
        out, shared = self.attn.attend(self.attention_input(streams, pre, step), near, shared, step.at("attn"))
        streams = num.store(mhc.expand(out, streams, post, comb))

        pre_ffn, post, comb = self.site("ffn", streams, step)
        x = self.ffn_norm(num.round(mhc.collapse(streams, pre_attn)), num)
        out = self.ffn(x, step.at("ffn"))
        streams = num.store(mhc.expand(out, streams, post, comb))
        step.record("streams_out", streams)
        return streams, pre_ffn, shared

    def attention_input(
        self, streams: Float[Array, "B S C D"], pre: Float[Array, "B S C"], step: StepContext
    ) -> Float[Array, "B S D"]:
        """Collapsed and normed streams."""
        return self.attn_norm(step.numerics.round(mhc.collapse(streams, pre)), step.numerics)

    def site(
        self, which: str, streams: Float[Array, "B S C D"], step: StepContext
    ) -> tuple[Float[Array, "B S C"], Float[Array, "B S C"], Float[Array, "B S C C"]]:
        """Pre-mix, post-mix and combination of the named sublayer site, from the streams that enter it."""
        fn, base, scale = (value(getattr(self, f"hc_{which}_{part}")) for part in ("fn", "base", "scale"))
        pre, post, comb = mhc.coefficients(
            streams, fn, base, scale, iterations=self.config.hc_sinkhorn_iters, hc_eps=self.config.hc_eps,
            norm_eps=self.config.rms_norm_eps,
        )  # fmt: skip
        step.record(f"{which}_hc.pre", pre)
        step.record(f"{which}_hc.post", post)
        step.record(f"{which}_hc.comb", comb)
        return pre, post, comb
