"""Groups of tokens into latents, whole or across chunk edges."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from widemesh.model.compressor import Compressor
from widemesh.model.presets import PRESETS

CHUNK, TOTAL, DRAFTS = 4, 13, 2
CONFIG = PRESETS["tiny-structure"]
RNG = np.random.default_rng(0)
X = RNG.standard_normal((1, TOTAL, CONFIG.hidden_size)).astype(np.float32)


def compressor_of(ratio):
    """A compressor with random weights, as a function of (x, pending, start, length)."""
    graph, state = nnx.split(Compressor(CONFIG, ratio))
    filled = [
        (path, p.replace(jnp.asarray(np.random.default_rng(i).standard_normal(p.get_value().shape), jnp.float32) * 0.2))
        for i, (path, p) in enumerate(state.flat_state())
    ]
    return nnx.merge(graph, nnx.State.from_flat_path(filled))


def expected(module, ratio):
    """Latents of all complete groups, by the formula."""
    weight = {name: np.asarray(getattr(module, name).weight[...], np.float64) for name in ("wkv", "wgate", "norm")}
    groups = TOTAL // ratio
    values, gates = ((X[0].astype(np.float64) @ weight[n].T)[: groups * ratio] for n in ("wkv", "wgate"))
    values, gates = (v.reshape(groups, ratio, -1) for v in (values, gates))
    share = np.exp(gates) / np.exp(gates).sum(1, keepdims=True)
    pooled = (share * values).sum(1)
    return pooled / np.sqrt((pooled * pooled).mean(-1, keepdims=True) + CONFIG.rms_norm_eps) * weight["norm"]


@pytest.mark.parametrize("ratio", [2, 3])
def test_pools_by_a_softmax_over_the_group(context, ratio):
    module = compressor_of(ratio)
    step = context(CONFIG, np.zeros((1, TOTAL)))
    latents, ring = module(X, jnp.zeros((1, ratio - 1, 2, CONFIG.head_dim)), step)
    groups = TOTAL // ratio
    valid = np.asarray(latents.valid)[0]
    assert valid[:groups].all() and not valid[groups:].any()
    assert np.asarray(latents.index)[0].tolist() == list(range(len(valid)))
    np.testing.assert_allclose(np.asarray(latents.latent)[0, :groups], expected(module, ratio), rtol=1e-5, atol=1e-5)
    both = jnp.stack([module.wkv(X, step.numerics), module.wgate(X, step.numerics)], axis=2)
    for position in range(TOTAL - (ratio - 1), TOTAL):  # the newest rows, each at its position mod the ring
        np.testing.assert_allclose(ring[:, position % (ratio - 1)], both[:, position], rtol=1e-6, atol=1e-6)


def test_ratio_1_is_a_linear_and_a_norm(context):
    module = compressor_of(1)
    step = context(CONFIG, np.zeros((1, TOTAL)), start=20, length=9)
    latents, pending = module(X, jnp.zeros((1, 0, 2, CONFIG.head_dim)), step)
    assert not hasattr(module, "wgate") and pending.size == 0
    assert np.asarray(latents.index)[0].tolist() == list(range(20, 20 + TOTAL))
    assert np.asarray(latents.valid)[0].tolist() == [True] * 9 + [False] * (TOTAL - 9)
    wanted = module.norm(module.wkv(X, step.numerics), step.numerics)
    np.testing.assert_allclose(np.asarray(latents.latent), np.asarray(wanted), atol=1e-6)


@pytest.fixture(scope="module")
def drafts_step(context):
    """Per ratio, a program for steps of 1 + DRAFTS rows, and all latents."""
    base = context(CONFIG, np.zeros((1, 1 + DRAFTS)))

    def make(ratio):
        module = compressor_of(ratio)

        @jax.jit
        def run(x, ring, start, length):
            step = dataclasses.replace(base, rows=dataclasses.replace(base.rows, start=start, length=length))
            latents, ring = module(x, ring, step)
            return latents.index, latents.latent, latents.valid, ring

        return run, expected(module, ratio)

    return {ratio: make(ratio) for ratio in (2, 3)}


@pytest.fixture(scope="module")
def chunk_step(context):
    """Per ratio, a program for chunks of up to CHUNK rows (entry numbers, latents, validity, state); all latents."""
    base = context(CONFIG, np.zeros((1, CHUNK)))

    def make(ratio):
        module = compressor_of(ratio)

        @jax.jit
        def run(x, pending, start, length):
            step = dataclasses.replace(base, rows=dataclasses.replace(base.rows, start=start, length=length))
            latents, pending = module(x, pending, step)
            return latents.index, latents.latent, latents.valid, pending

        return run

    programs = {ratio: make(ratio) for ratio in (2, 3)}
    wanted = {ratio: expected(compressor_of(ratio), ratio) for ratio in programs}
    return programs, wanted


@pytest.mark.parametrize("ratio", [2, 3])
@settings(deadline=None, max_examples=40)
@given(lengths=st.lists(st.integers(0, CHUNK), min_size=TOTAL // 2, max_size=2 * TOTAL))
def test_any_chunks_give_each_entry_once(chunk_step, ratio, lengths):
    """Each complete group appears in exactly one chunk, with the latent that one forward gives."""
    run, wanted = chunk_step[0][ratio], chunk_step[1][ratio]
    pending = jnp.zeros((1, ratio - 1, 2, CONFIG.head_dim))
    start, found = 0, {}
    for length in lengths:
        length = min(length, TOTAL - start)
        x = np.full((1, CHUNK, CONFIG.hidden_size), 1e3, np.float32)  # padding, loud
        x[:, :length] = X[:, start : start + length]
        index, latent, valid, pending = run(x, pending, jnp.array([start]), jnp.array([length]))
        for j, value, ok in zip(*(np.asarray(v)[0] for v in (index, latent, valid)), strict=True):
            if ok:
                assert j not in found
                found[int(j)] = value
        start += length
    assert sorted(found) == list(range(start // ratio))
    for j, value in found.items():
        np.testing.assert_allclose(value, wanted[j], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("ratio", [2, 3])
@settings(deadline=None, max_examples=30)
@given(rejected=st.lists(st.integers(0, 2), min_size=8, max_size=20))
def test_steps_that_go_back_give_the_same_latents(context, drafts_step, ratio, rejected):
    """Steps of one row and two drafts, the last `rejected` of them wrong: a ring that is two rows longer is enough."""
    run, wanted = drafts_step[ratio]
    ring = jnp.full((1, ratio - 1 + DRAFTS, 2, CONFIG.head_dim), jnp.nan)
    start, found = 0, {}
    for wrong in rejected:
        x = np.full((1, 1 + DRAFTS, CONFIG.hidden_size), 1e3, np.float32)
        right = X[:, start : start + 1 + DRAFTS - wrong]
        x[:, : right.shape[1]] = right
        index, latent, valid, ring = run(x, ring, jnp.array([start]), jnp.array([1 + DRAFTS]))
        start += right.shape[1]
        for j, value, ok in zip(*(np.asarray(v)[0] for v in (index, latent, valid)), strict=True):
            if ok and (j + 1) * ratio <= start:  # later ones are written again
                found[int(j)] = value
        if start == TOTAL:
            break
    assert sorted(found) == list(range(start // ratio))
    for j, value in found.items():
        np.testing.assert_allclose(value, wanted[j], rtol=1e-4, atol=1e-5)
