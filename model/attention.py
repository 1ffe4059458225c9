"""The attention sublayer: latent queries, one shared key/value vector per token, window plus compressed entries.

Formula: docs/model.md, "Attention". B requests, S rows, D hidden, N heads, H head dim.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from widemesh.model.cache import LayerCache
from widemesh.model.compressor import Compressor
from widemesh.model.config import LayerRole, ModelConfig
from widemesh.model.indexer import Indexer
from widemesh.model.keys import WindowKeys, keys_of
from widemesh.model.linear import Linear, RMSNorm
from widemesh.model.params import matrix, param
from widemesh.model.rope import RopeTable, rotate
from widemesh.model.shared import Shared
from widemesh.model.step import StepContext


class Attention(nnx.Module):
    """One layer's attention; its role says what it owns and reads.

    Queries, sinks and the output projection may be those of some heads only, whole output groups of them; the number
    is read off the matrices. Keys belong to all heads and are whole.
    """

    def __init__(self, config: ModelConfig, role: LayerRole):
        self.config, self.role = config, role
        heads, dim, embed = config.num_attention_heads, config.head_dim, (config.hidden_size, "embed")
        q_lora = (config.q_lora_rank, "q_lora")
        eps = config.rms_norm_eps
        self.wq_a = Linear(q_lora, embed, kind="quantised")
        self.q_norm = RMSNorm(config.q_lora_rank, "q_lora", eps=eps)
        self.wq_b = Linear((heads * dim, "heads"), q_lora, kind="quantised")
        self.wkv = Linear((dim, "head_dim"), embed, kind="quantised")
        self.kv_norm = RMSNorm(dim, "head_dim", eps=eps)
        self.attn_sink = param((heads, "heads"))
        # Stored in FP8 but applied to unquantised activations, group by group.
        self.wo_a = Linear(
            (config.o_groups * config.o_lora_rank, "o_groups"), (heads // config.o_groups * dim, None), kind="bf16",
            stored="fp8",
        )  # fmt: skip
        self.wo_b = Linear(embed, (config.o_groups * config.o_lora_rank, "o_groups"), kind="quantised")
        # Place of the source that this layer owns or reads, in the layout of a page.
        self.source = -1 if role.kv_source is None else config.kv_source_layers.index(role.kv_source)
        if role.owns_kv:
            self.compressor = Compressor(config, role.ratio)
        if role.owns_index:
            self.indexer = Indexer(config, role)

    def write(
        self, x: Float[Array, "B S D"], cache: LayerCache, shared: Shared, step: StepContext
    ) -> tuple[Any, LayerCache, Shared]:
        """Window and compressed keys of every row.

        Returns the window rows that these rows see (in the form of `keys_of`), the layer's new state, and the shared
        state with this layer's source in view, if it is one.
        """
        near, window = self.keys(step).write_window(self, self.window_kv(x, step), cache.window, shared, step)
        open_group = cache.open_group
        if self.role.owns_kv:
            shared, ring = keys_of(step).extend_source(self, x, open_group[0], shared, step)
            open_group = (ring,)
        return near, LayerCache(window, open_group), shared

    def attend(
        self, x: Float[Array, "B S D"], near: Any, shared: Shared, step: StepContext
    ) -> tuple[Float[Array, "B S D"], Shared]:
        """Output of the sublayer for rows whose keys `write` has made, and the shared state with their selection."""
        config, num = self.config, step.numerics
        q_latent = self.q_norm(self.wq_a(x, num), num)
        q = self.wq_b(q_latent, num).reshape(*x.shape[:2], -1, config.head_dim)
        q = num.round(rotate(q, step.rows.positions, self.rope(step)))
        if self.role.owns_index:
            shared = self.indexer(x, q_latent, shared, step)
        out = self.project(num.round(self.keys(step).attend(self, q, near, shared, step)), step)
        step.record("output", out)
        return out, shared

    def keys(self, step: StepContext) -> WindowKeys:
        """How it reaches its window rows, and attends."""
        return keys_of(step)

    def rope(self, step: StepContext) -> RopeTable:
        """The table of this layer's kind."""
        return step.rope.compressed if self.role.ratio else step.rope.plain

    def window_kv(self, x: Float[Array, "B S D"], step: StepContext) -> Float[Array, "B S H"]:
        """The vector that is both key and value of each row: normed and rotated."""
        kv = self.kv_norm(self.wkv(x, step.numerics), step.numerics)
        return step.numerics.round(rotate(kv, step.rows.positions, self.rope(step)))

    def project(self, o: Float[Array, "B S N H"], step: StepContext) -> Float[Array, "B S D"]:
        """Undo the rotation at the query's position, then the grouped low-rank output projection."""
        num, rank = step.numerics, self.config.o_lora_rank
        o = num.round(rotate(o, step.rows.positions, self.rope(step), inverse=True))
        wo_a = matrix(self.wo_a.weight).astype(o.dtype)
        wo_a = wo_a.reshape(wo_a.shape[0] // rank, rank, -1)
        o = o.reshape(*o.shape[:2], wo_a.shape[0], -1)
        latent = jnp.einsum("bsgk,gok->gbso", o, wo_a, preferred_element_type=jnp.float32)
        latent = jnp.moveaxis(latent, 0, 2)
        return self.wo_b(num.round(latent).reshape(*o.shape[:2], -1), num, step.settings.tp)
