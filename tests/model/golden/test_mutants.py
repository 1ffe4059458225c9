"""Plausible mistakes, switched in one at a time: each must fail the comparison with the golden values by far.

A mutant runs one layer of golden A that shows it, fed golden values. The same layer without it is within tolerance.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from widemesh.model import attention, compressor, decoded_keys, indexer
from widemesh.model.block import Block
from widemesh.model.config import ModelConfig
from widemesh.model.engram import Engram
from widemesh.model.engram_hash import EngramHash
from widemesh.model.moe import Gate, SharedExpert
from widemesh.model.rope import RopeTables, inverse_frequencies, table
from widemesh.model.transformer import Transformer
from widemesh.pallas_kernels import mhc
from widemesh.pallas_kernels.formats import fake_quant_fp8, fake_quant_mxfp4
from widemesh.pallas_kernels.grouped_moe import ExpertMath
from widemesh.pallas_kernels.mhc import reference as mhc_reference

# Layers of golden A.
WINDOW_ENGRAM = 1
SOURCE_RATIO_2 = 4  # with Engram
SOURCE_RATIO_1 = 6  # the candidate source
REUSE = 7
REINDEX = 8
LAST = 11

Patch = Callable[[pytest.MonkeyPatch], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mutant:
    """One mistake and where it shows."""

    name: str
    layer: int
    patch: Patch = lambda monkeypatch: None
    config: dict[str, Any] = dataclasses.field(default_factory=dict)  # changed fields
    role: dict[str, Any] = dataclasses.field(default_factory=dict)
    rope: Callable[[ModelConfig, int], RopeTables] | None = None
    hash_: Callable[[EngramHash], EngramHash] | None = None
    mode: str = "plain"
    form: str = "mask"
    at_least: float = 100.0  # error in units of what is allowed


def setting(place: Any, name: str, wrong: Callable[..., Any]) -> Patch:
    """Put `wrong(original, *args)` in place of a function or method."""

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        original = getattr(place, name)
        replacement = functools.wraps(original)(lambda *args, **kwargs: wrong(original, *args, **kwargs))
        monkeypatch.setattr(place, name, replacement)

    return patch


# --- hyper-connections -----------------------------------------------------------------------------------------------


def immediate_mix(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each site collapses with its own pre-mix instead of the one handed on."""
    site, collapse, enter, last = Block.site, mhc.collapse, Block.attention_input, {}

    def remember(self, which, streams, step):
        last["pre"], *rest = site(self, which, streams, step)
        return last["pre"], *rest

    def enter_with_own(self, streams, pre, step):
        last["pre"] = site(self, "attn", streams, step)[0]
        return enter(self, streams, pre, step)

    monkeypatch.setattr(Block, "site", remember)
    monkeypatch.setattr(Block, "attention_input", enter_with_own)
    monkeypatch.setattr(mhc, "collapse", lambda streams, pre: collapse(streams, last["pre"]))


def attention_mix_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The layer hands on the pre-mix of its attention site."""
    site, call, seen = Block.site, Block.__call__, {}

    def remember(self, which, streams, step):
        seen[which] = site(self, which, streams, step)
        return seen[which]

    def hand_on(self, *args):
        streams, _, *rest = call(self, *args)
        return streams, seen["attn"][0], *rest

    monkeypatch.setattr(Block, "site", remember)
    monkeypatch.setattr(Block, "__call__", hand_on)


def engram_after_coefficients(monkeypatch: pytest.MonkeyPatch) -> None:
    """The attention site looks at the streams as they were before Engram."""
    site, call, before = Block.site, Engram.__call__, {}

    def remember(self, streams, step):
        before["attn"] = streams
        return call(self, streams, step)

    monkeypatch.setattr(Engram, "__call__", remember)
    monkeypatch.setattr(
        Block, "site", lambda self, which, streams, step: site(self, which, before.pop(which, streams), step)
    )


def coefficients(change: Callable[..., Any]) -> Patch:
    """Change the (pre, post, comb) that come out."""
    return setting(mhc, "coefficients", lambda original, *args, **kwargs: change(*original(*args, **kwargs)))


def statistic_per_stream(original, streams, fn, base, scale, **kwargs):
    """Each stream divided by its own RMS, as in a joint layer norm per stream."""
    x = streams.astype(jnp.float32)
    return original(x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-20), fn, base, scale, **kwargs)


def sinkhorn(change: Callable[..., Any]) -> Patch:
    return setting(mhc_reference, "sinkhorn", change)


def ends_on_rows(original, logits, *, iterations, eps):
    comb = original(logits, iterations=iterations, eps=eps)
    return comb / (comb.sum(-1, keepdims=True) + eps)


HYPER_CONNECTIONS = [
    Mutant(name="immediate pre-mix", layer=SOURCE_RATIO_2, patch=immediate_mix),
    Mutant(name="attention's pre-mix handed on", layer=LAST, patch=attention_mix_handed_on),
    Mutant(name="final mean of the streams", layer=LAST, patch=setting(
        Transformer, "leave", lambda original, self, streams, pre, step: original(
            self, streams, jnp.full_like(pre, 0.25), step))),
    Mutant(name="comb transposed", layer=WINDOW_ENGRAM, patch=setting(
        mhc, "expand", lambda original, out, x, post, comb: original(out, x, post, jnp.swapaxes(comb, -1, -2)))),
    Mutant(name="post without its factor 2", layer=WINDOW_ENGRAM, patch=coefficients(
        lambda pre, post, comb: (pre, post / 2, comb))),
    Mutant(name="post with an epsilon", layer=WINDOW_ENGRAM, at_least=1.5, patch=coefficients(
        lambda pre, post, comb: (pre, post + 2e-6, comb))),
    Mutant(name="larger epsilon of the mixes", layer=WINDOW_ENGRAM, at_least=1.5, config={"hc_eps": 3e-6}),
    Mutant(name="RMS per stream", layer=WINDOW_ENGRAM, patch=setting(mhc, "coefficients", statistic_per_stream)),
    Mutant(name="Sinkhorn one iteration short", layer=WINDOW_ENGRAM, at_least=2, config={"hc_sinkhorn_iters": 19}),
    Mutant(name="Sinkhorn one iteration long", layer=WINDOW_ENGRAM, at_least=2, config={"hc_sinkhorn_iters": 21}),
    Mutant(name="Sinkhorn ends on rows", layer=WINDOW_ENGRAM, at_least=5, patch=sinkhorn(ends_on_rows)),
    Mutant(name="softmax over the input streams", layer=WINDOW_ENGRAM, at_least=50, patch=sinkhorn(
        lambda original, logits, **kwargs: jnp.swapaxes(original(jnp.swapaxes(logits, -1, -2), **kwargs), -1, -2))),
]  # fmt: skip

# --- rotary positions ------------------------------------------------------------------------------------------------


def other_tables(plain: bool, yarn: bool) -> Callable[[ModelConfig, int], RopeTables]:
    """Tables with the compressed setting in window-only layers too, or without YaRN."""

    def build(config: ModelConfig, positions: int) -> RopeTables:
        right = RopeTables.build(config, positions)
        freq = inverse_frequencies(config.qk_rope_head_dim, config.compress_rope_theta, None)
        compressed = right.compressed if yarn else table(freq, positions)
        return RopeTables(right.plain if plain else right.compressed, compressed)

    return build


def half_split(original, x, positions, rope, *, inverse=False):
    """Pairs (i, i + half) instead of neighbours."""
    dims = 2 * rope.cos.shape[1]
    order = np.arange(dims).reshape(2, -1).T.reshape(-1)
    turned = jnp.concatenate([x[..., :-dims], x[..., -dims:][..., order]], axis=-1)
    turned = original(turned, positions, rope, inverse=inverse)
    return jnp.concatenate([x[..., :-dims], turned[..., -dims:][..., np.argsort(order)]], axis=-1)


def window_with_plain_table(original, self, x, step):
    rope = dataclasses.replace(step.rope, compressed=step.rope.plain)
    return original(self, x, dataclasses.replace(step, rope=rope))


def entry_position(change: Callable[[Any, int], Any]) -> Patch:
    """Entries and index keys at a position other than that of their group's first token."""

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        rotate = decoded_keys.rotate

        def extend_elsewhere(original, layer, *args):
            with pytest.MonkeyPatch.context() as inner:
                inner.setattr(
                    decoded_keys, "rotate",
                    lambda v, position, rope: rotate(v, change(position, layer.role.ratio), rope),
                )  # fmt: skip
                return original(layer, *args)

        setting(decoded_keys, "extend_source", extend_elsewhere)(monkeypatch)

    return patch


ROTARY = [
    Mutant(name="window keys with the plain theta", layer=SOURCE_RATIO_2, patch=setting(
        attention.Attention, "window_kv", window_with_plain_table)),
    Mutant(name="compressed theta in a window layer", layer=WINDOW_ENGRAM, rope=other_tables(plain=False, yarn=True)),
    Mutant(name="no YaRN", layer=SOURCE_RATIO_2, rope=other_tables(plain=True, yarn=False)),
    Mutant(name="half-split pairs", layer=WINDOW_ENGRAM, patch=setting(attention, "rotate", half_split)),
    Mutant(name="no inverse rotation of the output", layer=WINDOW_ENGRAM, patch=setting(
        attention, "rotate", lambda original, x, position, rope, inverse=False: (
            x if inverse else original(x, position, rope)))),
    Mutant(name="entry at its own index", layer=SOURCE_RATIO_2, patch=entry_position(lambda p, ratio: p // ratio)),
    Mutant(name="entry at its last token", layer=SOURCE_RATIO_2, patch=entry_position(lambda p, ratio: p + ratio - 1)),
]  # fmt: skip

# --- attention -------------------------------------------------------------------------------------------------------


def sink(change: Callable[[Any], Any]) -> Patch:
    def wrong(original, q, near, start, first, entries, selection, sink, **kwargs):
        return original(q, near, start, first, entries, selection, change(sink), **kwargs)

    return setting(decoded_keys, "sparse_attention", wrong)


def missing_reads_entry_0(original, self, x, q_latent, shared, step):
    shared = original(self, x, q_latent, shared, step)
    selection = shared.selection
    return dataclasses.replace(shared, selection=type(selection)(jnp.maximum(selection.indices, 0)))


def queries_normed(original, x, position, rope, *, inverse=False):
    """RMS of every head's query, before its rotation."""
    if x.ndim == 4 and not inverse:
        x = x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-20)
    return original(x, position, rope, inverse=inverse)


def sees(count: Callable[[Any, int], Any]) -> Patch:
    """Another number of entries visible from a position."""

    def wrong(original, start, rows, entries, ratio):
        position = start[:, None] + jnp.arange(rows)
        return jnp.arange(entries) < count(position, ratio)[..., None]

    return setting(decoded_keys, "visible_entries", wrong)


ATTENTION = [
    Mutant(name="no sink", layer=WINDOW_ENGRAM, patch=sink(lambda s: jnp.full_like(s, -1e9))),
    Mutant(name="sink scaled like a score", layer=WINDOW_ENGRAM, patch=sink(lambda s: s * 0.125)),
    Mutant(name="queries normed per head", layer=WINDOW_ENGRAM, patch=setting(attention, "rotate", queries_normed)),
    Mutant(name="window one row short", layer=WINDOW_ENGRAM, config={"sliding_window": 7}),
    Mutant(name="window one row long", layer=WINDOW_ENGRAM, config={"sliding_window": 9}),
    Mutant(name="missing entry read as entry 0", layer=SOURCE_RATIO_2, form="indices", patch=setting(
        indexer.Indexer, "__call__", missing_reads_entry_0)),
    Mutant(name="entry visible before its group is whole", layer=SOURCE_RATIO_2, patch=sees(
        lambda p, ratio: (p + ratio) // ratio)),
    Mutant(name="entry visible one token late", layer=SOURCE_RATIO_2, patch=sees(lambda p, ratio: p // ratio)),
]  # fmt: skip

# --- compressed entries and their selection --------------------------------------------------------------------------


def keys_of_rotated_latents(original, self, latent, step):
    position = jnp.arange(latent.shape[1])[None] * self.role.ratio
    return original(self, attention.rotate(latent, position, step.rope.compressed), step)


def scores(formula: Callable[..., Any]) -> Patch:
    """Another formula of the scores, from dots [B, S, I, L] and weights [B, S, I, 1]."""

    def wrong(original, queries, weights, keys, **kwargs):
        return formula(jnp.einsum("bsij,blj->bsil", queries, keys), weights[..., None]).sum(axis=2)

    return setting(decoded_keys, "indexer_scores", wrong)


COMPRESSED = [
    Mutant(name="mean pooling", layer=SOURCE_RATIO_2, patch=setting(
        compressor, "pool_group", lambda original, values, gates: values.mean(axis=-2))),
    Mutant(name="gates swapped within the group", layer=SOURCE_RATIO_2, patch=setting(
        compressor, "pool_group", lambda original, values, gates: original(values, gates[..., ::-1, :]))),
    Mutant(name="index key from the rotated latent", layer=SOURCE_RATIO_2, patch=setting(
        indexer.Indexer, "keys", keys_of_rotated_latents)),
    Mutant(name="index key not normed", layer=SOURCE_RATIO_2, patch=setting(
        indexer.Indexer, "keys", lambda original, self, latent, step: self.wk(latent, step.numerics))),
    Mutant(name="scores without relu", layer=SOURCE_RATIO_1, patch=scores(lambda dots, w: dots * w)),
    Mutant(name="relu after the weighting", layer=SOURCE_RATIO_1, patch=scores(
        lambda dots, w: jnp.maximum(dots * w, 0))),
    Mutant(name="candidates restrict their own source", layer=SOURCE_RATIO_1, role={"reads_candidates": True}),
    Mutant(name="candidates not read", layer=REINDEX, role={"reads_candidates": False}),
    Mutant(name="newest block not kept", layer=SOURCE_RATIO_1, patch=setting(
        decoded_keys, "candidate_mask", lambda original, scores, count, **kwargs: original(
            scores, count * 0 + 10**6, **kwargs))),
    Mutant(name="one entry too few", layer=SOURCE_RATIO_1, config={"index_topk": 7}),
    Mutant(name="one entry too many", layer=SOURCE_RATIO_1, config={"index_topk": 9}),
]  # fmt: skip

# --- experts ---------------------------------------------------------------------------------------------------------


def bias_in_weights(original, self, x, step):
    experts, _ = original(self, x, step)
    logits = jnp.einsum("td,ed->te", x, self.weight[...])
    scores = jnp.sqrt(jax.nn.softplus(logits)) + self.bias[...]
    weights = jnp.take_along_axis(scores, experts, axis=-1)
    return experts, weights / weights.sum(-1, keepdims=True) * self.config.routed_scaling_factor


def image_bias(original, self, x, step):
    self.bias = self.bias_vl
    return original(self, x, step)


def clamped(gate_low: bool, up_low: bool) -> Patch:
    def wrong(original, self, gate, up):
        gate = jnp.clip(gate, -self.limit if gate_low else -jnp.inf, self.limit)
        up = jnp.clip(up, -self.limit if up_low else -jnp.inf, self.limit)
        return jax.nn.silu(gate) * up

    return setting(ExpertMath, "activate", wrong)


EXPERTS = [
    Mutant(name="bias in the weights", layer=WINDOW_ENGRAM, patch=setting(Gate, "__call__", bias_in_weights)),
    Mutant(name="image bias on text", layer=WINDOW_ENGRAM, patch=setting(Gate, "__call__", image_bias)),
    Mutant(name="gate clamped on both sides", layer=WINDOW_ENGRAM, patch=clamped(gate_low=True, up_low=True)),
    Mutant(name="up clamped from above only", layer=WINDOW_ENGRAM, patch=clamped(gate_low=False, up_low=False)),
    Mutant(name="shared expert not clamped", layer=WINDOW_ENGRAM, patch=setting(
        SharedExpert, "__call__", lambda original, self, x, math: original(
            self, x, dataclasses.replace(math, limit=1e9)))),
    Mutant(name="no scale of the routed weights", layer=WINDOW_ENGRAM, config={"routed_scaling_factor": 1.0}),
    Mutant(name="gate and up swapped", layer=WINDOW_ENGRAM, patch=setting(
        ExpertMath, "activate", lambda original, self, gate, up: original(self, up, gate))),
]  # fmt: skip

# --- Engram ----------------------------------------------------------------------------------------------------------


def gate(change: Callable[[Any], Any]) -> Patch:
    """Another function of the match, which the mutant recovers from the right gate."""
    from widemesh.model import engram

    def wrong(original, *args, **kwargs):
        root = jax.scipy.special.logit(original(*args, **kwargs))
        return jax.nn.sigmoid(change(root))

    return setting(engram, "engram_gate", wrong)


ENGRAM = [
    Mutant(name="no Engram", layer=WINDOW_ENGRAM, patch=setting(
        Engram, "__call__", lambda original, self, streams, step: original(self, streams, step) * 0 + streams)),
    Mutant(name="Engram after the coefficients", layer=WINDOW_ENGRAM, patch=engram_after_coefficients),
    Mutant(name="gate without root", layer=WINDOW_ENGRAM, patch=gate(lambda root: root * jnp.abs(root))),
    Mutant(name="gate without sign", layer=WINDOW_ENGRAM, patch=gate(jnp.abs)),
    Mutant(name="hash of raw ids", layer=WINDOW_ENGRAM, hash_=lambda h: dataclasses.replace(
        h, token_map=np.arange(len(h.token_map), dtype=np.int32))),
    Mutant(name="hash padded with 0", layer=WINDOW_ENGRAM, hash_=lambda h: dataclasses.replace(
        h, pad_compressed_id=0)),
]  # fmt: skip

# --- quantised caches ------------------------------------------------------------------------------------------------


def quantised_before_rotation(original, self, x, step):
    kv = fake_quant_fp8(self.kv_norm(self.wkv(x, step.numerics), step.numerics))
    return attention.rotate(kv, step.rows.positions, self.rope(step))


def entries_as(code: str) -> Patch:
    """Compressed entries on the grid of another format, in what is seen and in what is stored."""

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        wrong = {"fp8": fake_quant_fp8, "mxfp4": fake_quant_mxfp4}[code]
        seen, store = decoded_keys.fake_quant, decoded_keys.write_source
        monkeypatch.setattr(
            decoded_keys, "fake_quant", lambda x, layout: wrong(x) if layout.code == "nvfp4" else seen(x, layout)
        )
        monkeypatch.setattr(
            decoded_keys, "write_source", lambda pages, table, index, valid, rows, *rest: store(
                pages, table, index, valid, wrong(rows), *rest)
        )  # fmt: skip

    return patch


CACHES = [
    Mutant(name="window quantised before its rotation", layer=SOURCE_RATIO_2, mode="kvq", patch=setting(
        attention.Attention, "window_kv", quantised_before_rotation)),
    Mutant(name="entries with power-of-two scales per 32", layer=SOURCE_RATIO_2, mode="kvq", patch=entries_as(
        "mxfp4")),
    Mutant(name="entries in FP8", layer=SOURCE_RATIO_2, mode="kvq", patch=entries_as("fp8")),
    Mutant(name="index queries not quantised", layer=REINDEX, mode="kvq", patch=setting(
        indexer, "fake_quant_mxfp4", lambda original, x: x)),
]  # fmt: skip

MUTANTS = [*HYPER_CONNECTIONS, *ROTARY, *ATTENTION, *COMPRESSED, *EXPERTS, *ENGRAM, *CACHES]


@functools.cache
def unchanged(golden: Any, layer: int, settings: Any, mode: str) -> float:
    """Error of the layer as it is."""
    return worst(golden, layer, mode, golden.run_layer(layer, settings, mode=mode))


def worst(golden: Any, layer: int, mode: str, found: dict[str, np.ndarray]) -> float:
    """The largest error of any of the layer's values, in units of what is allowed."""
    return max(errors.max() for errors in golden.errors(found, golden.layer_outputs(layer, mode)).values())


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_fails(load_golden, settings, monkeypatch, mutant):
    golden, layer = load_golden("A"), mutant.layer
    choice = settings(mutant.mode, mutant.form)
    assert unchanged(golden, layer, choice, mutant.mode) <= 1
    mutant.patch(monkeypatch)
    found = golden.run_layer(
        layer, choice, mode=mutant.mode,
        config=dataclasses.replace(golden.config, **mutant.config),
        role=dataclasses.replace(golden.config.roles[layer], **mutant.role),
        rope=mutant.rope(golden.config, golden.length) if mutant.rope else None,
        hash_=mutant.hash_(golden.hash) if mutant.hash_ else None,
    )  # fmt: skip
    assert worst(golden, layer, mutant.mode, found) > mutant.at_least


def test_mutants_cover_every_part():
    assert len(MUTANTS) == len({mutant.name for mutant in MUTANTS}) >= 50
