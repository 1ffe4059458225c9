"""Sampling settings refuse what is out of range, by field, value and remedy in one sentence."""

from __future__ import annotations

import numpy as np
import pytest

from widemesh.serving.request import Delta, RequestError, SamplingParams, Status, TokenLogprobs

NAN = float("nan")


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"temperature": -0.1}, "temperature=-0.1 must be between 0 and 100; use 0 for greedy decoding"),
        ({"temperature": NAN}, "temperature=nan must be between"),
        ({"top_p": 0.0}, "top_p=0.0 must be above 0"),
        ({"top_k": -1}, "top_k=-1 must be"),
        ({"min_p": 1.1}, "min_p=1.1 must be between 0 and 1; use 0 to switch it off"),
        ({"min_p": NAN}, "min_p=nan must be"),
        ({"repetition_penalty": 0.0}, "repetition_penalty=0.0 must be above 0; use 1 to switch it off"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty=inf must be"),
        ({"frequency_penalty": 2.5}, "frequency_penalty=2.5 must be between -2 and 2"),
        ({"presence_penalty": -3.0}, "presence_penalty=-3.0 must be between -2 and 2"),
        ({"logit_bias": {5: 101.0}}, "logit_bias=101.0 must be between -100 and 100"),
        ({"logit_bias": {-5: 1.0}}, "logit_bias=-5 must not hold negative token ids"),
        ({"logit_bias": dict.fromkeys(range(301), 1.0)}, "logit_bias='301 entries' is more than the 300"),
        ({"n": 0}, "n=0 must be from 1 to 128"),
        ({"n": 2, "temperature": 0.0}, "n=2 would give the same greedy output"),
        ({"seed": 2**31}, "seed=2147483648 must fit"),
        ({"max_tokens": 0}, "max_tokens=0 must be at least 1"),
        ({"min_tokens": -1}, "min_tokens=-1 must be a count"),
        ({"min_tokens": 3, "max_tokens": 2}, "min_tokens=3 must be at most max_tokens=2"),
        ({"stop": "end"}, "stop='end' must be a list of strings"),
        ({"stop": ("a", "")}, "stop='' must not be empty"),
        ({"stop": ("a",) * 65}, "stop='65 strings' is more than the 64"),
        ({"stop_token_ids": (-1,)}, r"stop_token_ids=\[-1\] must not hold negative"),
        ({"stop_token_ids": tuple(range(65))}, "stop_token_ids='65 ids' is more than the 64"),
        ({"logprobs": 21}, "logprobs=21 must be from 0 to 20"),
        ({"regex": "a", "choice": ("b",)}, r"choice=\('b',\) does not go with regex"),
        ({"json_object": True, "json_schema": "{}"}, "json_object=True does not go with json_schema"),
        ({"choice": "abc"}, "choice='abc' must be a list of strings"),
    ],
)
def test_out_of_range(setting: dict, words: str) -> None:
    with pytest.raises(RequestError, match=f"^{words}") as caught:
        SamplingParams(**setting)
    assert caught.value.status is Status.INVALID_ARGUMENT
    assert "\n" not in str(caught.value)


def test_limits_themselves_are_taken() -> None:
    SamplingParams(
        temperature=100.0, top_p=1e-6, min_p=1.0, repetition_penalty=1e-3, frequency_penalty=-2.0,
        presence_penalty=2.0, logit_bias=dict.fromkeys(range(300), -100.0), n=128, seed=-(2**31), max_tokens=1,
        min_tokens=1, stop=("a",) * 64, stop_token_ids=tuple(range(64)), logprobs=20,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("setting", "name"),
    [({}, None), ({"json_schema": ""}, "json_schema"), ({"json_object": True}, "json_object"),
     ({"regex": "a"}, "regex"), ({"grammar": "g"}, "grammar"), ({"choice": ("a",)}, "choice")],
)  # fmt: skip
def test_the_constraint_is_named(setting: dict, name: str | None) -> None:
    assert SamplingParams(**setting).constraint == name


def test_deltas_join() -> None:
    def delta(ids: list[int], count: int) -> Delta:
        k = len(ids)
        logprobs = TokenLogprobs(chosen=np.full(k, -1.0), ranks=np.ones(k, int), top_ids=np.zeros((k, 2), int),
                                 top=np.zeros((k, 2)))  # fmt: skip
        return Delta(request_id="r", token_ids=np.array(ids), completion_tokens=count, logprobs=logprobs)

    whole = Delta.join([delta([4], 1), delta([5, 6], 3)])
    assert (whole.token_ids.tolist(), whole.completion_tokens) == ([4, 5, 6], 3)
    assert whole.logprobs is not None and whole.logprobs.top.shape == (3, 2)
    assert whole.logprobs[:1].chosen.shape == (1,)
