"""The text backbone: embedding, streams, layers, final collapse, norm and head."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from widemesh.model.block import Block
from widemesh.model.cache import Cache
from widemesh.model.config import ModelConfig
from widemesh.model.linear import Linear, RMSNorm
from widemesh.model.params import param, value
from widemesh.model.step import StepContext
from widemesh.pallas_kernels import mhc


class Embedding(nnx.Module):
    """One row per token id."""

    def __init__(self, config: ModelConfig):
        self.weight = param((config.vocab_size, "vocab"), (config.hidden_size, "embed"))


class Transformer(nnx.Module):
    """All backbone layers. Holds abstract parameters until they are loaded (`loading.py`)."""

    def __init__(self, config: ModelConfig):
        self.config = config
        self.embed = Embedding(config)
        self.layers = nnx.List([Block(config, role) for role in config.roles])
        self.norm = RMSNorm(config.hidden_size, "embed", eps=config.rms_norm_eps)
        self.head = Linear((config.vocab_size, "vocab"), (config.hidden_size, "embed"), kind="f32")

    def __call__(self, cache: Cache, step: StepContext) -> tuple[Float[Array, "B S D"], Cache]:
        """Final normed hidden state of every row, and the new state of every layer."""
        streams, pre = self.enter(step)
        shared = None
        caches = []
        for layer, (block, layer_cache) in enumerate(zip(self.layers, cache, strict=True)):
            streams, pre, new_cache, shared = block(streams, pre, layer_cache, shared, step.at(f"layers.{layer}"))
            caches.append(new_cache)
        return self.leave(streams, pre, step), tuple(caches)

    def enter(self, step: StepContext) -> tuple[Float[Array, "B S C D"], Float[Array, "B S C"]]:
        """Equal copies of the embedding, and the first pre-mix: all weight on stream 0."""
        c = self.config.hc_mult
        embedded = step.numerics.store(value(self.embed.weight)[step.rows.tokens])
        streams = jnp.repeat(embedded[:, :, None], c, axis=2)
        return streams, jnp.broadcast_to(jnp.eye(1, c)[0], streams.shape[:3])

    def leave(
        self, streams: Float[Array, "B S C D"], pre: Float[Array, "B S C"], step: StepContext
    ) -> Float[Array, "B S D"]:
        """Collapse with the pre-mix of the last layer's second site, then the final norm."""
        collapsed = step.numerics.round(mhc.collapse(streams, pre))
        step.record("final.collapsed", collapsed)
        normed = self.norm(collapsed, step.numerics)
        step.record("final.normed", normed)
        return normed

    def logits(self, hidden: Float[Array, "... D"], step: StepContext) -> Float[Array, "... V"]:
        """f32 logits of final hidden states."""
        return self.head(hidden, step.numerics)
