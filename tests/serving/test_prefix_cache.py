"""Requests that begin like an earlier one, on a real engine: which tokens are found, and what that changes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from widemesh.serving import Completion, Engine, EngineConfig, SamplingParams
from widemesh.serving.scheduling import hash_pages
from widemesh.serving.scheduling.prefix_cache import find_prefix
from widemesh.tools.init_tiny import write_tiny

PAGE, WINDOW, MAX_LEN = 8, 4, 1024
SHARED = sorted({1, PAGE - 1, PAGE, PAGE + 1, *range(WINDOW - 1, WINDOW + 3), 4 * WINDOW, 1000})
OWN = (1, 2, PAGE, PAGE + 1)  # tokens after the shared ones
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    write_tiny(folder, preset="tiny-structure", seed=0, form="quantized")
    return folder


def engine_of(folder: Path, numerics: str, replay: str) -> Engine:
    tail = "full" if replay == "exact" else "bounded"
    config = EngineConfig(model=str(folder), numerics=numerics, max_model_len=MAX_LEN, max_num_seqs=2,
                          max_num_batched_tokens=128, prefill_devices=1, decode_devices=1, page_size=PAGE,
                          replay_prefix=replay, replay_tail=tail)  # fmt: skip
    return Engine(config)


@pytest.fixture(scope="module")
def exact(folder: Path) -> Iterator[Engine]:
    with engine_of(folder, "plain", "exact") as engine:
        assert engine.model_config.sliding_window == WINDOW
        yield engine


def ids(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, 120, count).astype(np.int32)


def after(engine: Engine, prompt: np.ndarray, before: np.ndarray | None) -> Completion:
    """Run a prompt on an empty prefix cache, or after another one."""
    engine._loop._scheduler.flush_prefix_cache()
    if before is not None:
        engine.generate(before, GREEDY)
    return engine.generate(prompt, GREEDY)[0]


def hit_of(shared: int, own: int) -> int:
    """Whole pages of what is the same, and never the last token."""
    return min(shared, shared + own - 1) // PAGE * PAGE


@pytest.mark.parametrize("shared", SHARED)
def test_exact_replay_changes_no_token(exact: Engine, shared: int) -> None:
    for own in OWN:
        prefix = ids(shared, shared)
        prompt, other = (np.concatenate([prefix, ids(10_000 + seed, own)]) for seed in (own, 77 + own))
        cold = after(exact, prompt, None)
        warm = after(exact, prompt, np.concatenate([other, ids(5, PAGE)]))  # so that its last full page is cached too
        assert (cold.cached_tokens, warm.cached_tokens) == (0, hit_of(shared, own))
        np.testing.assert_array_equal(warm.token_ids, cold.token_ids, err_msg=f"{shared} shared, {own} own")
        np.testing.assert_allclose(warm.logprobs.chosen, cold.logprobs.chosen, atol=2e-4)
    exact._loop._scheduler.check()


def test_same_prompt_again(exact: Engine) -> None:
    """All but its last page, or its last token where that begins a page."""
    for length in (PAGE, PAGE + 1, 3 * PAGE, 3 * PAGE + 1):
        prompt = ids(length, length)
        cold, warm = after(exact, prompt, None), after(exact, prompt, prompt)
        assert warm.cached_tokens == (length - 1) // PAGE * PAGE
        np.testing.assert_array_equal(warm.token_ids, cold.token_ids)


def test_two_equal_prompts_in_flight_together(exact: Engine) -> None:
    exact._loop._scheduler.flush_prefix_cache()
    prompt = ids(3, 40)
    wanted = after(exact, prompt, None).token_ids
    exact._loop._scheduler.flush_prefix_cache()
    for done in exact.generate([prompt] * 4, GREEDY):
        np.testing.assert_array_equal(done.token_ids, wanted)
    exact._loop._scheduler.check()


def test_a_prompt_that_diverges_takes_only_what_is_the_same(exact: Engine) -> None:
    """Nothing of the other's text behind the branch is ever read."""
    first, second = ids(1, 60), ids(2, 60)
    for branch in (PAGE, 2 * PAGE + 3, 59):
        prompt = np.concatenate([first[:branch], second[branch:]])
        cold, warm = after(exact, prompt, None), after(exact, prompt, first)
        assert warm.cached_tokens == branch // PAGE * PAGE
        np.testing.assert_array_equal(warm.token_ids, cold.token_ids)


@pytest.mark.parametrize("numerics", ["plain", "kvq"])
def test_bounded_replay_changes_no_cached_row(folder: Path, numerics: str) -> None:
    """Cached pages stay to the bit; the difference it makes to the log-probabilities is printed."""
    with engine_of(folder, numerics, "bounded") as engine:
        scheduler, worst = engine._loop._scheduler, 0.0
        for shared in (PAGE, 2 * PAGE + 1, 4 * WINDOW, 200):
            for own in OWN:
                prefix = ids(shared, shared)
                prompt, other = (np.concatenate([prefix, ids(10_000 + seed, own)]) for seed in (own, 77 + own))
                cold = after(engine, prompt, None)
                scheduler.flush_prefix_cache()
                engine.generate(np.concatenate([other, ids(5, PAGE)]), GREEDY)
                hit = hit_of(shared, own)
                cached = find_prefix(scheduler.prefill.pools[0], hash_pages(prompt[:hit], PAGE))
                assert len(cached) == hit // PAGE
                before = np.array(engine.device.prefill.cache.pages[cached])
                warm = engine.generate(prompt, GREEDY)[0]
                assert warm.cached_tokens == (hit if hit > WINDOW else 0)
                np.testing.assert_array_equal(engine.device.prefill.cache.pages[cached], before)
                worst = max(worst, abs(float(warm.logprobs.chosen[0] - cold.logprobs.chosen[0])))
        print(f"{numerics}: bounded replay moved the first token's log-probability by up to {worst:.4f}")
        scheduler.check()
