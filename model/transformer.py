"""The text backbone: embedding, streams, layers, final collapse, norm and head."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from widemesh.model.block import Block
from widemesh.model.cache import Cache, LayerCache
from widemesh.model.config import ModelConfig
from widemesh.model.draft import DraftLayer, Proposal
from widemesh.model.embedding import Embedding
from widemesh.model.fused_block import Pending, settle
from widemesh.model.keys import keys_of
from widemesh.model.linear import Linear, RMSNorm
from widemesh.model.packed_keys import NearRows
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


class Transformer(nnx.Module):
    """All backbone layers, and those of the draft. Holds abstract parameters until they are loaded (`loading.py`).

    `config.num_speculative_tokens` = 0 leaves the draft out.
    """

    def __init__(self, config: ModelConfig):
        self.config = config
        self.embed = Embedding(config.vocab_size, (config.hidden_size, "embed"))
        self.layers = nnx.List([Block(config, role) for role in config.roles])
        self.norm = RMSNorm(config.hidden_size, "embed", eps=config.rms_norm_eps)
        self.head = Linear((config.vocab_size, "vocab"), (config.hidden_size, "embed"), kind="f32")
        if config.num_speculative_tokens:
            self.mtp = nnx.List([DraftLayer(config, stage) for stage in range(len(config.draft_roles))])

    def __call__(self, cache: Cache, step: StepContext) -> tuple[Float[Array, "B S D"], Cache]:
        """Final normed hidden state of every row, and the new state of every layer, the draft's included."""
        streams, pre = self.enter(step)
        shared = Shared.start(cache, self.config, step)
        layers = list(cache.layers)
        for layer, block in enumerate(self.layers):
            streams, pre, layers[layer], shared = block(streams, pre, layers[layer], shared, step.layer(layer))
        layers[len(self.layers) :] = self._draft_context(layers, shared, step)
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
        if self.config.roles[cut].feeds_draft:  # what `write` has fed was left with the encode
            shared = shared.feed(boundary.streams, step)
        above = dataclasses.replace(step, rows=dataclasses.replace(step.rows, first=step.rows.start))
        for layer in range(cut + 1, len(self.layers)):
            streams, pre, layers[layer], shared = self.layers[layer](
                streams, pre, layers[layer], shared, above.layer(layer)
            )
        layers[len(self.layers) :] = self._draft_context(layers, shared, above)
        return self.leave(streams, pre, step), dataclasses.replace(cache, layers=tuple(layers))

    def propose(self, cache: Cache, step: StepContext) -> tuple[Proposal, Cache]:
        """One pass of the draft: what may follow each request's newest token.

        `step` has `config.num_speculative_tokens` rows per request, the newest token and noise (`draft.block_rows`),
        and the exchange and maps of the draft's experts. The draft's rings must hold the context of all positions
        before them.
        """
        streams, pre = self.enter(step)
        shared = Shared.start(cache, self.config, step)
        layers, first = list(cache.layers), len(self.layers)
        for stage, block in enumerate(self.mtp):
            streams, pre, layers[first + stage], shared = block(
                streams, pre, layers[first + stage], shared, step.draft_layer(stage)
            )
        streams, pre = settle(streams, pre, step)
        state = step.numerics.round(mhc.collapse(streams, pre))
        step.record("draft.collapsed", state)
        normed = self.mtp[-1].norm(state, step.numerics)
        step.record("draft.normed", normed)
        proposal = self.mtp[-1].choose(step.rows.tokens[:, :1], state, self.logits(normed, step), step)
        return proposal, dataclasses.replace(cache, layers=tuple(layers))

    def _draft_context(
        self, layers: Sequence[LayerCache], shared: Shared, step: StepContext
    ) -> list[LayerCache]:
        """The draft's layers with the context of these rows in their rings."""
        mine = list(layers[len(self.layers) :])
        if not mine:
            return mine
        main = self.mtp[0].project_features(shared.features, step)
        return [
            block.write_context(main, own, shared, step.draft_layer(stage))
            for stage, (block, own) in enumerate(zip(self.mtp, mine, strict=True))
        ]

    def enter(self, step: StepContext) -> tuple[Float[Array, "B S C D"], Float[Array, "B S C"] | Pending]:
        """Equal copies of the embedding, and the first pre-mix: all weight on stream 0."""
        c = self.config.hc_mult
        embedded = step.numerics.store(self.embed(step.rows.tokens, step))
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
