"""Requests of different length in one padded batch: each gets the golden logits of its own list alone."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from widemesh.model.cache import init_cache, page_layout, private_pages
from widemesh.model.numerics import NUMERICS
from widemesh.model.step import Rows, StepContext

INPUTS = ("long", "batch", "short")


class Batch:
    """All golden inputs as the slots of one program, and one idle slot."""

    def __init__(self, golden, settings):
        self.golden = golden
        lists = [ids for which in INPUTS for ids in golden.inputs[which]]
        self.lengths = np.array([*map(len, lists), 0], np.int32)
        self.tokens = np.zeros((len(self.lengths), golden.length), np.int32)
        for slot, ids in enumerate(lists):
            self.tokens[slot, : len(ids)] = ids
        # Indices and grouped experts: elsewhere a golden prefill has masks and, being small, dense experts.
        choice = dataclasses.replace(settings("plain", "indices"), moe_implementation="grouped")

        @jax.jit
        def program(parameters, cache, rows):
            model = nnx.merge(golden.graph, parameters)
            step = StepContext(rows, golden.rope, choice)
            hidden, cache = model(cache, step)
            return model.logits(hidden, step), cache

        self.program = program

    def run(self, tokens, fill=0.0):
        """Logits of all slots and the caches they leave; `fill` is what the caches held before."""
        start = jnp.zeros(len(self.lengths), jnp.int32)
        rows = Rows.of(tokens, start, self.lengths, self.golden.hash.rows(tokens))
        config, slots, pages = self.golden.config, len(self.lengths), -(-self.golden.length // 4)
        layout = page_layout(config, NUMERICS["plain"], 4)
        cache = private_pages(init_cache(config, layout, slots=slots, pages=1 + slots * pages, table_pages=pages))
        return self.program(self.golden.parameters, filled(cache, fill), rows)


def filled(cache, fill):
    """The same tables over pages and rings whose every f32 is `fill`."""
    def values(x):
        if x.dtype == jnp.float32:
            return jnp.full_like(x, fill)
        return jnp.asarray(np.full(x.size // 4, fill, np.float32).view(np.uint8).reshape(x.shape))

    return dataclasses.replace(cache, pages=values(cache.pages), layers=jax.tree.map(values, cache.layers))


@pytest.fixture(scope="module")
def golden(load_golden):
    """One checkpoint is enough: batching knows nothing of the layers."""
    return load_golden("A")


@pytest.fixture(scope="module")
def batch(golden, settings):
    """One program for all tests."""
    return Batch(golden, settings)


def test_every_slot_is_golden(batch, golden, distance):
    """The golden logits are those of unpadded lists, run apart."""
    logits, _ = batch.run(batch.tokens)
    slot = 0
    for which in INPUTS:
        for wanted in golden.wanted("plain", which, "logits"):
            assert distance(np.asarray(logits[slot, : len(wanted)]), wanted).max() < 2e-5
            slot += 1


def test_padding_is_never_seen(batch, golden):
    """Other ids in the padding change no valid row and no cache, to the last bit."""
    padding = np.arange(golden.length) >= batch.lengths[:, None]
    noise = np.random.default_rng(3).integers(0, golden.config.vocab_size, padding.shape)
    other = np.where(padding, noise, batch.tokens)
    (logits, cache), (logits_other, cache_other) = batch.run(batch.tokens), batch.run(other.astype(np.int32))
    assert np.array_equal(np.asarray(logits)[~padding], np.asarray(logits_other)[~padding])
    assert not np.array_equal(np.asarray(logits)[padding], np.asarray(logits_other)[padding])
    for own, same in zip(jax.tree.leaves(cache), jax.tree.leaves(cache_other), strict=True):
        assert np.array_equal(own, same)


@pytest.mark.parametrize("fill", [7.0, np.nan])
def test_what_an_earlier_request_left_is_never_read(batch, fill):
    """Not even with weight 0, which a NaN would survive."""
    valid = np.arange(batch.tokens.shape[1]) < batch.lengths[:, None]
    (logits, _), (logits_other, _) = batch.run(batch.tokens), batch.run(batch.tokens, fill)
    assert np.array_equal(np.asarray(logits)[valid], np.asarray(logits_other)[valid])


def test_idle_slot_writes_nothing(batch):
    """A slot of length 0 keeps its cache."""
    _, cache = batch.run(batch.tokens)
    assert all(not np.any(leaf[-1]) for leaf in jax.tree.leaves(cache.layers))
    assert not np.any(cache.pages[cache.table[-1]]) and not np.any(cache.pages[0])
    assert all(np.any(layer.window[0]) for layer in cache.layers) and np.any(cache.pages[cache.table[0]])


@pytest.mark.parametrize("position", [1, 20, 37])
def test_later_token_changes_nothing_before(batch, golden, distance, position):
    """To the last bit; from that token on, all logits change. Other slots move by what the order of sums decides."""
    other = batch.tokens.copy()
    other[0, position] = (other[0, position] + 1) % golden.config.vocab_size
    (logits, _), (logits_other, _) = batch.run(batch.tokens), batch.run(other)
    logits, logits_other = np.asarray(logits), np.asarray(logits_other)
    same = np.all(logits == logits_other, axis=-1)
    assert same[0, :position].all() and not same[0, position:].any()
    assert distance(logits_other[1:], logits[1:]).max() < 2e-5
