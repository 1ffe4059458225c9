"""The attention sublayer: latent queries, one shared key/value vector per token, window plus compressed entries.

Formula: docs/model.md, "Attention". B requests, S rows, D hidden, N heads, H head dim.
"""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from widemesh.model.cache import LayerCache, SourceCache, window_before, write_entries, write_window, written_entries
from widemesh.model.compressor import Compressor
from widemesh.model.config import LayerRole, ModelConfig
from widemesh.model.indexer import Indexer, Shared
from widemesh.model.linear import Linear, RMSNorm
from widemesh.model.params import param, value
from widemesh.model.rope import RopeTable, rotate
from widemesh.model.step import StepContext
from widemesh.pallas_kernels.formats import fake_quant_fp8, fake_quant_mxfp4, fake_quant_nvfp4
from widemesh.pallas_kernels.sparse_attention import empty_selection, sparse_attention


class Attention(nnx.Module):
    """One layer's attention; its role says what it owns and reads."""

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
            (config.o_groups * config.o_lora_rank, "o_groups"), (heads // config.o_groups * dim, None), kind="bf16"
        )
        self.wo_b = Linear(embed, (config.o_groups * config.o_lora_rank, "o_groups"), kind="quantised")
        if role.owns_kv:
            self.compressor = Compressor(config, role.ratio)
        if role.owns_index:
            self.indexer = Indexer(config, role)

    def __call__(
        self, x: Float[Array, "B S D"], cache: LayerCache, shared: Shared | None, step: StepContext
    ) -> tuple[Float[Array, "B S D"], LayerCache, Shared | None]:
        """Output of the sublayer, the layer's new state, and what later layers read."""
        config, role, num, rows = self.config, self.role, step.numerics, step.rows
        step.record("input", x)
        rope = step.rope.compressed if role.ratio else step.rope.plain
        q_latent = self.q_norm(self.wq_a(x, num), num)
        q = self.wq_b(q_latent, num).reshape(*x.shape[:2], config.num_attention_heads, config.head_dim)
        q = num.round(rotate(q, rows.positions, rope))
        kv = self.window_kv(x, rope, step)
        near = jnp.concatenate([window_before(cache.window, rows.start, config.sliding_window), kv], axis=1)

        source = cache.source
        if role.owns_kv:
            source = (self.extend_source(x, source[0], rope, step),)
            shared = self.adopt(source[0], shared, step)
        if role.owns_index:
            assert shared is not None
            shared = self.indexer(x, q_latent, shared, step)
        if role.ratio:
            assert shared is not None
            entries, selection = shared.entries, shared.selection
        else:
            entries = jnp.zeros((x.shape[0], 0, config.head_dim))
            selection = empty_selection(step.settings.selection, *x.shape[:2])
        o = sparse_attention(
            q, near, rows.start, entries, selection, value(self.attn_sink), window=config.sliding_window,
            ratio=role.ratio, start_bound=step.settings.start_bound, bf16_rounding=num.bf16_rounding,
        )  # fmt: skip
        out = self.project(num.round(o), rope, step)
        step.record("output", out)
        window = write_window(cache.window, kv, rows.start, rows.length)
        return out, LayerCache(window, source), shared

    def window_kv(self, x: Float[Array, "B S D"], rope: RopeTable, step: StepContext) -> Float[Array, "B S H"]:
        """The vector that is both key and value of each row: normed, rotated, then rounded to the cache grid."""
        kv = self.kv_norm(self.wkv(x, step.numerics), step.numerics)
        kv = step.numerics.round(rotate(kv, step.rows.positions, rope))
        return fake_quant_fp8(kv) if step.numerics.cache_quant else kv

    def extend_source(
        self, x: Float[Array, "B S D"], source: SourceCache, rope: RopeTable, step: StepContext
    ) -> SourceCache:
        """Compress this step's groups and append them: entries and index keys from the same latent.

        An entry's position is that of its group's first token; the index key is taken before the entry's rotation.
        """
        num = step.numerics
        new, pending = self.compressor(x, source.pending, step)
        positions = new.index * self.role.ratio
        entry = num.round(rotate(new.latent, positions, rope))
        key = num.round(rotate(self.indexer.keys(new.latent, step), positions, rope))
        if num.cache_quant:
            entry, key = fake_quant_nvfp4(entry), fake_quant_mxfp4(key)
        step.record("compressed_kv", entry)
        step.record("index_keys", key)
        return SourceCache(
            write_entries(source.entries, entry, new.index, new.valid),
            write_entries(source.index_keys, key, new.index, new.valid),
            pending,
        )

    def adopt(self, source: SourceCache, shared: Shared | None, step: StepContext) -> Shared:
        """Shared state with this layer's caches. Candidates keep their values; before any source they allow all."""
        b, s = step.rows.tokens.shape
        capacity = source.entries.shape[1]
        candidates = shared.candidates if shared else jnp.zeros((b, s, 0), bool)
        selection = empty_selection(step.settings.selection, b, s)
        if candidates.shape[-1] != capacity:  # of another ratio, hence before the candidate source
            candidates = jnp.ones((b, s, capacity), bool)
        entries = written_entries(source.entries, step.rows.start + step.rows.length, self.role.ratio)
        return Shared(entries, source.index_keys, selection, candidates)

    def project(self, o: Float[Array, "B S N H"], rope: RopeTable, step: StepContext) -> Float[Array, "B S D"]:
        """Undo the rotation at the query's position, then the grouped low-rank output projection."""
        num, groups = step.numerics, self.config.o_groups
        o = num.round(rotate(o, step.rows.positions, rope, inverse=True))
        o = o.reshape(*o.shape[:2], groups, -1)
        wo_a = value(self.wo_a.weight).reshape(groups, self.config.o_lora_rank, -1)
        latent = jnp.moveaxis(jnp.einsum("bsgk,gok->gbso", o, wo_a), 0, 2)
        return self.wo_b(num.round(latent).reshape(*o.shape[:2], -1), num)
