"""The draft over packed bytes against the draft in f32, each pass behind the same rings."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from widemesh.model import draft_keys
from widemesh.model.block import Block
from widemesh.model.cache import init_cache, page_layout, private_pages
from widemesh.model.draft import block_rows
from widemesh.model.fused_block import Pending, settle
from widemesh.model.loading import split_model
from widemesh.model.numerics import NUMERICS, Numerics
from widemesh.model.rope import RopeTables
from widemesh.model.shared import Shared
from widemesh.model.step import DictRecorder, Rows, StepContext, StepSettings

NAME, TOKENS = "tiny-structure", 3
BF16 = 2.0**-8  # relative distance of neighbours, twice the largest rounding
LENGTHS = np.array([70, 4, 2, 0, 31], np.int32)  # round the ring, a window, less, nothing, at the ring's edge
# The packed ops in f32: the arithmetic of `kvq` over the bytes of `serving`.
PACKED_F32 = Numerics(cache_quant=True, packed_weights=True)


def distance(found, wanted):
    """Relative L2 along the last axis."""
    found, wanted = (np.asarray(x, np.float32) for x in (found, wanted))
    return np.linalg.norm(found - wanted, axis=-1) / np.linalg.norm(wanted, axis=-1)


class Passes:
    """Requests with a random context, and a pass behind it under any numerics."""

    def __init__(self, source):
        self.source, self.config = source, source.config
        self.graph, _ = split_model(self.config)
        self.rope = jax.tree.map(jnp.asarray, RopeTables.build(self.config, 80))
        newest = np.array([5, 77, 30, 100, 41], np.int32)
        self.rows = self.of(block_rows(jnp.asarray(newest), self.config), LENGTHS)
        rng = np.random.default_rng(0)
        shape = (len(self.config.dspark_target_layer_ids), len(LENGTHS), LENGTHS.max(), self.config.hidden_size)
        self.features = jnp.asarray(rng.standard_normal(shape), jnp.float32)
        self.cache = self.with_context()

    def of(self, tokens, start, length=None):
        size = tokens.shape[1]
        engram = jnp.zeros((*tokens.shape, 2, self.config.num_engram_columns), jnp.int32)
        length = np.full(len(LENGTHS), size, np.int32) if length is None else length
        return Rows.of(tokens, jnp.asarray(start), jnp.asarray(length), engram)

    def step(self, numerics, rows):
        settings = StepSettings(numerics=numerics, selection="indices", start_bound=80)
        return StepContext(rows, self.rope, settings, DictRecorder())

    def with_context(self):
        """Rings of packed rows; those that are not written hold NaN."""
        numerics = NUMERICS["kvq"]
        layout = page_layout(self.config, numerics, 4)
        cache = private_pages(init_cache(self.config, layout, slots=len(LENGTHS), pages=6, table_pages=1))
        cache = dataclasses.replace(cache, layers=jax.tree.map(lambda x: jnp.full_like(x, 255), cache.layers))
        rows = self.of(jnp.zeros((len(LENGTHS), LENGTHS.max()), jnp.int32), np.zeros(len(LENGTHS), np.int32), LENGTHS)
        depth = self.config.num_hidden_layers

        @jax.jit
        def write(parameters, cache, features):
            model, step = nnx.merge(self.graph, parameters), self.step(numerics, rows)
            main = model.mtp[0].project_features(tuple(features), step)
            shared = Shared.start(cache, self.config, step)
            return [
                block.write_context(main, own, shared, step.draft_layer(stage))
                for stage, (block, own) in enumerate(zip(model.mtp, cache.layers[depth:], strict=True))
            ]

        layers = write(self.source.parameters(numerics), cache, self.features)
        return dataclasses.replace(cache, layers=(*cache.layers[:depth], *layers))

    def propose(self, numerics):
        """Records, proposal and the draft's rings behind the pass."""

        @jax.jit
        def run(parameters, cache):
            step = self.step(numerics, self.rows)
            proposal, cache = nnx.merge(self.graph, parameters).propose(cache, step)
            return step.recorder.values, proposal, [own.window for own in cache.layers[self.config.num_hidden_layers :]]

        return jax.device_get(run(self.source.parameters(numerics), self.cache))


@pytest.fixture(scope="module")
def passes(weights):
    return Passes(weights(NAME, TOKENS))


@pytest.fixture(scope="module")
def f32(passes):
    return passes.propose(NUMERICS["kvq"])


def test_attention_over_bytes_is_attention_over_decoded_rows(passes):
    """The same queries and keys: every row of every request, up to the order of sums."""
    config, rng = passes.config, np.random.default_rng(1)
    shape = (len(LENGTHS), TOKENS, config.num_attention_heads, config.head_dim)
    q, kv = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in (shape, (*shape[:2], config.head_dim)))
    own = passes.cache.layers[-1]

    @functools.partial(jax.jit, static_argnames="numerics")
    def attend(parameters, q, kv, numerics):
        attention, step = nnx.merge(passes.graph, parameters).mtp[-1].attn, passes.step(numerics, passes.rows)
        shared = Shared.start(passes.cache, config, step)
        near, _ = draft_keys.write_window(attention, kv, own.window, shared, step)
        return draft_keys.attend(attention, q, near, shared, step)

    outputs = [attend(passes.source.parameters(n), q, kv, n) for n in (NUMERICS["kvq"], PACKED_F32)]
    assert distance(outputs[1], outputs[0]).max() < 1e-6
    assert np.isfinite(outputs[0]).all() and distance(outputs[0][0], outputs[0][1]).min() > 0.1


def test_packed_ops_in_f32_are_the_f32_path(passes, f32):
    """The same arithmetic; a row whose value falls over a rounding boundary may differ more."""
    records, proposal, _ = passes.propose(PACKED_F32)
    for name in ("draft.collapsed", "draft.normed", "draft.base_logits"):
        error = distance(records[name], f32[0][name])
        assert np.median(error) < 1e-5 and np.mean(error < 1e-4) >= 0.75, name
    assert np.mean(proposal.tokens == f32[1].tokens) > 0.8
    assert np.median(np.abs(proposal.confidence - f32[1].confidence)) < 1e-4


def test_only_bfloat16_separates_serving_from_kvq(passes, f32, unquantised):
    """As for layers of the backbone, half of the rows are within eight steps of bfloat16 (measured: two and three)."""
    records, proposal, _ = passes.propose(unquantised)
    name = "mtp.0.attn.output"
    assert np.median(distance(records[name], f32[0][name])) < 8 * BF16
    noise = distance(records["draft.normed"], f32[0]["draft.normed"])
    assert np.median(noise) < 8 * BF16 and np.isfinite(proposal.confidence).all()
    assert np.mean(proposal.tokens == f32[1].tokens) > 0.8


def test_a_pass_leaves_the_context_as_it_was(passes):
    """Packed rows of a pass lie in the ring behind the context, and nowhere else."""
    _, _, rings = passes.propose(PACKED_F32)
    window, size = passes.config.sliding_window, rings[0].shape[1]
    for ring, before in zip(rings, passes.cache.layers[passes.config.num_hidden_layers :], strict=True):
        for slot, length in enumerate(LENGTHS):
            changed = np.any(ring[slot] != before.window[slot], axis=-1)
            assert set(np.flatnonzero(changed)) == {(length + i) % size for i in range(TOKENS)}
            assert not {(length + i) % size for i in range(TOKENS)} & {(length - 1 - i) % size for i in range(window)}


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("packed", [False, True])
def test_a_layer_feeds_the_draft_what_enters_it(passes, unquantised, layer, packed):
    """The mean of its streams: after Engram, if it has one, and with the output that is still to be mixed in."""
    config, numerics = passes.config, unquantised if packed else NUMERICS["kvq"]
    role = dataclasses.replace(config.roles[layer], feeds_draft=True)
    assert role.has_engram == (layer == 1)
    rng, shape = np.random.default_rng(2), (len(LENGTHS), TOKENS, config.hc_mult, config.hidden_size)
    streams, out = (jnp.asarray(rng.standard_normal(s), numerics.dtype) for s in (shape, (*shape[:2], shape[3])))
    pre, post, comb = (
        jnp.asarray(rng.standard_normal(s), jnp.float32) for s in (shape[:3], shape[:3], (*shape[:3], shape[2]))
    )
    entering = Pending(out=out, pre=pre, post=post, comb=comb) if packed else pre
    graph, _ = nnx.split(Block(config, role))

    @jax.jit
    def run(parameters):
        step = passes.step(numerics, passes.rows)
        settled, _ = settle(streams, entering, step)
        block = nnx.merge(graph, parameters["layers"][layer])
        shared = Shared.start(passes.cache, config, step)
        *_, shared = block(streams, entering, passes.cache.layers[layer], shared, step)
        return shared.features, step.recorder.values.get("engram.output", settled)

    (feature,), wanted = jax.device_get(run(passes.source.parameters(numerics)))
    assert feature.dtype == numerics.dtype
    assert distance(feature, np.asarray(wanted, np.float32).mean(axis=2)).max() < (BF16 if packed else 1e-6)
