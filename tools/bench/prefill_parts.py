"""Where the time of a prefill goes: its parts, each compiled and timed on its own on the shapes of the whole.

A part alone finds its inputs in cache and shares the machine with nothing, so the sum is a little less than what the
parts take inside the whole; the remainder (norms, rotations, quantisation, Engram, cache writes and that difference)
is what `rest` shows.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from widemesh.model.config import LayerRole
from widemesh.model.forward import ForwardModel
from widemesh.model.rope import RopeTables
from widemesh.model.step import Rows, StepContext, StepSettings
from widemesh.model.transformer import Transformer
from widemesh.pallas_kernels import mhc
from widemesh.pallas_kernels.formats import fake_quant_mxfp4
from widemesh.pallas_kernels.indexer_scores import indexer_scores
from widemesh.pallas_kernels.select_topk import candidate_mask, select_mask_causal
from widemesh.pallas_kernels.sparse_attention import SelectedMask, sparse_attention, visible_entries
from widemesh.tools.bench.prefill_work import linear_shapes
from widemesh.tools.bench.timing import median_s


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parts:
    """Times the parts of one fresh prefill of `rows` with the weights of `model`. T tokens, one request."""

    model: ForwardModel
    rows: Rows
    settings: StepSettings
    repeat: int

    def seconds(self) -> dict[str, float]:
        """Seconds per prefill by part, all layers together."""
        return {
            "linears outside experts": self._linears(),
            "mixture of experts": self._experts(),
            "attention": self._over_layers(self._attention, lambda role: role.ratio),
            "index scores": self._over_layers(self._scores, lambda role: role.ratio if role.owns_index else None),
            "top-k": self._over_layers(
                self._select, lambda role: (role.ratio, role.writes_candidates) if role.owns_index else None
            ),
            "stream mixing (mHC)": self._mixing(),
        }

    @property
    def _tokens(self) -> int:
        return self.rows.tokens.shape[1]

    def _over_layers(self, part: Callable[[Any], float], kind: Callable[[LayerRole], Any]) -> float:
        """Sum over the layers, timing each kind once; None = the layer has no such part."""
        kinds = Counter(kind(role) for role in self.model.config.roles)
        return sum(count * part(which) for which, count in kinds.items() if which is not None)

    def _linears(self) -> float:
        """All but those of the experts, of the gate and of the stream mixing, which are in their own parts."""
        config, total = self.model.config, 0.0
        elsewhere = {  # of each layer: shared expert, gate, two mixing projections
            (self._tokens, config.moe_intermediate_size, config.hidden_size): 2,
            (self._tokens, config.hidden_size, config.moe_intermediate_size): 1,
            (self._tokens, config.n_routed_experts, config.hidden_size): 1,
            (self._tokens, config.hc_mult * (config.hc_mult + 2), config.hc_mult * config.hidden_size): 2,
        }
        shapes = Counter(linear_shapes(config, self._tokens))
        shapes.subtract({shape: count * config.num_hidden_layers for shape, count in elsewhere.items()})
        linear = jax.jit(lambda x, w: jnp.einsum("tk,ok->to", x, w))
        for (rows, outputs, inputs), count in shapes.items():
            if count:
                total += count * self._time(linear, self._draw(rows, inputs), self._draw(outputs, inputs))
        return total

    def _experts(self) -> float:
        config = self.model.config
        x = self._draw(1, self._tokens, config.hidden_size)
        return config.num_hidden_layers * self._time_module(lambda model, x, step: model.layers[0].ffn(x, step), x)

    def _mixing(self) -> float:
        config = self.model.config

        def site(model: Transformer, streams: Array, pre: Array, out: Array, step: StepContext) -> tuple[Array, ...]:
            pre_next, post, comb = model.layers[0].site("attn", streams, step)
            return pre_next, mhc.collapse(streams, pre), mhc.expand(out, streams, post, comb)

        streams = self._draw(1, self._tokens, config.hc_mult, config.hidden_size)
        pre, out = self._draw(1, self._tokens, config.hc_mult), self._draw(1, self._tokens, config.hidden_size)
        return 2 * config.num_hidden_layers * self._time_module(site, streams, pre, out)

    def _attention(self, ratio: int) -> float:
        config, tokens = self.model.config, self._tokens
        entries = tokens // ratio if ratio else 0
        scores = self._visible(self._draw(1, tokens, entries), ratio or 1)

        @jax.jit
        def attend(q: Array, near: Array, entries: Array, mask: Array, sink: Array) -> Array:
            return sparse_attention(
                q, near, self.rows.start, self.rows.first, entries, SelectedMask(mask), sink,
                window=config.sliding_window, ratio=ratio, start_bound=self.settings.start_bound,
            )  # fmt: skip

        return self._time(
            attend, self._draw(1, tokens, config.num_attention_heads, config.head_dim),
            self._draw(1, tokens + config.sliding_window - 1, config.head_dim), self._draw(1, entries, config.head_dim),
            select_mask_causal(scores, config.index_topk, ratio=ratio or 1, start_bound=self.settings.start_bound),
            self._draw(config.num_attention_heads),
        )  # fmt: skip

    def _scores(self, ratio: int) -> float:
        config, tokens = self.model.config, self._tokens
        heads, dim, quant = config.index_n_heads, config.index_head_dim, self.settings.numerics.cache_quant
        queries, keys = self._draw(1, tokens, heads, dim), self._draw(1, tokens // ratio, dim)
        if quant:
            queries, keys = fake_quant_mxfp4(queries), fake_quant_mxfp4(keys)

        @jax.jit
        def score(queries: Array, weights: Array, keys: Array) -> Array:
            return indexer_scores(queries, weights, keys, ratio=ratio, start_bound=self.settings.start_bound,
                                  bf16_operands=quant)  # fmt: skip

        return self._time(score, queries, self._draw(1, tokens, heads), keys)

    def _select(self, kind: tuple[int, bool]) -> float:
        (ratio, candidates), config = kind, self.model.config
        scores = self._visible(self._draw(1, self._tokens, self._tokens // ratio), ratio)

        @jax.jit
        def select(scores: Array) -> tuple[Array, ...]:
            mask = select_mask_causal(scores, config.index_topk, ratio=ratio, start_bound=self.settings.start_bound)
            if not candidates:
                return (mask,)
            count = (self.rows.positions + 1) // ratio
            return mask, candidate_mask(
                scores, count, block=config.candidate_block_size, top_blocks=config.candidate_topk_blocks
            )

        return self._time(select, scores)

    def _visible(self, scores: Float[Array, "B S L"], ratio: int) -> Float[Array, "B S L"]:
        visible = visible_entries(self.rows.start, self._tokens, scores.shape[2], ratio)
        return jnp.where(visible, scores, -jnp.inf)

    def _time_module(self, call: Callable[..., Any], *args: Array) -> float:
        rope = jax.tree.map(jnp.asarray, RopeTables.build(self.model.config, self._tokens))

        def run(parameters: nnx.State[Any, Any], rope: RopeTables, *args: Array) -> Any:
            step = StepContext(self.rows, rope, self.settings)
            return call(nnx.merge(self.model.graph, parameters), *args, step)

        return self._time(jax.jit(run), self.model.parameters, rope, *args)

    def _time(self, program: Callable[..., Any], *args: Any) -> float:
        return median_s(program, *args, repeat=self.repeat)

    def _draw(self, *shape: int) -> Float[Array, "..."]:
        return jax.random.normal(jax.random.key(sum(shape)), shape)
