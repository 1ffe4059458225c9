"""Encode and tail instead of the whole forward, and runs that begin behind a cached prefix."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from widemesh.model.cache import init_cache, page_layout
from widemesh.model.draft import block_rows
from widemesh.model.numerics import NUMERICS, Numerics
from widemesh.model.rope import RopeTables
from widemesh.model.shared import Shared
from widemesh.model.step import Rows, StepContext, StepSettings

ROOM, PAGE = 64, 4  # tokens a table holds, tokens per page
DRAFTS = 3
IDS = np.random.default_rng(0).integers(3, 120, ROOM).astype(np.int32)


class Runner:
    """One slot of a small model: any rows of IDS, whole or in two halves, on any pages."""

    def __init__(self, model, numerics="plain", selection="mask"):
        self.model, self.config = model, model.config
        numerics = NUMERICS[numerics] if isinstance(numerics, str) else numerics
        self.settings = StepSettings(numerics=numerics, selection=selection, start_bound=ROOM)
        self.rope = jax.tree.map(jnp.asarray, RopeTables.build(self.config, ROOM))
        self.engram = model.engram_hash.rows(IDS[None])

    def cache(self):
        """Two tables over one pool; the first one is dealt out."""
        layout = page_layout(self.config, self.settings.numerics, PAGE)
        pages = ROOM // PAGE
        cache = init_cache(self.config, layout, slots=1, pages=1 + 2 * pages, table_pages=pages)
        return dataclasses.replace(cache, table=1 + jnp.arange(pages, dtype=jnp.int32)[None])

    def rows(self, begin, end, *, first=0, write_from=0, padded=ROOM):
        tokens, engram = np.zeros((1, padded), np.int32), np.zeros((1, padded, *self.engram.shape[2:]), np.int32)
        tokens[0, : end - begin], engram[0, : end - begin] = IDS[begin:end], self.engram[0, begin:end]
        scalars = (np.array([x], np.int32) for x in (begin, end - begin))
        more = (np.array([x], np.int32) for x in (first, write_from))
        start, length = scalars
        return Rows(tokens, start, length, engram, *more)

    @functools.cached_property
    def programs(self):
        def context(rows):
            return StepContext(rows, self.rope, self.settings)

        @jax.jit
        def whole(parameters, cache, rows):
            model, step = nnx.merge(self.model.graph, parameters), context(rows)
            hidden, cache = model(cache, step)
            return model.logits(hidden, step), cache

        @jax.jit
        def encode(parameters, cache, rows):
            return nnx.merge(self.model.graph, parameters).encode(cache, context(rows))

        @functools.partial(jax.jit, static_argnames="count")
        def tail(parameters, boundary, cache, rows, count):
            model = nnx.merge(self.model.graph, parameters)
            boundary, rows = boundary.last_rows(rows, count)
            hidden, cache = model.tail(boundary, cache, context(rows))
            return model.logits(hidden, context(rows)), cache

        @functools.partial(jax.jit, static_argnames="count")
        def by_layers(parameters, cache, rows, count):
            """The same from whole layers: all rows up to the cut layer's end, then only the newest go on."""
            model, step = nnx.merge(self.model.graph, parameters), context(rows)
            streams, pre = model.enter(step)
            shared = Shared.start(cache, self.config, step)
            for layer in range(self.config.replay_cut + 1):
                streams, pre, _, shared = model.layers[layer](streams, pre, cache.layers[layer], shared, step)
            begin = int(rows.tokens.shape[1]) - count
            streams, pre = streams[:, begin:], pre[:, begin:]
            new = dataclasses.replace(
                rows, tokens=rows.tokens[:, begin:], start=rows.start + begin, length=rows.length - begin,
                engram_rows=rows.engram_rows[:, begin:], first=rows.start + begin,
            )  # fmt: skip
            shared = dataclasses.replace(
                shared, selection=jax.tree.map(lambda x: x[:, begin:], shared.selection),
                candidates=shared.candidates[:, begin:],
            )  # fmt: skip
            for layer in range(self.config.replay_cut + 1, self.config.num_hidden_layers):
                streams, pre, _, shared = model.layers[layer](streams, pre, cache.layers[layer], shared, context(new))
            return model.logits(model.leave(streams, pre, context(new)), context(new))

        @jax.jit
        def propose(parameters, cache, rows):
            return nnx.merge(self.model.graph, parameters).propose(cache, context(rows))[0]

        return {"whole": whole, "encode": encode, "tail": tail, "by_layers": by_layers, "propose": propose}

    def run(self, name, *args, **static):
        return self.programs[name](self.model.parameters, *args, **static)

    def whole(self, end, cache=None):
        """Logits of the first `end` tokens and the cache they leave."""
        logits, cache = self.run("whole", cache or self.cache(), self.rows(0, end))
        return np.asarray(logits[0, :end]), cache

    def halves(self, ends, count):
        """Chunks up to each of `ends`, then the tail on the last `count` rows; its logits and the cache."""
        cache, begin = self.cache(), 0
        for end in ends:
            rows = self.rows(begin, end)
            boundary, cache = self.run("encode", cache, rows)
            begin = end
        logits, cache = self.run("tail", boundary, cache, rows, count=count)
        return np.asarray(logits[0]), cache

    def drafts(self, cache, end):
        """What the draft proposes behind the first `end` tokens and one more."""
        rows = self.rows(end, end + DRAFTS, padded=DRAFTS)
        tokens = block_rows(jnp.asarray(IDS[end : end + 1]), self.config)
        return jax.device_get(self.run("propose", cache, dataclasses.replace(rows, tokens=tokens)))

    def context(self, cache):
        """The rings of the draft's layers, as values."""
        return [np.asarray(x.window[0]).view(np.float32) for x in cache.layers[self.config.num_hidden_layers :]]


@pytest.fixture(scope="module")
def runner(preset):
    return Runner(preset("tiny-structure", num_speculative_tokens=DRAFTS))


def distance(found, wanted):
    return np.linalg.norm(found - wanted, axis=-1) / np.linalg.norm(wanted, axis=-1)


@pytest.mark.parametrize("length", [1, 3, 4])
def test_tail_of_a_whole_prompt_is_exact(runner, length):
    """Up to a window of tokens nothing is left out."""
    assert length <= runner.config.sliding_window
    found, _ = runner.halves([length], runner.config.sliding_window)
    wanted, _ = runner.whole(length)
    assert distance(found[:length], wanted).max() < 1e-5


@pytest.mark.parametrize("length", [1, 3, 4])
def test_drafts_behind_the_tail_of_a_whole_prompt_are_exact(runner, length):
    """The draft's context too is what the whole forward writes, and nothing else is written."""
    (_, found), (_, wanted) = runner.halves([length], runner.config.sliding_window), runner.whole(length)
    for own, other in zip(runner.context(found), runner.context(wanted), strict=True):
        np.testing.assert_allclose(own, other, rtol=2e-4, atol=2e-5)
        assert own.any(axis=1).tolist() == [position < length for position in range(len(own))]
    own, other = (runner.drafts(cache, length) for cache in (found, wanted))
    assert np.array_equal(own.tokens, other.tokens)
    np.testing.assert_allclose(own.confidence, other.confidence, rtol=2e-4, atol=2e-5)


def test_drafts_behind_a_longer_prompt_read_what_its_tail_has_written(runner, monkeypatch):
    """The last window of positions, and no row that nobody has written."""
    window, clean = runner.config.sliding_window, runner.cache()
    depth = runner.config.num_hidden_layers
    dirty = tuple(jax.tree.map(lambda x: jnp.full_like(x, 255), layer) for layer in clean.layers[depth:])  # NaN
    results = []
    for cache in (clean, dataclasses.replace(clean, layers=(*clean.layers[:depth], *dirty))):
        monkeypatch.setattr(runner, "cache", lambda cache=cache: cache)
        results.append(runner.drafts(runner.halves([7, 30], window)[1], 30))
    for found in results:
        assert np.array_equal(found.tokens, results[0].tokens) and np.isfinite(found.confidence).all()
        assert np.array_equal(found.confidence, results[0].confidence)
    exact = runner.drafts(runner.whole(30)[1], 30)
    assert not np.allclose(exact.confidence, results[0].confidence, rtol=1e-4)  # of an approximation


@pytest.mark.parametrize("ends", [[30], [7, 30], [1, 2, 13, 26, 30]])
def test_tail_is_the_layers_on_the_newest_rows(runner, ends):
    """However the prompt was cut into chunks, as long as the last one holds the tail."""
    window = runner.config.sliding_window
    found, _ = runner.halves(ends, window)
    wanted = np.asarray(runner.run("by_layers", runner.cache(), runner.rows(0, 30, padded=30), count=window)[0])
    assert distance(found, wanted).max() < 1e-5
    exact, _ = runner.whole(30)
    assert distance(found, exact[-window:]).max() > 1e-4  # it is an approximation


def test_packed_halves_hand_on_window_rows_as_bytes(preset):
    """In f32 arithmetic: exact for a whole prompt, and the same however a longer one was cut."""
    numerics = Numerics(cache_quant=True, packed_weights=True)
    runner = Runner(preset("tiny-structure", numerics, DRAFTS), numerics, "indices")
    window, depth = runner.config.sliding_window, runner.config.num_hidden_layers
    (wanted, cache), (found, own) = runner.whole(window), runner.halves([window], window)
    assert distance(found, wanted).max() < 1e-3
    for context, other in zip(own.layers[depth:], cache.layers[depth:], strict=True):
        assert context.window.any() and np.mean(context.window == other.window) > 0.99
    found, other = (runner.halves(ends, window)[0] for ends in ([30], [7, 30]))
    assert np.median(distance(found, other)) < 1e-3 and distance(found, runner.whole(30)[0][-window:]).max() > 1e-4


def test_encode_stores_what_the_whole_forward_stores(runner):
    """All pages, and every ring up to the cut layer's; above it only the newest rows are written."""
    window, cut = runner.config.sliding_window, runner.config.replay_cut
    _, found = runner.halves([11, 30], window)
    _, wanted = runner.whole(30)
    f32 = [np.asarray(cache.pages).view(np.float32) for cache in (found, wanted)]
    np.testing.assert_allclose(*f32, rtol=2e-4, atol=2e-5)
    for layer, (own, other) in enumerate(zip(found.layers, wanted.layers, strict=True)):
        own_rows, other_rows = (np.asarray(x.window[0]).view(np.float32) for x in (own, other))
        if layer <= cut:
            newest = [p % len(own_rows) for p in range(30 - window, 30)]
            np.testing.assert_allclose(own_rows[newest], other_rows[newest], rtol=2e-4, atol=2e-5)
        else:
            written = np.flatnonzero(own_rows.any(axis=1))
            assert sorted(written) == sorted(p % len(own_rows) for p in range(30 - window, 30))


def test_rows_of_each_layer(runner, monkeypatch):
    """What runs: every row below the cut, the keys of every row at the cut, and a window of rows from there on."""
    from widemesh.model.attention import Attention
    from widemesh.model.moe import MoE

    seen = {"write": [], "attend": [], "ffn": []}

    def spy(kind, original):
        def counted(self, x, *args):
            seen[kind].append(x.shape[1])
            return original(self, x, *args)

        return counted

    monkeypatch.setattr(Attention, "write", spy("write", Attention.write))
    monkeypatch.setattr(Attention, "attend", spy("attend", Attention.attend))
    monkeypatch.setattr(MoE, "__call__", spy("ffn", MoE.__call__))
    window, cut, depth = runner.config.sliding_window, runner.config.replay_cut, runner.config.num_hidden_layers
    Runner(runner.model).halves([40], window)
    above = depth - 1 - cut
    assert seen["write"] == [ROOM] * (cut + 1) + [window] * above
    assert seen["attend"] == seen["ffn"] == [ROOM] * cut + [window] * (above + 1)


# --- behind a cached prefix ------------------------------------------------------------------------------------------


def behind(runner, cached, hit, restart, end):
    """A second request on the pages of the first `hit` tokens, run from `restart` on; its logits from `hit` on."""
    pages = ROOM // PAGE
    table = np.asarray(cached.table).copy()
    table[0, hit // PAGE :] = 1 + pages + np.arange(pages - hit // PAGE)  # its own pages behind the shared ones
    fresh = runner.cache()
    cache = dataclasses.replace(fresh, pages=cached.pages, table=jnp.asarray(table))
    logits, cache = runner.run("whole", cache, runner.rows(restart, end, first=restart, write_from=hit))
    return np.asarray(logits[0, hit - restart : end - restart]), cache


@pytest.mark.parametrize("hit", [36, 40, 48])
def test_exact_replay_behind_a_prefix_equals_the_cold_run(runner, hit):
    """Far enough back, every window row that a later row sees has been computed from what it saw itself."""
    config = runner.config
    reach = config.sliding_window + (config.num_hidden_layers - 1) * (config.sliding_window - 1)
    restart = max(0, hit - reach) // config.max_ratio * config.max_ratio
    assert restart > 0
    wanted, cached = runner.whole(60)
    found, cache = behind(runner, cached, hit, restart, 60)
    assert distance(found, wanted[hit:]).max() < 2e-5
    own, other = (runner.drafts(one, 60) for one in (cache, cached))
    assert np.array_equal(own.tokens, other.tokens)
    np.testing.assert_allclose(own.confidence, other.confidence, rtol=2e-4, atol=2e-5)
    shared = np.asarray(cached.table[0, : hit // PAGE])
    assert np.array_equal(cache.pages[shared], cached.pages[shared])  # cached rows stay, to the bit


@pytest.mark.parametrize("numerics", ["plain", "kvq"])
def test_bounded_replay_leaves_cached_rows_alone(preset, numerics):
    """A window back is an approximation; what others read does not move by a bit."""
    runner = Runner(preset("tiny-structure"), numerics)
    hit, window = 48, runner.config.sliding_window
    wanted, cached = runner.whole(60)
    found, cache = behind(runner, cached, hit, hit - window, 60)
    shared = np.asarray(cached.table[0, : hit // PAGE])
    assert np.array_equal(cache.pages[shared], cached.pages[shared])
    assert not np.array_equal(cache.pages, cached.pages)
    error = distance(found, wanted[hit:])
    assert error.max() > 1e-4 and np.isfinite(error).all()
