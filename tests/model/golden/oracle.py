"""The model once more, one sequence at a time, in numpy float64: written from the formulas, sharing only the formats.

Every place where the released engine rounds to bfloat16 goes through `bf` under a name, so that a test can leave one
out and see that the result is another. S rows, C streams, D hidden, N heads, H head dim, L entries.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import ml_dtypes
import numpy as np

from widemesh.model.config import ModelConfig
from widemesh.model.numerics import Numerics
from widemesh.pallas_kernels.formats import fake_quant_fp8, fake_quant_mxfp4, fake_quant_nvfp4

Array = np.ndarray

# Every rounding to bfloat16, by sublayer. The names of linears and norms stand for the rounding of their output.
ROUNDING_POINTS = {
    "mhc": ("collapse", "attn_norm", "ffn_norm", "expand"),
    "attention": ("wq_a", "q_norm", "wq_b", "q_rope", "wkv", "kv_norm", "kv_rope", "probability", "o", "o_rope",
                  "wo_a", "wo_b"),
    "compressor, ratio 2": ("pooled", "compressor.norm", "entry_rope", "wk", "k_norm", "key_rope"),
    "compressor, ratio 1": ("compressor.wkv", "compressor.norm", "entry_rope", "wk", "k_norm", "key_rope"),
    "indexer": ("indexer.wq_b", "index_rope", "weights_proj", "index_weight", "index_dot", "index_term",
                "index_score"),
    "moe": ("w1", "w3", "hidden", "w2", "shared.w1", "shared.w3", "shared.hidden", "shared.w2", "moe"),
    "engram": ("engram.wkv", "engram"),
}  # fmt: skip


@dataclasses.dataclass
class Shared:
    """What a layer leaves for those above."""

    entries: Array
    keys: Array
    selected: list[Array]  # ascending entry indices of each row
    candidates: Array | None = None


class Oracle:
    """All layers of a checkpoint. `skip` names the one rounding point to leave out."""

    def __init__(
        self, config: ModelConfig, read: Callable[[str], Array], numerics: Numerics, *, skip: str | None = None
    ):
        self.config, self.numerics, self.skip = config, numerics, skip
        self.read = lambda name: np.asarray(read(name), np.float64)
        self.records: dict[str, Array] = {}

    # --- roundings ---------------------------------------------------------------------------------------------------

    def bf(self, point: str, x: Array) -> Array:
        """Round to bfloat16 at a named point."""
        assert any(point in points for points in ROUNDING_POINTS.values()), point
        if not self.numerics.bf16_rounding or point == self.skip:
            return x
        return x.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)

    def act(self, x: Array) -> Array:
        """Activation in front of a linear whose weight is stored in FP8 or FP4."""
        return _quantised(fake_quant_fp8, x) if self.numerics.act_quant else x

    def cached(self, form: Callable[[Array], Array], x: Array) -> Array:
        """What a cache gives back."""
        return _quantised(form, x) if self.numerics.cache_quant else x

    def norm(self, point: str, x: Array, name: str) -> Array:
        """RMSNorm with the named weight."""
        eps = self.config.rms_norm_eps
        return self.bf(point, x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * self.read(name))

    # --- the whole ---------------------------------------------------------------------------------------------------

    def logits(self, ids: Array, engram_rows: Array) -> Array:
        """Logits of one sequence, [S, V]. `engram_rows` [S, Engram layers, columns]."""
        streams = np.repeat(self.read("embed.weight")[ids][:, None], self.config.hc_mult, axis=1)
        pre = np.tile(np.eye(1, self.config.hc_mult), (len(ids), 1))
        shared = None
        for layer in range(self.config.num_hidden_layers):
            streams, pre, shared = self.layer(layer, streams, pre, shared, engram_rows)
        hidden = self.norm("attn_norm", self.collapse(streams, pre), "norm.weight")
        return hidden @ self.read("head.weight").T

    def layer(
        self, layer: int, streams: Array, pre: Array, shared: Shared | None, engram_rows: Array
    ) -> tuple[Array, Array, Shared | None]:
        """New streams, the pre-mix for the next layer, and the shared state."""
        p, record = f"layers.{layer}.", self.records.__setitem__
        if self.config.roles[layer].has_engram:
            streams = self.engram(layer, streams, engram_rows)
            record(p + "engram.output", streams)
        mixed, post, comb = self.coefficients(p + "hc_attn", streams)
        x = self.norm("attn_norm", self.collapse(streams, pre), p + "attn_norm.weight")
        record(p + "attn.input", x)
        out, shared = self.attention(layer, x, shared)
        record(p + "attn.output", out)
        streams = self.expand(out, streams, post, comb)

        next_pre, post, comb = self.coefficients(p + "hc_ffn", streams)
        x = self.norm("ffn_norm", self.collapse(streams, mixed), p + "ffn_norm.weight")
        record(p + "ffn.input", x)
        out = self.moe(layer, x)
        record(p + "ffn.output", out)
        streams = self.expand(out, streams, post, comb)
        record(p + "streams_out", streams)
        return streams, next_pre, shared

    # --- hyper-connections -------------------------------------------------------------------------------------------

    def coefficients(self, prefix: str, streams: Array) -> tuple[Array, Array, Array]:
        """pre [S, C], post [S, C] and comb [S, input C, output C]."""
        c = self.config.hc_mult
        fn, base, scale = (self.read(f"{prefix}_{part}") for part in ("fn", "base", "scale"))
        flat = streams.reshape(len(streams), -1)
        m = flat @ fn.T / np.sqrt((flat * flat).mean(-1, keepdims=True) + self.config.rms_norm_eps)
        pre = _sigmoid(m[:, :c] * scale[0] + base[:c]) + self.config.hc_eps
        post = 2 * _sigmoid(m[:, c : 2 * c] * scale[1] + base[c : 2 * c])
        logits = (m[:, 2 * c :] * scale[2] + base[2 * c :]).reshape(-1, c, c)
        return pre, post, sinkhorn(logits, self.config.hc_sinkhorn_iters, self.config.hc_eps)

    def collapse(self, streams: Array, pre: Array) -> Array:
        """Weighted sum of the streams."""
        return self.bf("collapse", np.einsum("sc,scd->sd", pre, streams))

    def expand(self, out: Array, streams: Array, post: Array, comb: Array) -> Array:
        """The sublayer's output and the mixed streams."""
        return self.bf("expand", post[:, :, None] * out[:, None] + np.einsum("sjk,sjd->skd", comb, streams))

    # --- attention ---------------------------------------------------------------------------------------------------

    def attention(self, layer: int, x: Array, shared: Shared | None) -> tuple[Array, Shared | None]:
        """Output of the sublayer and what it leaves for those above."""
        config, p, role = self.config, f"layers.{layer}.attn.", self.config.roles[layer]
        rows, heads, dim, groups = len(x), config.num_attention_heads, config.head_dim, config.o_groups
        position = np.arange(rows)
        weight = lambda name: self.read(f"{p}{name}.weight")  # noqa: E731
        latent = self.norm("q_norm", self.bf("wq_a", self.act(x) @ weight("wq_a").T), p + "q_norm.weight")
        q = self.bf("wq_b", self.act(latent) @ weight("wq_b").T).reshape(rows, heads, dim)
        q = self.bf("q_rope", self.rope(q, position, role.ratio))
        kv = self.norm("kv_norm", self.bf("wkv", self.act(x) @ weight("wkv").T), p + "kv_norm.weight")
        kv = self.cached(fake_quant_fp8, self.bf("kv_rope", self.rope(kv, position, role.ratio)))
        if role.owns_kv:
            entries, keys = self.compress(layer, x)
            shared = Shared(entries, keys, [], None if shared is None else shared.candidates)
        if role.owns_index:
            assert shared is not None
            shared = self.select(layer, x, latent, shared)

        o = np.zeros((rows, heads, dim))
        sink = self.read(p + "attn_sink")
        for row in range(rows):
            keys = kv[max(0, row - config.sliding_window + 1) : row + 1]
            if role.ratio:
                keys = np.concatenate([keys, shared.entries[shared.selected[row]]])
            scores = q[row] @ keys.T * dim**-0.5  # [N, keys]
            top = scores.max(-1, keepdims=True)
            e = np.exp(scores - top)
            o[row] = self.bf("probability", e) @ keys / (e.sum(-1, keepdims=True) + np.exp(sink[:, None] - top))
        o = self.bf("o_rope", self.rope(self.bf("o", o), position, role.ratio, inverse=True))
        wo_a = weight("wo_a").reshape(groups, config.o_lora_rank, -1)
        z = self.bf("wo_a", np.einsum("sgi,goi->sgo", o.reshape(rows, groups, -1), wo_a)).reshape(rows, -1)
        return self.bf("wo_b", self.act(z) @ weight("wo_b").T), shared

    def rope(self, x: Array, position: Array, ratio: int, *, inverse: bool = False) -> Array:
        """Rotate the last dimensions in adjacent pairs, as complex numbers."""
        config, dims = self.config, self.config.qk_rope_head_dim
        theta = config.compress_rope_theta if ratio else config.rope_theta
        freq = theta ** (-np.arange(0, dims, 2) / dims)
        if ratio:
            yarn = config.rope_scaling
            turns = lambda n: (  # noqa: E731
                dims * np.log(yarn.original_max_position_embeddings / (2 * np.pi * n)) / (2 * np.log(theta))
            )
            low, high = max(np.floor(turns(yarn.beta_fast)), 0), min(np.ceil(turns(yarn.beta_slow)), dims - 1)
            ramp = np.clip((np.arange(dims // 2) - low) / max(high - low, 1e-3), 0, 1)
            freq = freq / yarn.factor * ramp + freq * (1 - ramp)
        angle = position[:, None] * freq * (-1 if inverse else 1)
        turn = np.exp(1j * angle).reshape(len(position), *[1] * (x.ndim - 2), -1)
        pairs = (x[..., -dims::2] + 1j * x[..., 1 - dims :: 2]) * turn
        turned = np.stack([pairs.real, pairs.imag], axis=-1).reshape(*x.shape[:-1], dims)
        return np.concatenate([x[..., :-dims], turned], axis=-1)

    def compress(self, layer: int, x: Array) -> tuple[Array, Array]:
        """Entries and index keys of all complete groups."""
        p, ratio = f"layers.{layer}.attn.", self.config.roles[layer].ratio
        weight = lambda name: self.read(f"{p}{name}.weight")  # noqa: E731
        values = x @ weight("compressor.wkv").T
        if ratio == 1:
            pooled = self.bf("compressor.wkv", values)
        else:
            groups = len(x) // ratio
            values, gates = (
                v[: groups * ratio].reshape(groups, ratio, -1) for v in (values, x @ weight("compressor.wgate").T)
            )
            pooled = self.bf("pooled", (_softmax(gates, 1) * values).sum(1))
        latent = self.norm("compressor.norm", pooled, p + "compressor.norm.weight")
        position = np.arange(len(latent)) * ratio
        entries = self.bf("entry_rope", self.rope(latent, position, ratio))
        keys = self.norm("k_norm", self.bf("wk", latent @ weight("indexer.wk").T), p + "indexer.k_norm.weight")
        keys = self.bf("key_rope", self.rope(keys, position, ratio))
        entries, keys = self.cached(fake_quant_nvfp4, entries), self.cached(fake_quant_mxfp4, keys)
        self.records[p + "compressed_kv"], self.records[p + "index_keys"] = entries, keys
        return entries, keys

    def select(self, layer: int, x: Array, latent: Array, shared: Shared) -> Shared:
        """Scores of all entries and the best of them."""
        config, p, role = self.config, f"layers.{layer}.attn.", self.config.roles[layer]
        rows, heads, dim = len(x), config.index_n_heads, config.index_head_dim
        iq = self.bf("indexer.wq_b", self.act(latent) @ self.read(p + "indexer.wq_b.weight").T)
        iq = self.rope(iq.reshape(rows, heads, dim), np.arange(rows), role.ratio)
        iq = self.cached(fake_quant_mxfp4, self.bf("index_rope", iq))
        w = self.bf("weights_proj", x @ self.read(p + "indexer.weights_proj.weight").T)
        w = self.bf("index_weight", w * (dim * heads) ** -0.5)
        dots = self.bf("index_dot", np.einsum("shd,jd->shj", iq, shared.keys))
        scores = self.bf("index_score", self.bf("index_term", np.maximum(dots, 0) * w[:, :, None]).sum(1))
        visible = (np.arange(rows) + 1) // role.ratio
        scores[np.arange(scores.shape[1]) >= visible[:, None]] = -np.inf
        self.records[p + "indexer_scores"] = scores
        candidates = shared.candidates
        if role.writes_candidates:
            candidates = self.candidates(scores, visible)
        if role.reads_candidates:
            scores = np.where(candidates, scores, -np.inf)
        best = np.argsort(-scores, axis=-1, kind="stable")[:, : config.index_topk]
        selected = [np.sort(b[np.isfinite(s[b])]) for b, s in zip(best, scores, strict=True)]
        return Shared(shared.entries, shared.keys, selected, candidates)

    def candidates(self, scores: Array, visible: Array) -> Array:
        """Entries of the best blocks, the newest block included."""
        size, entries = self.config.candidate_block_size, scores.shape[1]
        mask = np.zeros(scores.shape, bool)
        for row, count in enumerate(visible):
            best = {b: scores[row, b * size : (b + 1) * size].max() for b in range(-(-count // size))}
            if count:
                best[(count - 1) // size] = np.inf
            for block in sorted(best, key=best.__getitem__, reverse=True)[: self.config.candidate_topk_blocks]:
                mask[row, block * size : (block + 1) * size] = True
        return mask & (np.arange(entries) < visible[:, None])

    # --- experts -----------------------------------------------------------------------------------------------------

    def moe(self, layer: int, x: Array) -> Array:
        """Routed and shared experts."""
        config, p = self.config, f"layers.{layer}.ffn."
        scores = np.sqrt(np.logaddexp(0, x @ self.read(p + "gate.weight").T))
        chosen = np.argsort(-(scores + self.read(p + "gate.bias")), axis=-1, kind="stable")
        chosen = chosen[:, : config.num_experts_per_tok]
        weights = np.take_along_axis(scores, chosen, axis=-1)
        if config.norm_topk_prob and config.num_experts_per_tok > 1:
            weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
        weights = weights * config.routed_scaling_factor
        y = np.zeros_like(x)
        for expert in range(config.n_routed_experts):
            row, place = np.nonzero(chosen == expert)
            y[row] += self.expert(f"{p}experts.{expert}.", x[row], weights[row, place, None], "")
        return self.bf("moe", y + self.expert(f"{p}shared_experts.", x, 1.0, "shared."))

    def expert(self, prefix: str, x: Array, weight: Array | float, point: str) -> Array:
        """One expert; the routing weight acts before w2."""
        w1, w3, w2 = (self.read(f"{prefix}{name}.weight") for name in ("w1", "w3", "w2"))
        limit = self.config.swiglu_limit
        gate = np.minimum(self.bf(point + "w1", self.act(x) @ w1.T), limit)
        up = np.clip(self.bf(point + "w3", self.act(x) @ w3.T), -limit, limit)
        hidden = self.bf(point + "hidden", gate * _sigmoid(gate) * up * weight)
        return self.bf(point + "w2", self.act(hidden) @ w2.T)

    # --- Engram ------------------------------------------------------------------------------------------------------

    def engram(self, layer: int, streams: Array, engram_rows: Array) -> Array:
        """Streams with the gated value added."""
        config, p = self.config, f"layers.{layer}.engram."
        c, d = streams.shape[1:]
        rows = engram_rows[:, config.engram_layer_ids.index(layer)]
        looked_up = self.read(p + "embed.weight")[rows].reshape(len(rows), -1)
        both = self.bf("engram.wkv", self.act(looked_up) @ self.read(p + "wkv.weight").T)
        key, value = both[:, : c * d].reshape(-1, c, d), both[:, c * d :]
        unit = lambda v: v / np.sqrt((v * v).mean(-1, keepdims=True) + config.rms_norm_eps)  # noqa: E731
        match = (unit(streams) * self.read(p + "q_weight") * self.read(p + "k_weight") * unit(key)).sum(-1) * d**-0.5
        gate = _sigmoid(np.copysign(np.sqrt(np.maximum(np.abs(match), 1e-6)), match))
        return self.bf("engram", streams + gate[..., None] * value[:, None])


def sinkhorn(logits: Array, iterations: int, eps: float) -> Array:
    """Softmax over the output streams, then columns and rows in turn, columns last."""
    comb = _softmax(logits, -1) + eps
    comb = comb / (comb.sum(-2, keepdims=True) + eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(-1, keepdims=True) + eps)
        comb = comb / (comb.sum(-2, keepdims=True) + eps)
    return comb


def _quantised(form: Callable[[Array], Array], x: Array) -> Array:
    return np.asarray(form(x.astype(np.float32)), np.float64)


def _sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def _softmax(x: Array, axis: int) -> Array:
    e = np.exp(x - x.max(axis=axis, keepdims=True))
    return e / e.sum(axis=axis, keepdims=True)
