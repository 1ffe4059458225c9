"""The text backbone: embedding, streams, layers, final collapse, norm and head."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from widemesh.model.block import Block
from widemesh.model.cache import Cache
from widemesh.model.config import ModelConfig
from widemesh.model.fused_block import Pending, settle
from widemesh.model.keys import keys_of
from widemesh.model.linear import Linear, RMSNorm
from widemesh.model.packed_keys import NearRows
from widemesh.model.params import param, value
from widemesh.model.shared import Shared
from widemesh.model.step import Rows, StepContext
from widemesh.pallas_kernels import mhc
from widemesh.pallas_kernels.sparse_attention import Selection


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Boundary:
    """What `encode` hands to `tail`."""

    streams: Float[Array, "B S C D"]
    pre: Float[Array, "B S C"]
    # Window rows of the cut layer that its rows see: f32 at positions start - (window - 1) .. start + S - 1, or bytes.
    near: Float[Array, "B WS H"] | NearRows
    selection: Selection  # what an index layer below the cut has chosen
    candidates: Bool[Array, "B S L"] | Int32[Array, "B S C"]

    def last_rows(self, rows: Rows, count: int) -> tuple[Boundary, Rows]:
        """The newest `count` valid rows of each request (all, where it has fewer), in a step of `count` rows."""
        skip = jnp.maximum(rows.length - count, 0)

        def newest(x: Array, size: int) -> Array:
            return jax.vmap(lambda one, first: lax.dynamic_slice_in_dim(one, first, size))(x, skip)

        near = self.near
        if not isinstance(near, NearRows):  # those are named by position, and serve the newest rows as they are
            near = newest(near, count + near.shape[1] - self.streams.shape[1])
        part = Boundary(
            streams=newest(self.streams, count),
            pre=newest(self.pre, count),
            near=near,
            selection=jax.tree.map(lambda x: newest(x, count), self.selection),
            candidates=newest(self.candidates, count),
        )
        return part, Rows(
            tokens=newest(rows.tokens, count),
            start=rows.start + skip,
            length=jnp.minimum(rows.length, count),
            engram_rows=newest(rows.engram_rows, count),
            first=rows.first,
            write_from=rows.write_from,
        )


class Embedding(nnx.Module):
    """One row per token id."""

    def __init__(self, config: ModelConfig):
        self.weight = param((config.vocab_size, "vocab"), (config.hidden_size, "embed"), stored="bf16")


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
        shared = Shared.start(cache, self.config, step)
        layers = []
        for layer, (block, layer_cache) in enumerate(zip(self.layers, cache.layers, strict=True)):
            streams, pre, new_cache, shared = block(streams, pre, layer_cache, shared, step.layer(layer))
            layers.append(new_cache)
        return self.leave(streams, pre, step), dataclasses.replace(cache, pages=shared.pages, layers=tuple(layers))

    def encode(self, cache: Cache, step: StepContext) -> tuple[Boundary, Cache]:
        """Everything that later tokens need of these rows, except the window KV of the layers above the cut.

        Layers below the cut run whole; the cut layer, the last source of compressed KV, stores its keys. Layers above
        it have window KV alone, so rows outside the last window of a prompt need nothing more (docs/model.md,
        "Bounded replay").
        """
        streams, pre = self.enter(step)
        shared = Shared.start(cache, self.config, step)
        layers, cut = list(cache.layers), self.config.replay_cut
        for layer in range(cut):
            streams, pre, layers[layer], shared = self.layers[layer](
                streams, pre, layers[layer], shared, step.layer(layer)
            )
        streams, pre = settle(streams, pre, step)
        streams, near, layers[cut], shared = self.layers[cut].write(
            streams, pre, layers[cut], shared, step.layer(cut)
        )
        cache = dataclasses.replace(cache, pages=shared.pages, layers=tuple(layers))
        return Boundary(streams, pre, near, shared.selection, shared.candidates), cache

    def tail(self, boundary: Boundary, cache: Cache, step: StepContext) -> tuple[Float[Array, "B S D"], Cache]:
        """The rest of the cut layer and the layers above it, for the rows of `boundary`.

        Those layers see no window rows from before these rows. Returns the final hidden states and the new cache.
        """
        layers, cut = list(cache.layers), self.config.replay_cut
        shared = dataclasses.replace(
            Shared.start(cache, self.config, step), selection=boundary.selection, candidates=boundary.candidates
        )
        if self.config.roles[cut].owns_kv:
            shared = keys_of(step).view(self.layers[cut].attn, shared, step)
        streams, pre, shared = self.layers[cut].finish(
            boundary.streams, boundary.pre, boundary.near, shared, step.layer(cut)
        )
        above = dataclasses.replace(step, rows=dataclasses.replace(step.rows, first=step.rows.start))
        for layer in range(cut + 1, len(layers)):
            streams, pre, layers[layer], shared = self.layers[layer](
                streams, pre, layers[layer], shared, above.layer(layer)
            )
        return self.leave(streams, pre, step), dataclasses.replace(cache, layers=tuple(layers))

    def enter(self, step: StepContext) -> tuple[Float[Array, "B S C D"], Float[Array, "B S C"] | Pending]:
        """Equal copies of the embedding, and the first pre-mix: all weight on stream 0."""
        c = self.config.hc_mult
        table = value(self.embed.weight)
        embedded = step.settings.tp.look_up(step.rows.tokens, table.shape[0], lambda ids: table[ids])
        embedded = step.numerics.store(embedded)
        streams = jnp.repeat(embedded[:, :, None], c, axis=2)
        return streams, jnp.broadcast_to(jnp.eye(1, c)[0], streams.shape[:3])

    def leave(
        self, streams: Float[Array, "B S C D"], pre: Float[Array, "B S C"] | Pending, step: StepContext
    ) -> Float[Array, "B S D"]:
        """Collapse with the pre-mix of the last layer's second site, then the final norm."""
        streams, pre = settle(streams, pre, step)
        collapsed = step.numerics.round(mhc.collapse(streams, pre))
        step.record("final.collapsed", collapsed)
        normed = self.norm(collapsed, step.numerics)
        step.record("final.normed", normed)
        return normed

    def logits(self, hidden: Float[Array, "... D"], step: StepContext) -> Float[Array, "... V"]:
        """f32 logits of final hidden states."""
        return step.settings.tp.join(self.head(hidden, step.numerics))
