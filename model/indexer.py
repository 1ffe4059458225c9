"""Index keys, index queries and the choice of compressed entries. Formulas: docs/model.md, "Index keys" and on."""

from __future__ import annotations

from flax import nnx
from jaxtyping import Array, Float

from widemesh.model.config import LayerRole, ModelConfig
from widemesh.model.keys import keys_of
from widemesh.model.linear import Linear, RMSNorm
from widemesh.model.rope import rotate
from widemesh.model.shared import Shared
from widemesh.model.step import StepContext
from widemesh.pallas_kernels.formats import fake_quant_mxfp4


class Indexer(nnx.Module):
    """Scores every entry against this layer's index queries and selects the top ones.

    A layer that owns compressed KV also makes index keys (`wk`, `k_norm`) from its latents.
    """

    def __init__(self, config: ModelConfig, role: LayerRole):
        self.config, self.role = config, role
        assert role.kv_source is not None
        self.source = config.kv_source_layers.index(role.kv_source)  # its place in the layout of a page
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
        config, num = self.config, step.numerics
        heads, dim = config.index_n_heads, config.index_head_dim
        queries = self.wq_b(q_latent, num).reshape(*x.shape[:2], heads, dim)
        queries = num.round(rotate(queries, step.rows.positions, step.rope.compressed))
        if num.cache_quant:
            queries = fake_quant_mxfp4(queries)
        weights = num.round(self.weights_proj(x, num) * (dim**-0.5 * heads**-0.5))
        return keys_of(step).select(self, queries, weights, shared, step)
