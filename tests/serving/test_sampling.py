"""Sampling: the right distribution, the right filters, and noise that depends on nothing but seed and position."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from widemesh.serving.sampling import SamplingRows, kept_tokens, sample

DRAWS = 4000


def rows(count: int, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, seed: int = 0) -> SamplingRows:
    return SamplingRows(
        np.full(count, temperature, np.float32), np.full(count, top_k, np.int32), np.full(count, top_p, np.float32),
        np.full(count, seed, np.uint32),
    )  # type: ignore[arg-type]  # fmt: skip


@pytest.fixture(scope="module")
def logits() -> np.ndarray:
    return np.random.default_rng(0).normal(size=16).astype(np.float32)


@pytest.mark.parametrize("vary", ["position", "seed"])
def test_distribution(logits: np.ndarray, vary: str) -> None:
    """Chi-square of 4000 draws from one row, over positions of one seed and over seeds at one position."""
    batch = np.tile(logits, (DRAWS, 1))
    settings, positions = rows(DRAWS, temperature=0.8), np.full(DRAWS, 5, np.int32)
    if vary == "position":
        positions = np.arange(DRAWS, dtype=np.int32)
    else:
        settings = dataclasses.replace(settings, seed=np.arange(DRAWS, dtype=np.uint32))
    counts = np.bincount(np.asarray(jax.jit(sample)(batch, settings, positions)), minlength=16)
    expected = DRAWS * np.exp(logits / 0.8) / np.exp(logits / 0.8).sum()
    assert ((counts - expected) ** 2 / expected).sum() < 37.7  # 99.9 % point for 15 degrees of freedom


def test_noise_is_by_seed_and_position_only(logits: np.ndarray) -> None:
    """The same row in another place of another batch draws the same token."""
    alone = np.asarray(sample(logits[None], rows(1, seed=9), np.array([3], np.int32)))[0]
    mates = np.random.default_rng(1).normal(size=(5, 16)).astype(np.float32)
    mates[3] = logits
    settings = rows(5, top_k=2, seed=1)
    settings = SamplingRows(*(np.where(np.arange(5) == 3, own, other).astype(own.dtype) for own, other in zip(
        jax.tree.leaves(rows(5, seed=9)), jax.tree.leaves(settings), strict=True)))  # fmt: skip
    assert np.asarray(sample(mates, settings, np.array([8, 0, 1, 3, 2], np.int32)))[3] == alone


def test_greedy_ties_go_to_the_lower_id() -> None:
    tied = np.array([[1.0, 3.0, 3.0, 0.0]], np.float32)
    assert np.asarray(sample(tied, rows(1, temperature=0.0), np.zeros(1, np.int32)))[0] == 1


def test_kept_tokens() -> None:
    """top-k by rank with ties to the lower id; top-p over what top-k leaves; the best token always stays."""
    probabilities = np.array([0.05, 0.4, 0.3, 0.2, 0.05])
    batch = np.tile(np.log(probabilities).astype(np.float32), (6, 1))
    top_k = np.array([0, 2, 4, 0, 0, 2], np.int32)
    top_p = np.array([1.0, 1.0, 1.0, 0.69, 1e-6, 0.6], np.float32)
    kept = np.asarray(kept_tokens(batch, top_k, top_p))
    wanted = [[0, 1, 2, 3, 4], [1, 2], [0, 1, 2, 3], [1, 2], [1], [1, 2]]
    assert [np.flatnonzero(row).tolist() for row in kept] == wanted
    # After top-k of 2 the first token alone holds 0.4 / 0.7 = 0.571.
    narrow = np.asarray(kept_tokens(batch[:1], top_k[1:2], np.array([0.57], np.float32)))
    assert np.flatnonzero(narrow[0]).tolist() == [1]
