"""Sampling settings through the whole engine: each does what it says, for its own request only; none compiles."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
from typing import Any

import numpy as np
import pytest

from widemesh.serving import Engine, FinishReason, RequestError, SamplingParams
from widemesh.serving.compile_counter import CompileCounter
from widemesh.serving.request import Completion, Delta

BASE = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
SEEDED = dataclasses.replace(BASE, temperature=1.0, seed=5)

# One request per feature; together they are every setting of the sampler.
FEATURES: dict[str, SamplingParams] = {
    "greedy": BASE,
    "seeded": SEEDED,
    "top_k": dataclasses.replace(SEEDED, top_k=7),
    "top_p": dataclasses.replace(SEEDED, top_p=0.6),
    "min_p": dataclasses.replace(SEEDED, min_p=0.3),
    "repetition": dataclasses.replace(SEEDED, repetition_penalty=1.7),
    "frequency": dataclasses.replace(BASE, frequency_penalty=2.0),
    "presence": dataclasses.replace(SEEDED, presence_penalty=1.5),
    "bias": dataclasses.replace(BASE, logit_bias={7: 1.5, 11: -100.0}),
    "min_tokens": SamplingParams(temperature=1.0, seed=5, min_tokens=6, max_tokens=12, logit_bias={1: 100.0}),
    "logprobs": dataclasses.replace(SEEDED, logprobs=4),
    "regex": dataclasses.replace(SEEDED, regex="[ab]{3}c+"),
    "choice": dataclasses.replace(SEEDED, choice=("left", "right")),
    "stop": dataclasses.replace(SEEDED, stop=("zzzz",)),
}


def prompt(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, length]).integers(3, 500, length).astype(np.int32)


@pytest.fixture(scope="module")
def alone(engine: Engine) -> dict[str, Completion]:
    """Each feature's request by itself, with a prompt of its own."""
    return {name: engine.generate(prompt(9, i), one)[0] for i, (name, one) in enumerate(FEATURES.items())}


def test_any_mix_equals_alone_and_compiles_nothing(
    engine: Engine, alone: dict[str, Completion], compiles: CompileCounter
) -> None:
    """All features in one queue, in two orders: no request feels another's settings, in whichever slot of whichever
    rank it runs.
    """
    for order in (list(FEATURES), list(FEATURES)[::-1]):
        numbers = [list(FEATURES).index(name) for name in order]
        done = engine.generate([prompt(9, i) for i in numbers], [FEATURES[name] for name in order])
        for name, one in zip(order, done, strict=True):
            np.testing.assert_array_equal(one.token_ids, alone[name].token_ids, err_msg=name)
            assert (one.text, one.finish_reason) == (alone[name].text, alone[name].finish_reason)
    assert compiles.total == 0


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_every_batch_size_returns_max_tokens(engine: Engine, count: int) -> None:
    done = engine.generate([prompt(5, i) for i in range(count)], SEEDED)
    assert [len(one.token_ids) for one in done] == [12] * count


def test_bias_forces_and_forbids(engine: Engine, alone: dict[str, Completion]) -> None:
    assert 11 not in alone["bias"].token_ids
    forced = engine.generate(prompt(9), dataclasses.replace(BASE, logit_bias={77: 100.0}))[0]
    assert forced.token_ids.tolist() == [77] * 12


def test_penalties_count_prompt_and_output(engine: Engine) -> None:
    """Biases make four tokens tower over the rest, best first; what a penalty sees decides which of them comes."""
    towers = {60: 100.0, 61: 80.0, 62: 60.0, 63: 40.0}

    def run(ids: list[int], **settings: Any) -> list[int]:
        one = SamplingParams(**{**dataclasses.asdict(BASE), "max_tokens": 4, "logit_bias": towers, **settings})
        return engine.generate(ids, one)[0].token_ids.tolist()

    spread = 20.0  # a factor that takes any tower below the others
    assert run([5, 6, 7]) == [60] * 4
    assert run([5, 6, 7], repetition_penalty=spread) == [60, 61, 62, 63]
    # A prompt of the first two leaves the others to come first.
    assert run([60, 5, 61], repetition_penalty=spread)[:2] == [62, 63]
    # Frequency and presence do not look at the prompt.
    assert run([60, 5, 61], presence_penalty=2.0)[0] == run([60, 5, 61], frequency_penalty=2.0)[0] == 60
    # Two equal towers: 2 off per use lets neither get far ahead.
    twins = run([5, 6, 7], frequency_penalty=2.0, max_tokens=40, logit_bias={60: 90.0, 61: 90.0})
    assert {*twins} == {60, 61}
    assert abs(twins.count(60) - twins.count(61)) < 10


def test_tallies_of_an_earlier_request_are_forgotten(engine: Engine) -> None:
    """The same penalised request again and again, in every slot, is the same."""
    one = dataclasses.replace(SEEDED, frequency_penalty=1.0, repetition_penalty=1.3)
    done = engine.generate([prompt(9)] * 9, one)
    for other in done[1:]:
        np.testing.assert_array_equal(other.token_ids, done[0].token_ids)


def test_min_tokens_holds_back_eos_and_stop_ids(engine: Engine) -> None:
    eos = engine.model_config.eos_token_ids[0]
    eager = SamplingParams(temperature=0.0, max_tokens=12, logit_bias={eos: 100.0, 9: 80.0})
    assert engine.generate(prompt(9), eager)[0].token_ids.tolist() == [eos]
    later = dataclasses.replace(eager, min_tokens=3)
    assert engine.generate(prompt(9), later)[0].token_ids.tolist() == [9, 9, 9, eos]
    both = dataclasses.replace(eager, min_tokens=3, stop_token_ids=(9,))
    done = engine.generate(prompt(9), both)[0].token_ids.tolist()
    assert len(done) == 4 and not {eos, 9} & set(done[:3]) and done[3] == eos


def test_logprobs(engine: Engine, alone: dict[str, Completion]) -> None:
    """Of the model's own logits: the same tokens greedy with and without a bias report the same values."""
    done = alone["logprobs"]
    np.testing.assert_array_equal(done.token_ids, engine.generate(prompt(9, list(FEATURES).index("logprobs")), SEEDED)[0].token_ids)  # fmt: skip # noqa: E501
    assert done.logprobs is not None and alone["seeded"].logprobs is None
    assert done.logprobs.chosen.shape == (12,) and done.logprobs.top.shape == done.logprobs.top_ids.shape == (12, 4)
    for step in range(12):
        best = done.logprobs.top[step]
        assert (np.diff(best) <= 0).all() and np.exp(best).sum() < 1
        rank = done.logprobs.ranks[step]
        if rank <= 4:
            assert done.logprobs.top_ids[step, rank - 1] == done.token_ids[step]
            assert best[rank - 1] == done.logprobs.chosen[step]
    greedy = engine.generate(prompt(9), dataclasses.replace(BASE, logprobs=0))[0].logprobs
    assert greedy is not None and greedy.ranks.tolist() == [1] * 12 and greedy.top.shape == (12, 0)


def test_logprobs_of_a_first_token_do_not_depend_on_settings(engine: Engine) -> None:
    plain = engine.generate(prompt(9), dataclasses.replace(BASE, logprobs=20, max_tokens=1))[0]
    bent = dataclasses.replace(SEEDED, logprobs=20, max_tokens=1, logit_bias={5: 9.0}, repetition_penalty=2.0, top_k=1)
    other = engine.generate(prompt(9), bent)[0]
    np.testing.assert_array_equal(plain.logprobs.top_ids, other.logprobs.top_ids)
    np.testing.assert_array_equal(plain.logprobs.top, other.logprobs.top)


# --- several samples --------------------------------------------------------------------------------------------------


def test_sample_i_uses_seed_plus_i(engine: Engine) -> None:
    done = engine.generate([prompt(9), prompt(5)], [dataclasses.replace(SEEDED, n=3), SEEDED])
    assert [one.index for one in done] == [0, 1, 2, 0]
    assert len({one.request_id for one in done[:3]}) == 1
    for i, one in enumerate(done[:3]):
        single = engine.generate(prompt(9), dataclasses.replace(SEEDED, seed=5 + i))[0]
        np.testing.assert_array_equal(one.token_ids, single.token_ids)


def test_samples_interleave_in_a_stream_and_end_together_by_abort(engine: Engine) -> None:
    many = dataclasses.replace(SEEDED, n=3, max_tokens=None)

    async def run() -> list[Delta]:
        stream = engine.stream(prompt(9), many, request_id="many")
        got = [await anext(stream) for _ in range(5)]
        engine.abort("many")
        return got + [delta async for delta in stream]

    deltas = asyncio.run(run())
    ends = [delta for delta in deltas if delta.finish_reason is not None]
    assert sorted(delta.index for delta in ends) == [0, 1, 2]
    assert {delta.finish_reason for delta in ends} == {FinishReason.ABORT}
    assert {delta.request_id for delta in deltas} == {"many"}


# --- stop strings -----------------------------------------------------------------------------------------------------


def test_a_stop_string_ends_the_text(engine: Engine) -> None:
    """Cut at its first appearance; the other sample of the batch is not touched."""
    whole = engine.generate(prompt(9), SEEDED)[0]
    text = "".join(whole.text)
    stop = text[4:7]
    at = text.index(stop)
    for includes in (False, True):
        one = dataclasses.replace(SEEDED, stop=(stop,), include_stop_str_in_output=includes)
        done, mate = engine.generate([prompt(9), prompt(9)], [one, SEEDED])
        assert done.text == text[: at + len(stop) * includes]
        assert (done.finish_reason, done.matched_stop, done.matched_token_id) == (FinishReason.STOP, stop, None)
        assert 0 < len(done.token_ids) <= len(whole.token_ids)
        np.testing.assert_array_equal(done.token_ids, whole.token_ids[: len(done.token_ids)])
        assert stop in engine.tokenizer.decode(done.token_ids.tolist())
        assert stop not in engine.tokenizer.decode(done.token_ids[:-1].tolist())
        np.testing.assert_array_equal(mate.token_ids, whole.token_ids)


def test_a_stop_string_ends_a_stream_and_frees_the_slot(engine: Engine) -> None:
    text = engine.generate(prompt(9), SEEDED)[0].text
    one = dataclasses.replace(SEEDED, stop=(text[4:7],), max_tokens=None)
    before = ended_by_stop(engine)

    async def run() -> list[Delta]:
        return [delta async for delta in engine.stream(prompt(9), one)]

    deltas = asyncio.run(run())
    assert (deltas[-1].finish_reason, deltas[-1].matched_stop) == (FinishReason.STOP, text[4:7])
    assert deltas[-1].completion_tokens == sum(len(delta.token_ids) for delta in deltas)
    assert engine.generate(prompt(3), BASE)[0].finish_reason is FinishReason.LENGTH
    assert ended_by_stop(engine) == before + 1  # for the engine too it is no abort


def ended_by_stop(engine: Engine) -> float:
    return sum(
        sample.value
        for metric in engine.metrics.collect()
        for sample in metric.samples
        if sample.name == "vllm:request_success_total" and sample.labels["finished_reason"] == "stop"
    )


# --- constraints ------------------------------------------------------------------------------------------------------


def test_constrained_outputs_follow_their_grammar(engine: Engine, alone: dict[str, Completion]) -> None:
    assert re.fullmatch("[ab]{3}c+", alone["regex"].text)
    assert alone["choice"].text in ("left", "right") and alone["choice"].finish_reason is FinishReason.STOP
    schema = {"type": "object", "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}},
              "required": ["a"], "additionalProperties": False}  # fmt: skip
    wide = SamplingParams(temperature=1.0, seed=2, max_tokens=80)
    done = engine.generate(
        [prompt(9)] * 2,
        [dataclasses.replace(wide, json_schema=json.dumps(schema)),
         dataclasses.replace(wide, grammar='start: "[" /[0-9]/ ("," /[0-9]/){2} "]"')],
    )  # fmt: skip
    assert set(json.loads(done[0].text)) == {"a"}
    assert len(json.loads(done[1].text)) == 3
    many = engine.generate(prompt(9), dataclasses.replace(wide, choice=("é", "日本", '"q"'), n=4))
    assert {one.text for one in many} <= {"é", "日本", '"q"'}
    assert engine.generate(prompt(9), dataclasses.replace(wide, json_object=True, max_tokens=3))[0].text[0] == "{"


def test_a_constraint_outranks_min_tokens_and_ignore_eos(engine: Engine) -> None:
    """Where the grammar has nothing more to say the output ends."""
    one = SamplingParams(temperature=1.0, seed=2, regex="ab", min_tokens=9, max_tokens=20, ignore_eos=True)
    done = engine.generate(prompt(9), one)[0]
    assert (done.text, done.finish_reason, done.matched_token_id) == ("ab", FinishReason.STOP, None)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"regex": "a("}, "unclosed group"),
        ({"json_schema": "{"}, "json_schema='{' cannot be followed"),
        ({"json_schema": '{"type": "nothing"}'}, "cannot be followed"),
        ({"grammar": "begin: x"}, "grammar='begin: x' cannot be followed"),
        ({"grammar": "start: /a/ & /b/"}, "cannot be followed"),
    ],
)
def test_an_impossible_constraint_fails_alone(engine: Engine, setting: dict[str, str], words: str) -> None:
    with pytest.raises(RequestError) as caught:
        engine.generate(prompt(9), SamplingParams(**setting))
    assert words in str(caught.value)
    assert len(str(caught.value)) < 400 and "\n" not in str(caught.value)
    assert engine.generate(prompt(3), BASE)[0].finish_reason is FinishReason.LENGTH


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"logit_bias": {512: 1.0}}, "logit_bias=512 must be below 512"),
        ({"min_tokens": 95}, "min_tokens=95 exceeds the 87 tokens that max_model_len leaves"),
        ({"stop_token_ids": tuple(range(64))}, "stop_token_ids='64 ids' is more than the 63"),
    ],
)
def test_what_only_the_engine_can_check(engine: Engine, setting: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        engine.generate(prompt(9), SamplingParams(**setting))
