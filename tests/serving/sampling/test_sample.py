"""Sampling on the device: the right distribution, the right filters, and noise by nothing but seed and position."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from widemesh.serving.sampling import SamplingRows, Tally, full_mask, init_tally, mask_words, sample
from widemesh.serving.sampling.filters import kept_tokens
from widemesh.serving.sampling.sample import shape_logits

DRAWS = 4000
V = 40


def rows(count: int, **values: Any) -> SamplingRows:
    """Neutral settings with temperature 1, and `values` in all rows or one for each."""
    settings = SamplingRows.neutral(count)
    for name, value in {"temperature": 1.0, **values}.items():
        array: Any = getattr(settings, name)
        if array.ndim == 2:
            for slot, row in enumerate(value):
                array[slot, : len(row)] = row
        else:
            array[:] = value
    return settings


jitted = jax.jit(sample)


def draw(logits: np.ndarray, settings: SamplingRows, positions: Any = None, **other: Any) -> np.ndarray:
    count, vocab = logits.shape
    positions = np.zeros(count, np.int32) if positions is None else np.asarray(positions, np.int32)
    mask = other.get("mask", full_mask(count, vocab))
    tally = other.get("tally", init_tally(count, vocab))
    drawn, _ = jitted(logits, settings, mask, tally, positions, np.ones(count, bool))
    return np.asarray(drawn.tokens)


@pytest.fixture(scope="module")
def logits() -> np.ndarray:
    return np.random.default_rng(0).normal(size=16).astype(np.float32)


# --- noise ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vary", ["position", "seed"])
def test_distribution(logits: np.ndarray, vary: str) -> None:
    """Chi-square of 4000 draws from one row, over positions of one seed and over seeds at one position."""
    batch = np.tile(logits, (DRAWS, 1))
    settings, positions = rows(DRAWS, temperature=0.8), np.full(DRAWS, 5)
    if vary == "position":
        positions = np.arange(DRAWS)
    else:
        settings = dataclasses.replace(settings, seed=np.arange(DRAWS, dtype=np.uint32))
    counts = np.bincount(draw(batch, settings, positions), minlength=16)
    expected = DRAWS * np.exp(logits / 0.8) / np.exp(logits / 0.8).sum()
    assert ((counts - expected) ** 2 / expected).sum() < 37.7  # 99.9 % point for 15 degrees of freedom


def test_noise_is_by_seed_and_position_only(logits: np.ndarray) -> None:
    """A seeded row in every place of batches of every size, among mates with filters, penalties and biases."""
    alone = draw(logits[None], rows(1, seed=9), [3])[0]
    for count in (2, 3, 5):
        for slot in range(count):
            mates = np.random.default_rng(slot).normal(size=(count, 16)).astype(np.float32)
            mates[slot] = logits
            settings = rows(count, seed=1, top_k=2, top_p=0.5, min_p=0.1, presence_penalty=1.0, logprobs=3)
            own = rows(1, seed=9)
            for array, value in zip(jax.tree.leaves(settings), jax.tree.leaves(own), strict=True):
                array[slot] = value[0]
            positions = np.full(count, 8)
            positions[slot] = 3
            assert draw(mates, settings, positions)[slot] == alone


def test_the_vocabulary_id_carries_the_noise(logits: np.ndarray) -> None:
    """Filtering out tokens that were not drawn changes nothing: noise is not by rank."""
    batch, settings = np.tile(logits, (200, 1)), rows(200, seed=np.arange(200))
    free = draw(batch, settings)
    kept = np.asarray(kept_tokens(batch[:1], np.array([5]), np.ones(1, np.float32), np.zeros(1, np.float32)))[0]
    narrow = draw(batch, dataclasses.replace(settings, top_k=np.full(200, 5, np.int32)))
    stays = kept[free]
    assert 20 < stays.sum() < 200
    np.testing.assert_array_equal(narrow[stays], free[stays])


def test_greedy_ties_go_to_the_lower_id() -> None:
    tied = np.array([[1.0, 3.0, 3.0, 0.0]], np.float32)
    assert draw(tied, rows(1, temperature=0.0))[0] == 1


# --- filters ----------------------------------------------------------------------------------------------------------


def test_kept_tokens() -> None:
    """min-p against the best; top-k by rank with ties to the lower id; top-p over what they leave; the best stays."""
    probabilities = np.array([0.05, 0.4, 0.3, 0.2, 0.05])
    cases = [  # top_k, top_p, min_p, kept
        (0, 1.0, 0.0, [0, 1, 2, 3, 4]),
        (2, 1.0, 0.0, [1, 2]),
        (4, 1.0, 0.0, [0, 1, 2, 3]),
        (0, 0.69, 0.0, [1, 2]),
        (0, 1e-6, 0.0, [1]),
        (2, 0.6, 0.0, [1, 2]),
        (2, 0.57, 0.0, [1]),  # after top-k of 2 the first alone holds 0.4 / 0.7 = 0.571
        (0, 1.0, 0.45, [1, 2, 3]),
        (0, 1.0, 1.0, [1]),
        (0, 0.76, 0.7, [1, 2]),
        (0, 0.57, 0.7, [1]),  # after min-p too
    ]
    batch = np.tile(np.log(probabilities).astype(np.float32), (len(cases), 1))
    top_k, top_p, min_p = (np.array([case[i] for case in cases], kind) for i, kind in enumerate("iff"))
    kept = np.asarray(kept_tokens(batch, top_k, top_p, min_p))
    assert [np.flatnonzero(row).tolist() for row in kept] == [case[3] for case in cases]


def mixed_batch(count: int, seed: int) -> tuple[np.ndarray, SamplingRows, np.ndarray, Tally, np.ndarray]:
    """Every setting on in some rows and off in others, with many equal logits."""
    rng = np.random.default_rng(seed)

    def some(value: Any, off: Any) -> np.ndarray:
        return np.where(rng.random(count) < 0.5, value, off)

    settings = rows(
        count,
        temperature=some(rng.uniform(0.3, 2.0, count), 0.0),
        top_k=some(rng.integers(1, V, count), 0),
        top_p=some(rng.uniform(0.2, 1.0, count), 1.0),
        min_p=some(rng.uniform(0.0, 0.3, count), 0.0),
        seed=rng.integers(2**32, size=count),
        repetition_penalty=some(rng.uniform(0.5, 2.0, count), 1.0),
        frequency_penalty=some(rng.uniform(-2, 2, count), 0.0),
        presence_penalty=some(rng.uniform(-2, 2, count), 0.0),
        bias_ids=[rng.permutation(V)[: rng.integers(0, 6)] for _ in range(count)],
        bias_values=rng.uniform(-5, 5, (count, 5)),
        stop_ids=[rng.permutation(V)[: rng.integers(0, 6)] for _ in range(count)],
        first_stop=rng.integers(0, 20, count),
        logprobs=some(rng.integers(0, 21, count), -1),
    )
    logits = rng.integers(-6, 6, (count, V)).astype(np.float32) / 2
    bits = rng.random((count, V)) < np.where(rng.random((count, 1)) < 0.5, 0.5, 1.1)
    tally = Tally(pack(rng.random((count, V)) < 0.3), rng.integers(0, 3, (count, V)).astype(np.int32))  # type: ignore[arg-type]
    return logits, settings, pack(bits), tally, rng.integers(0, 20, count).astype(np.int32)


def pack(bits: np.ndarray) -> np.ndarray:
    padded = np.zeros((len(bits), mask_words(bits.shape[1]) * 32), np.uint8)
    padded[:, : bits.shape[1]] = bits
    return np.packbits(padded, axis=-1, bitorder="little").view("<u4").astype(np.uint32)


def unpack(words: np.ndarray) -> np.ndarray:
    return np.unpackbits(words.view(np.uint8), bitorder="little")[:V].astype(bool)


def shaped_oracle(logits: np.ndarray, s: Any, slot: int, mask: np.ndarray, tally: Any, position: int) -> np.ndarray:
    """Biases, mask, minimum length and penalties of one row, one token at a time, in float32."""
    row = logits[slot].copy()
    for token, bias in zip(s.bias_ids[slot], s.bias_values[slot], strict=True):
        if token >= 0:
            row[token] += bias
    allowed = unpack(mask[slot])
    narrow = allowed.copy()
    if position < s.first_stop[slot]:
        narrow[[t for t in s.stop_ids[slot] if t >= 0]] = False
    row[~(narrow if narrow.any() else allowed)] = -np.inf
    prompt = unpack(tally.prompt[slot])
    for token in range(V):
        count = tally.output[slot, token]
        if prompt[token] or count:
            factor = s.repetition_penalty[slot]
            row[token] = row[token] / factor if row[token] > 0 else row[token] * factor
        row[token] -= s.frequency_penalty[slot] * np.float32(count)
        row[token] -= s.presence_penalty[slot] * np.float32(count > 0)
    return row


def kept_oracle(scaled: np.ndarray, top_k: int, top_p: float, min_p: float) -> list[int]:
    """One row, token by token from the most likely on."""
    order = sorted((t for t in range(V) if scaled[t] > -np.inf), key=lambda t: (-scaled[t], t))
    order = [t for t in order if np.exp(scaled[t] - scaled[order[0]]) >= np.float32(min_p)]
    order = order[: top_k or V]
    weights = np.exp(scaled[order] - scaled[order[0]])
    kept, before = [], 0.0
    for token, share in zip(order, weights / weights.sum(), strict=True):
        if before < top_p or top_p == 1.0 or not kept:
            kept.append(token)
        before += share
    return sorted(kept)


@pytest.mark.parametrize("seed", range(4))
def test_mixed_batches_equal_the_oracle(seed: int) -> None:
    """Each row of a mixed batch is shaped and filtered as its own settings say, ties included."""
    logits, s, mask, tally, positions = mixed_batch(32, seed)
    shaped = np.asarray(jax.jit(shape_logits)(logits, s, mask, tally, positions))
    tokens = draw(logits, s, positions, mask=mask, tally=tally)
    for slot in range(32):
        wanted = shaped_oracle(logits, s, slot, mask, tally, positions[slot])
        np.testing.assert_allclose(shaped[slot], wanted, rtol=1e-6, atol=1e-6)
        if s.temperature[slot] == 0:
            assert tokens[slot] == np.argmax(shaped[slot])
            continue
        scaled = shaped[slot] / s.temperature[slot]
        kept = kept_oracle(scaled, int(s.top_k[slot]), float(s.top_p[slot]), float(s.min_p[slot]))
        got = np.asarray(kept_tokens(scaled[None], *(x[slot : slot + 1] for x in (s.top_k, s.top_p, s.min_p))))[0]
        assert [t for t in np.flatnonzero(got) if scaled[t] > -np.inf] == kept
        key = jax.random.fold_in(jax.random.key(s.seed[slot]), positions[slot])
        noisy = scaled + np.asarray(jax.random.gumbel(key, (V,)))
        assert tokens[slot] == max(kept, key=lambda t: (noisy[t], -t))


def test_a_row_is_the_same_alone_and_in_a_mixed_batch() -> None:
    logits, s, mask, tally, positions = mixed_batch(8, 9)
    together = draw(logits, s, positions, mask=mask, tally=tally)
    for slot in range(8):
        one = slice(slot, slot + 1)
        alone = draw(logits[one], jax.tree.map(lambda x, one=one: x[one], s), positions[one], mask=mask[one],
                     tally=jax.tree.map(lambda x, one=one: x[one], tally))  # fmt: skip
        assert alone[0] == together[slot]


def test_one_program_for_every_mix() -> None:
    program = jax.jit(lambda *args: sample(*args))  # of its own, so that its cache counts only these calls
    for seed in range(3):
        logits, s, mask, tally, positions = mixed_batch(4, seed)
        for settings in (s, SamplingRows.neutral(4)):
            for words in (mask, full_mask(4, V)):
                program(logits, settings, words, tally, positions, np.ones(4, bool))
    assert program._cache_size() == 1


# --- counts and log-probabilities -------------------------------------------------------------------------------------


def test_active_slots_are_counted() -> None:
    tally = init_tally(3, V)
    logits = np.zeros((3, V), np.float32)
    logits[np.arange(3), [4, 5, 6]] = 9
    is_active = np.array([True, False, True])
    for _ in range(2):
        _, tally = jitted(logits, rows(3, temperature=0.0), full_mask(3, V), tally, np.zeros(3, np.int32), is_active)
    counts = np.asarray(tally.output)
    assert (counts[0, 4], counts[2, 6], counts.sum()) == (2, 2, 4)


def test_logprobs_are_of_the_models_own_logits() -> None:
    """Whatever the settings, in float32, ranked with ties to the lower id."""
    logits, s, mask, tally, positions = mixed_batch(16, 3)
    s = dataclasses.replace(s, logprobs=np.full(16, 20, np.int32))  # type: ignore[arg-type]
    drawn, _ = jitted(logits, s, mask, tally, positions, np.ones(16, bool))
    got = jax.tree.map(np.asarray, drawn)
    exact = logits.astype(np.float64)
    wanted = exact - np.log(np.exp(exact).sum(-1, keepdims=True))
    for slot in range(16):
        order = sorted(range(V), key=lambda t: (-logits[slot, t], t))
        token = got.tokens[slot]
        assert got.logprobs.rank[slot] == order.index(token) + 1
        assert got.logprobs.top_ids[slot].tolist() == order[:20]
        np.testing.assert_allclose(got.logprobs.chosen[slot], wanted[slot, token], atol=1e-5)
        np.testing.assert_allclose(got.logprobs.top[slot], wanted[slot, order[:20]], atol=1e-5)
