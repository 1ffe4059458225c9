"""The draft (DSpark): window-only layers that propose the tokens behind the newest one in a single pass.

Its layers attend to a context that the backbone makes: means of the streams that enter some of its last layers, one
projection for all draft layers. A pass runs the newest token and noise behind it, all of which see each other and the
context; a low-rank Markov chain over the rows' logits then chooses token after token. Formula: docs/model.md,
"DSpark draft". B requests, S rows, D hidden, C streams, V vocabulary.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

from widemesh.model import draft_keys
from widemesh.model.attention import Attention
from widemesh.model.block import Block
from widemesh.model.cache import LayerCache
from widemesh.model.config import ModelConfig
from widemesh.model.embedding import Embedding
from widemesh.model.keys import WindowKeys, keys_of
from widemesh.model.linear import Linear, RMSNorm
from widemesh.model.shared import Shared
from widemesh.model.step import StepContext


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Proposal:
    """Of one pass: a token per row, the first for the position behind the newest token."""

    tokens: Int32[Array, "B S"]
    confidence: Float[Array, "B S"]  # logit of the chance that a token is accepted if those before it are


def block_rows(newest: Int32[Array, "B"], config: ModelConfig) -> Int32[Array, "B S"]:
    """What a pass runs: each request's newest token, and noise in place of the tokens to be found."""
    noise = jnp.full((len(newest), config.num_speculative_tokens - 1), config.dspark_noise_token_id, jnp.int32)
    return jnp.concatenate([newest[:, None], noise], axis=1)


class DraftAttention(Attention):
    """Attention of rows that see each other, whatever their order, and the whole window before the first of them."""

    def keys(self, step: StepContext) -> WindowKeys:
        """Those of a block."""
        return draft_keys

    def store_context(
        self, main: Float[Array, "B S D"], cache: LayerCache, shared: Shared, step: StepContext
    ) -> LayerCache:
        """The layer's state with the keys of these rows' features, to which no norm is applied here."""
        _, window = keys_of(step).write_window(self, self.window_kv(main, step), cache.window, shared, step)
        return LayerCache(window, cache.open_group)


class MarkovHead(nnx.Module):
    """Low-rank logits of a token from the one before it."""

    def __init__(self, config: ModelConfig):
        rank = (config.dspark_markov_rank, None)
        self.embed = Embedding(config.vocab_size, rank)
        self.head = Linear((config.vocab_size, "vocab"), rank, kind="f32")


class ConfidenceHead(nnx.Module):
    """How sure the draft is of a row's token."""

    def __init__(self, config: ModelConfig):
        self.proj = Linear((1, None), (config.hidden_size + config.dspark_markov_rank, None), kind="f32")


class DraftLayer(Block):
    """One layer of the draft. The first holds what all read of the features, the last one the heads, as in the release.

    `num_speculative_tokens` rows run in a pass; the model was trained with `dspark_block_size`.
    """

    attn: DraftAttention

    def __init__(self, config: ModelConfig, stage: int):
        role, embed = config.draft_roles[stage], (config.hidden_size, "embed")
        super().__init__(config.of_draft, role)
        self.attn = DraftAttention(config, role)
        if stage == 0:
            features = (len(config.dspark_target_layer_ids) * config.hidden_size, None)
            self.main_proj = Linear(embed, features, kind="quantised")
            self.main_norm = RMSNorm(*embed, eps=config.rms_norm_eps)
        if stage == len(config.draft_roles) - 1:
            self.norm = RMSNorm(*embed, eps=config.rms_norm_eps)
            self.markov_head = MarkovHead(config)
            self.confidence_head = ConfidenceHead(config)

    def project_features(
        self, features: tuple[Float[Array, "B S D"], ...], step: StepContext
    ) -> Float[Array, "B S D"]:
        """What every draft layer makes its context of. Of the first layer."""
        joined = jnp.concatenate(features, axis=-1)
        step.record("draft.features", joined)
        main = self.main_norm(self.main_proj(joined, step.numerics), step.numerics)
        step.record("draft.main", main)
        return main

    def write_context(
        self, main: Float[Array, "B S D"], cache: LayerCache, shared: Shared, step: StepContext
    ) -> LayerCache:
        """The layer's state with the context of these rows."""
        return self.attn.store_context(main, cache, shared, step.at("attn"))

    def choose(
        self, newest: Int32[Array, "B 1"], state: Float[Array, "B S D"], logits: Float[Array, "B S V"],
        step: StepContext,
    ) -> Proposal:  # fmt: skip
        """The likeliest token of each row, one after the other; ties go to the lower id. Of the last layer.

        `logits` come from the normed `state`, the confidence from the state before its norm.
        """
        numerics, join = step.numerics, step.settings.tp.join
        step.record("draft.base_logits", logits)
        before, tokens, confidence = newest, [], []
        for row in range(state.shape[1]):
            embedded = self.markov_head.embed(before, step)[:, 0].astype(jnp.float32)
            biased = logits[:, row] + join(self.markov_head.head(embedded, numerics))
            step.record(f"draft.logits.{row}", biased)
            joined = jnp.concatenate([state[:, row].astype(jnp.float32), embedded], axis=-1)
            confidence.append(self.confidence_head.proj(joined, numerics)[:, 0])
            tokens.append(jnp.argmax(biased, axis=-1).astype(jnp.int32))
            before = tokens[-1][:, None]
        return Proposal(jnp.stack(tokens, axis=1), jnp.stack(confidence, axis=1))
