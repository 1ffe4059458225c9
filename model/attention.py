"""The attention sublayer: latent queries, one shared key/value vector per token, window plus compressed entries.

Formula: docs/model.md, "Attention". B requests, S rows, D hidden, N heads, H head dim.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from widemesh.model.cache import LayerCache, window_before, write_window, written_entries
from widemesh.model.compressor import Compressor
from widemesh.model.config import LayerRole, ModelConfig
from widemesh.model.indexer import Indexer, Shared
from widemesh.model.linear import Linear, RMSNorm
from widemesh.model.params import param, value
from widemesh.model.rope import RopeTable, rotate
from widemesh.model.step import StepContext
from widemesh.pallas_kernels.paged_cache import fake_quant, gather_rows, read_keys, read_rows, write_source
from widemesh.pallas_kernels.sparse_attention import SelectedMask, Selection, empty_selection, sparse_attention


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
        # Place of the source that this layer owns or reads, in the layout of a page.
        self.source = -1 if role.kv_source is None else config.kv_source_layers.index(role.kv_source)
        if role.owns_kv:
            self.compressor = Compressor(config, role.ratio)
        if role.owns_index:
            self.indexer = Indexer(config, role)

    def write(
        self, x: Float[Array, "B S D"], cache: LayerCache, shared: Shared, step: StepContext
    ) -> tuple[Float[Array, "B WS H"], LayerCache, Shared]:
        """Window and compressed keys of every row.

        Returns the window rows at positions start - (window - 1) .. start + S - 1, the layer's new state, and the
        shared state with this layer's source in view, if it is one.
        """
        rows, layout = step.rows, shared.layout.window
        kv = self.window_kv(x, step)
        before = window_before(cache.window, rows.start, rows.first, self.config.sliding_window, layout)
        near = jnp.concatenate([before, fake_quant(kv, layout)], axis=1)
        open_group = cache.open_group
        if self.role.owns_kv:
            shared, ring = self.extend_source(x, open_group[0], shared, step)
            open_group = (ring,)
        return near, LayerCache(write_window(cache.window, kv, rows.start, rows.length, layout), open_group), shared

    def attend(
        self, x: Float[Array, "B S D"], near: Float[Array, "B WS H"], shared: Shared, step: StepContext
    ) -> tuple[Float[Array, "B S D"], Shared]:
        """Output of the sublayer for rows whose keys `write` has made, and the shared state with their selection."""
        config, role, num, rows = self.config, self.role, step.numerics, step.rows
        q_latent = self.q_norm(self.wq_a(x, num), num)
        q = self.wq_b(q_latent, num).reshape(*x.shape[:2], config.num_attention_heads, config.head_dim)
        q = num.round(rotate(q, rows.positions, self.rope(step)))
        if role.owns_index:
            shared = self.indexer(x, q_latent, shared, step)
        o = sparse_attention(
            q, near, rows.start, rows.first, *self.compressed(shared, step), value(self.attn_sink),
            window=config.sliding_window, ratio=role.ratio, start_bound=step.settings.start_bound,
            bf16_rounding=num.bf16_rounding,
        )  # fmt: skip
        out = self.project(num.round(o), step)
        step.record("output", out)
        return out, shared

    def rope(self, step: StepContext) -> RopeTable:
        """The table of this layer's kind."""
        return step.rope.compressed if self.role.ratio else step.rope.plain

    def window_kv(self, x: Float[Array, "B S D"], step: StepContext) -> Float[Array, "B S H"]:
        """The vector that is both key and value of each row: normed and rotated."""
        kv = self.kv_norm(self.wkv(x, step.numerics), step.numerics)
        return step.numerics.round(rotate(kv, step.rows.positions, self.rope(step)))

    def extend_source(
        self, x: Float[Array, "B S D"], ring: Float[Array, "B open 2 H"], shared: Shared, step: StepContext
    ) -> tuple[Shared, Float[Array, "B open 2 H"]]:
        """Compress this step's groups into the pages and put this source in view.

        An entry's position is that of its group's first token; the index key is taken before the entry's rotation.
        """
        num, rows, layout, ratio = step.numerics, step.rows, shared.layout.sources[self.source], self.role.ratio
        new, ring = self.compressor(x, ring, step)
        positions, rope = new.index * ratio, self.rope(step)
        entry = num.round(rotate(new.latent, positions, rope))
        key = num.round(rotate(self.indexer.keys(new.latent, step), positions, rope))
        step.record("compressed_kv", fake_quant(entry, layout.row))
        step.record("index_keys", fake_quant(key, layout.key))
        is_new = new.valid & (positions >= rows.write_from[:, None])
        pages = write_source(shared.pages, shared.table, new.index, is_new, entry, key, layout)
        return self.view(dataclasses.replace(shared, pages=pages), step), ring

    def view(self, shared: Shared, step: StepContext) -> Shared:
        """Put this layer's source in view as its pages are now."""
        layout, ratio, tokens = shared.layout.sources[self.source], self.role.ratio, step.rows.start + step.rows.length
        index_keys = written_entries(read_keys(shared.pages, shared.table, layout), tokens, ratio)
        entries, candidates = shared.entries, shared.candidates
        if step.settings.selection == "mask":
            entries = written_entries(read_rows(shared.pages, shared.table, layout), tokens, ratio)
        if candidates.shape[-1] != index_keys.shape[1]:  # of another ratio, hence before the candidate source
            candidates = jnp.ones((*candidates.shape[:2], index_keys.shape[1]), bool)
        return dataclasses.replace(shared, entries=entries, index_keys=index_keys, candidates=candidates)

    def compressed(self, shared: Shared, step: StepContext) -> tuple[Float[Array, "B ..."], Selection]:
        """The compressed entries that this layer attends to, in the form of its selection, and the selection."""
        b, s = step.rows.tokens.shape
        if not self.role.ratio:
            nothing = empty_selection(step.settings.selection, b, s)
            shape = (b, 0) if isinstance(nothing, SelectedMask) else (b, s, 0)
            return jnp.zeros((*shape, self.config.head_dim)), nothing
        if isinstance(shared.selection, SelectedMask):
            return shared.entries, shared.selection
        indices = shared.selection.indices
        return gather_rows(shared.pages, shared.table, indices, shared.layout.sources[self.source]), shared.selection

    def project(self, o: Float[Array, "B S N H"], step: StepContext) -> Float[Array, "B S D"]:
        """Undo the rotation at the query's position, then the grouped low-rank output projection."""
        num, groups = step.numerics, self.config.o_groups
        o = num.round(rotate(o, step.rows.positions, self.rope(step), inverse=True))
        o = o.reshape(*o.shape[:2], groups, -1)
        wo_a = value(self.wo_a.weight).reshape(groups, self.config.o_lora_rank, -1)
        latent = jnp.moveaxis(jnp.einsum("bsgk,gok->gbso", o, wo_a), 0, 2)
        return self.wo_b(num.round(latent).reshape(*o.shape[:2], -1), num)
