"""Index keys, index queries and the choice of compressed entries. Formulas: docs/model.md, "Index keys" and on."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int32, UInt8

from widemesh.model.cache import Cache
from widemesh.model.config import LayerRole, ModelConfig
from widemesh.model.linear import Linear, RMSNorm
from widemesh.model.rope import rotate
from widemesh.model.step import StepContext
from widemesh.pallas_kernels.formats import fake_quant_mxfp4
from widemesh.pallas_kernels.indexer_scores import indexer_scores
from widemesh.pallas_kernels.layout import PageLayout
from widemesh.pallas_kernels.select_topk import candidate_mask, select_indices, select_mask_causal
from widemesh.pallas_kernels.sparse_attention import (
    SelectedIndices,
    SelectedMask,
    Selection,
    empty_selection,
    visible_entries,
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Shared:
    """What layers hand upwards within one forward step; sources replace their part, consumers read it."""

    pages: UInt8[Array, "pages page_bytes"]
    table: Int32[Array, "B P"]
    entries: Float[Array, "B L H"]  # of the source below, for attention by mask; L = 0 for attention by indices
    index_keys: Float[Array, "B L J"]
    selection: Selection
    candidates: Bool[Array, "B S L"]
    layout: PageLayout = dataclasses.field(metadata={"static": True})

    @classmethod
    def start(cls, cache: Cache, config: ModelConfig, step: StepContext) -> Shared:
        """Below the first source: pages, and nothing in view."""
        b, s = step.rows.tokens.shape
        return cls(
            pages=cache.pages,
            table=cache.table,
            entries=jnp.zeros((b, 0, config.head_dim)),
            index_keys=jnp.zeros((b, 0, config.index_head_dim)),
            selection=empty_selection(step.settings.selection, b, s),
            candidates=jnp.zeros((b, s, 0), bool),
            layout=cache.layout,
        )


class Indexer(nnx.Module):
    """Scores every entry against this layer's index queries and selects the top ones.

    A layer that owns compressed KV also makes index keys (`wk`, `k_norm`) from its latents.
    """

    def __init__(self, config: ModelConfig, role: LayerRole):
        self.config, self.role = config, role
        heads, dim = config.index_n_heads, config.index_head_dim
        self.wq_b = Linear((heads * dim, "index_heads"), (config.q_lora_rank, "q_lora"), kind="quantised")
        self.weights_proj = Linear((heads, "index_heads"), (config.hidden_size, "embed"), kind="bf16")
        if role.owns_kv:
            self.wk = Linear((dim, None), (config.head_dim, "head_dim"), kind="bf16")
            self.k_norm = RMSNorm(dim, eps=config.rms_norm_eps)

    def keys(self, latent: Float[Array, "B M H"], step: StepContext) -> Float[Array, "B M J"]:
        """Index keys of latents, before rotation and quantisation."""
        return self.k_norm(self.wk(latent, step.numerics), step.numerics)

    def __call__(
        self, x: Float[Array, "B S D"], q_latent: Float[Array, "B S Q"], shared: Shared, step: StepContext
    ) -> Shared:
        """`shared` with this layer's selection (and candidates, if it is their source)."""
        config, role, num = self.config, self.role, step.numerics
        heads, dim = config.index_n_heads, config.index_head_dim
        queries = self.wq_b(q_latent, num).reshape(*x.shape[:2], heads, dim)
        queries = num.round(rotate(queries, step.rows.positions, step.rope.compressed))
        if num.cache_quant:
            queries = fake_quant_mxfp4(queries)
        weights = num.round(self.weights_proj(x, num) * (dim**-0.5 * heads**-0.5))
        scores = indexer_scores(
            queries, weights, shared.index_keys, ratio=role.ratio, start_bound=step.settings.start_bound,
            bf16_operands=num.cache_quant, bf16_rounding=num.bf16_rounding,
        )  # fmt: skip
        visible = visible_entries(step.rows.start, x.shape[1], scores.shape[-1], role.ratio)
        scores = jnp.where(visible, scores, -jnp.inf)
        step.record("indexer_scores", scores)
        candidates = shared.candidates
        if role.writes_candidates:
            count = (step.rows.positions + 1) // role.ratio
            candidates = visible & candidate_mask(
                scores, count, block=config.candidate_block_size, top_blocks=config.candidate_topk_blocks
            )
            step.record("candidates", candidates)
        if role.reads_candidates:
            scores = jnp.where(candidates, scores, -jnp.inf)
        selection = self.select(scores, step)
        return dataclasses.replace(shared, selection=selection, candidates=candidates)

    def select(self, scores: Float[Array, "B S L"], step: StepContext) -> Selection:
        """The top entries in the form this program uses."""
        if step.settings.selection == "mask":
            mask = select_mask_causal(scores, self.config.index_topk, ratio=self.role.ratio,
                                      start_bound=step.settings.start_bound)  # fmt: skip
            step.record("topk_mask", mask)
            return SelectedMask(mask)
        indices = select_indices(scores, self.config.index_topk)
        step.record("topk_indices", indices)
        return SelectedIndices(indices)
