"""Log-probabilities of prompts: those of a whole forward, whatever the chunks, the pages, the cache and others do."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from widemesh.model.forward import ForwardModel
from widemesh.model.numerics import NUMERICS
from widemesh.serving import Completion, Engine, EngineConfig, RequestError, SamplingParams, TokenLogprobs
from widemesh.serving.compile_counter import CompileCounter
from widemesh.serving.device import PrefillRow, PrefillStep
from widemesh.serving.prompt_scores import PromptScores
from widemesh.serving.request import Delta
from widemesh.serving.step_needs import PrefillSize
from widemesh.tools.init_tiny import write_tiny

# Around a chunk (8 rows, 24 in the bounded engine), a page (4 tokens), the window (16), and one and two tokens.
LENGTHS = (1, 2, 3, 4, 5, 8, 9, 10, 16, 17, 18, 24, 25, 26, 33, 49, 50)
GREEDY = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
PADDED = 64  # one length, one program; what follows a token does not change its logits
ASKS = dataclasses.replace(GREEDY, prompt_logprobs=6)


def prompt(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, length]).integers(3, 500, length).astype(np.int32)


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> ForwardModel:
    model = ForwardModel.load(checkpoint, NUMERICS["plain"])
    model.logits(np.zeros(PADDED, np.int32))  # compiled before anybody counts
    return model


@pytest.fixture(scope="module")
def bounded(engine_config: EngineConfig) -> Iterator[Engine]:
    """As the room's engine, with bounded replay, whose chunks hold a window."""
    config = dataclasses.replace(
        engine_config, replay_prefix="bounded", replay_tail="bounded", max_num_batched_tokens=48
    )
    with Engine(config) as engine:
        yield engine


@pytest.fixture(params=["full", "bounded"])
def either(request: pytest.FixtureRequest) -> Engine:
    engine: Engine = request.getfixturevalue("engine" if request.param == "full" else "bounded")
    return engine


def check(model: ForwardModel, ids: np.ndarray, got: TokenLogprobs | None, asked: int) -> None:
    """Against the log-softmax of a whole forward."""
    assert got is not None
    padded = np.zeros(PADDED, np.int32)
    padded[: len(ids)] = ids
    logits = model.logits(padded)[: len(ids) - 1].astype(np.float64)
    wanted = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    assert got.chosen.shape == got.ranks.shape == (len(ids) - 1,)
    assert got.top.shape == got.top_ids.shape == (len(ids) - 1, asked)
    rows, close = np.arange(len(ids) - 1), {"atol": 2e-4, "rtol": 0}
    np.testing.assert_allclose(got.chosen, wanted[rows, ids[1:]], **close)
    np.testing.assert_allclose(got.top, np.sort(wanted, axis=-1)[:, ::-1][:, :asked], **close)
    np.testing.assert_allclose(np.take_along_axis(wanted, got.top_ids, axis=-1), got.top, **close)
    # Ranks up to tokens that are equal to rounding.
    own = wanted[rows, ids[1:], None]
    assert (got.ranks > (wanted > own + 2e-4).sum(-1)).all()
    assert (got.ranks <= 1 + (wanted > own - 2e-4).sum(-1)).all()


def test_equal_to_a_whole_forward(model: ForwardModel, either: Engine, compiles: CompileCounter) -> None:
    prompts = [prompt(length) for length in LENGTHS]
    done = either.generate(prompts, ASKS)
    assert compiles.total == 0
    for ids, one in zip(prompts, done, strict=True):
        check(model, ids, one.prompt_logprobs, 6)
        assert one.logprobs is None and len(one.token_ids) == 5


@pytest.mark.parametrize("asked", [0, 20])
def test_least_and_most(engine: Engine, model: ForwardModel, asked: int) -> None:
    (done,) = engine.generate(prompt(11), dataclasses.replace(GREEDY, prompt_logprobs=asked))
    check(model, prompt(11), done.prompt_logprobs, asked)


def test_settings_do_not_enter(engine: Engine, model: ForwardModel) -> None:
    bent = SamplingParams(temperature=3.0, top_k=2, repetition_penalty=2.0, logit_bias={5: 50.0}, max_tokens=3, seed=1,
                          logprobs=1, prompt_logprobs=2)  # fmt: skip
    (done,) = engine.generate(prompt(19), bent)
    check(model, prompt(19), done.prompt_logprobs, 2)
    assert done.logprobs is not None and done.logprobs.top.shape == (len(done.token_ids), 1)


def test_others_get_what_they_get_alone(
    model: ForwardModel, either: Engine, compiles: CompileCounter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that ask and requests that do not prefill in the same steps, on either rank, in two orders."""
    flush(either)
    mates = [prompt(length, 7) for length in (40, 3, 26, 17)]
    alone = []
    for mate in mates:
        flush(either)
        alone.append(either.generate(mate, dataclasses.replace(GREEDY, logprobs=3))[0])
    askers = [prompt(length, 8) for length in (41, 9, 30, 12)]
    run, mixed = either.device.prefill_step, []

    def watched(work: list[PrefillRow | None], size: PrefillSize) -> PrefillStep:
        mixed.append({row.targets is None for row in work if row} == {True, False})
        return run(work, size)

    monkeypatch.setattr(either.device, "prefill_step", watched)
    for order in (1, -1):
        flush(either)
        pairs = list(zip(askers, mates, strict=True))[::order]
        done = either.generate(
            [ids for pair in pairs for ids in pair[::order]],
            [one for _ in pairs for one in (ASKS, dataclasses.replace(GREEDY, logprobs=3))[::order]],
        )
        asked, others = (done[0::2], done[1::2])[::order]
        for (ids, _), one in zip(pairs, asked, strict=True):
            check(model, ids, one.prompt_logprobs, 6)
        for one, single in zip(others, alone[::order], strict=True):
            assert one.prompt_logprobs is None
            np.testing.assert_array_equal(one.token_ids, single.token_ids)
            np.testing.assert_allclose(one.logprobs.chosen, single.logprobs.chosen, atol=2e-4)
    assert compiles.total == 0 and any(mixed)


def test_a_warm_cache_is_not_read(either: Engine, model: ForwardModel) -> None:
    """Nor is a request that asks no help to those after it: its pages are cached as anybody's."""
    flush(either)
    ids = prompt(45, 3)
    (first,) = either.generate(ids, GREEDY)
    (asks,) = either.generate(ids, ASKS)
    (after,) = either.generate(ids, GREEDY)
    assert (first.cached_tokens, asks.cached_tokens, after.cached_tokens) == (0, 0, 44)
    check(model, ids, asks.prompt_logprobs, 6)
    if either.config.replay_tail == "full":
        np.testing.assert_array_equal(asks.token_ids, first.token_ids)
        np.testing.assert_array_equal(after.token_ids, first.token_ids)
    flush(either)
    either.generate(ids, ASKS)
    assert either.generate(ids, GREEDY)[0].cached_tokens == 44


def test_one_sample_carries_them(engine: Engine, model: ForwardModel) -> None:
    many = SamplingParams(n=3, seed=5, max_tokens=4, ignore_eos=True, prompt_logprobs=1)
    plain = engine.generate(prompt(22), dataclasses.replace(many, prompt_logprobs=None))
    done = engine.generate(prompt(22), many)
    check(model, prompt(22), done[0].prompt_logprobs, 1)
    assert [one.prompt_logprobs for one in done[1:]] == [None, None]
    for one, other in zip(done, plain, strict=True):
        np.testing.assert_array_equal(one.token_ids, other.token_ids)


def test_a_stream_has_them_in_its_first_delta(engine: Engine, model: ForwardModel) -> None:
    async def run(ids: np.ndarray, sampling: SamplingParams) -> list[Delta]:
        return [delta async for delta in engine.stream(ids, sampling)]

    for length in (1, 20):
        deltas = asyncio.run(run(prompt(length), ASKS))
        check(model, prompt(length), deltas[0].prompt_logprobs, 6)
        assert len(deltas) > 1 and all(delta.prompt_logprobs is None for delta in deltas[1:])


def test_a_preempted_request_has_them_once(tmp_path: Path) -> None:
    write_tiny(tmp_path, preset="tiny-structure", seed=0, form="quantized")
    config = EngineConfig(model=str(tmp_path), numerics="plain", max_model_len=96, max_num_seqs=4, page_size=4,
                          max_num_batched_tokens=8, prefill_devices=1, decode_devices=1, num_pages=26,
                          reserve_output_tokens=1, replay_prefix="exact", replay_tail="full")  # fmt: skip
    model = ForwardModel.load(tmp_path, NUMERICS["plain"])
    long = dataclasses.replace(ASKS, max_tokens=40)
    prompts = [prompt(length, 4) % 120 + 3 for length in (21, 13, 18)]

    async def run(engine: Engine) -> list[list[Delta]]:
        async def one(ids: np.ndarray) -> list[Delta]:
            return [delta async for delta in engine.stream(ids, long)]

        return await asyncio.gather(*map(one, prompts))

    with Engine(config) as engine:
        alone = [engine.generate(ids, long)[0] for ids in prompts]
        together = asyncio.run(run(engine))
        assert engine._loop._scheduler.num_preemptions > 0
    for ids, deltas, single in zip(prompts, together, alone, strict=True):
        assert [delta.prompt_logprobs is not None for delta in deltas] == [True] + [False] * (len(deltas) - 1)
        check(model, ids, deltas[0].prompt_logprobs, 6)
        np.testing.assert_array_equal(Delta.join(deltas).token_ids, single.token_ids)


@pytest.mark.parametrize("value", [-1, 21])
def test_out_of_range(value: int) -> None:
    words = f"^prompt_logprobs={value} must be from 0 to 20, or left out to report none$"
    with pytest.raises(RequestError, match=words):
        SamplingParams(prompt_logprobs=value)


# --- collecting -------------------------------------------------------------------------------------------------------


def part(first: int, count: int) -> TokenLogprobs:
    values = np.arange(first, first + count, dtype=np.float32)
    return TokenLogprobs(chosen=values, ranks=values.astype(np.int32), top_ids=np.zeros((count, 0), np.int32),
                         top=np.zeros((count, 0), np.float32))  # fmt: skip


def test_a_broken_off_prefill_begins_again_and_a_later_one_changes_nothing() -> None:
    scores = PromptScores(5, 0)
    scores.add(part(100, 3), epoch=0)
    assert scores.take() is None
    scores.add(part(0, 4), epoch=1)
    scores.add(part(4, 3), epoch=1)  # two of output, prefilled with it
    scores.add(part(200, 5), epoch=2)
    whole = scores.take()
    assert whole is not None and whole.chosen.tolist() == [0, 1, 2, 3, 4]
    assert scores.take() is None


def flush(engine: Engine) -> None:
    """Forget cached prefixes; the engine is idle."""
    engine._loop._scheduler.flush_prefix_cache()


def test_completions_are_joined_from_deltas() -> None:
    first, second = (Delta(request_id="r", token_ids=np.array([i])) for i in (1, 2))
    whole = Delta.join([dataclasses.replace(first, prompt_logprobs=part(0, 2)), second])
    assert whole.prompt_logprobs is not None and whole.prompt_logprobs.chosen.tolist() == [0, 1]
    assert Completion.__dataclass_fields__["prompt_logprobs"].default is None
