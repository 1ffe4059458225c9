"""Every field of the protocol is read, left to the client, or refused by name; zero and unset mean the default."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from widemesh.serving.grpc.convert import (
    REQUEST_RULES,
    SAMPLING_RULES,
    TOKENIZED_RULES,
    Refuse,
    read_request,
    write_chunk,
    write_complete,
    write_sampling,
)
from widemesh.serving.request import Delta, FinishReason, RequestError, SamplingParams, Status, TokenLogprobs

PROMPT = np.array([8, 3, 9], np.int32)
TABLES = [
    (pb.GenerateRequest, REQUEST_RULES),
    (pb.SamplingParams, SAMPLING_RULES),
    (pb.TokenizedInput, TOKENIZED_RULES),
]


def example(field):
    """A value that counts as set, for any field of the tables."""
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return {3: 1.5}
    if field.message_type is not None:
        return [field.message_type._concrete_class()] if field.is_repeated else field.message_type._concrete_class()
    value = {field.CPPTYPE_STRING: "x", field.CPPTYPE_BOOL: True, field.CPPTYPE_FLOAT: 0.5}.get(field.cpp_type, 2)
    return [value] if field.is_repeated else value


@pytest.mark.parametrize(("message", "rules"), TABLES, ids=lambda value: getattr(value, "__name__", ""))
def test_the_tables_cover_the_protocol(message, rules):
    assert set(rules) == {field.name for field in message.DESCRIPTOR.fields}


REFUSED = [
    (message, field)
    for message, rules in TABLES
    for field in message.DESCRIPTOR.fields
    if isinstance(rules[field.name], Refuse)
]


@pytest.mark.parametrize(("message", "field"), REFUSED, ids=lambda value: getattr(value, "name", ""))
def test_every_unsupported_field_is_refused_by_name(message, field):
    part = message(**{field.name: example(field)})
    request = pb.GenerateRequest(text="hi")
    if message is pb.GenerateRequest:
        request.MergeFrom(part)
    else:
        request.sampling_params.CopyFrom(part)
    with pytest.raises(RequestError, match=f"^{field.name}=.* is not supported yet; ") as caught:
        read_request(request)
    assert caught.value.status is Status.UNIMPLEMENTED
    assert len(str(caught.value)) < 200


def test_the_refused_fields_are_the_expected_ones():
    assert {field.name for _, field in REFUSED} == {
        "structural_tag", "mm_inputs", "extra_mm_inputs", "media_refs", "kv_transfer_params",
        "kv_transfer_params_json", "truncate_prompt_tokens", "data_parallel_rank",
    }


@pytest.mark.parametrize(
    "fields",
    [{"n": 1}, {"repetition_penalty": 1.0}, {"json_object": False}, {"frequency_penalty": 0.0}, {"min_p": 0.0},
     {"grammar_from_first_token": True}, {"skip_special_tokens": False}],
)
def test_values_that_switch_a_feature_off_are_taken(fields):
    sampling = read_request(pb.GenerateRequest(text="hi", sampling_params=pb.SamplingParams(**fields))).sampling
    assert sampling == SamplingParams()


@pytest.mark.parametrize("fields", [{"truncate_prompt_tokens": 0}, {"truncate_prompt_tokens": -1}])
def test_an_optional_field_set_to_zero_is_set(fields):
    with pytest.raises(RequestError, match="is not supported yet"):
        read_request(pb.GenerateRequest(text="hi", sampling_params=pb.SamplingParams(**fields)))


def test_unset_and_zero_take_the_defaults():
    assert read_request(pb.GenerateRequest(text="hi")).sampling == SamplingParams()
    zero = pb.SamplingParams(top_p=0.0, top_k=0, n=0, repetition_penalty=0.0)
    assert read_request(pb.GenerateRequest(text="hi", sampling_params=zero)).sampling == SamplingParams()


def test_temperature_zero_is_greedy_not_unset():
    call = read_request(pb.GenerateRequest(text="hi", sampling_params=pb.SamplingParams(temperature=0.0)))
    assert call.sampling.temperature == 0.0 and call.sampling.is_greedy


def test_zero_logprobs_are_not_none():
    message = pb.SamplingParams(logprobs=0, prompt_logprobs=0)
    sampling = read_request(pb.GenerateRequest(text="hi", sampling_params=message)).sampling
    assert (sampling.logprobs, sampling.prompt_logprobs) == (0, 0)


def test_supported_fields_arrive():
    message = pb.SamplingParams(
        temperature=0.5, top_p=0.25, top_k=7, max_tokens=9, stop_token_ids=[4, 5], ignore_eos=True, seed=-3,
        skip_special_tokens=False, spaces_between_special_tokens=True, n=3, min_p=0.25, frequency_penalty=-0.5,
        presence_penalty=2.0, repetition_penalty=1.5, min_tokens=2, stop=["a", "b"], include_stop_str_in_output=True,
        logprobs=20, prompt_logprobs=3, logit_bias={3: 1.5, 4: -100.0}, regex="x",
    )
    call = read_request(pb.GenerateRequest(request_id="r", text="hi", stream=True, sampling_params=message))
    assert (call.request_id, call.prompt, call.stream) == ("r", "hi", True)
    assert call.sampling == SamplingParams(
        temperature=0.5, top_p=0.25, top_k=7, max_tokens=9, stop_token_ids=(4, 5), ignore_eos=True, seed=-3,
        skip_special_tokens=False, n=3, min_p=0.25, frequency_penalty=-0.5, presence_penalty=2.0,
        repetition_penalty=1.5, min_tokens=2, stop=("a", "b"), include_stop_str_in_output=True, logprobs=20,
        prompt_logprobs=3, logit_bias={3: 1.5, 4: -100.0}, regex="x",
    )


def test_token_ids_become_one_int32_array():
    call = read_request(pb.GenerateRequest(tokenized=pb.TokenizedInput(original_text="x", input_ids=[1, 2**31 - 1])))
    assert isinstance(call.prompt, np.ndarray) and call.prompt.dtype == np.int32
    assert call.prompt.tolist() == [1, 2**31 - 1]


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (pb.GenerateRequest(), "input=None is missing"),
        (pb.GenerateRequest(text=""), "text='' must not be empty"),
        (pb.GenerateRequest(tokenized=pb.TokenizedInput()), "input_ids=[] must not be empty"),
        (pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=[1, 2**32 - 1])), "input_ids=4294967295 is outside"),
        (pb.GenerateRequest(text="a", sampling_params=pb.SamplingParams(temperature=-1)), "temperature=-1.0 must be"),
        (pb.GenerateRequest(text="a", sampling_params=pb.SamplingParams(temperature=float("nan"))), "temperature=nan"),
        (pb.GenerateRequest(text="a", sampling_params=pb.SamplingParams(top_p=1.5)), "top_p=1.5 must be"),
        (pb.GenerateRequest(text="a", sampling_params=pb.SamplingParams(top_p=-0.5)), "top_p=-0.5 must be"),
        (pb.GenerateRequest(text="a", sampling_params=pb.SamplingParams(max_tokens=0)), "max_tokens=0 must be"),
        (pb.GenerateRequest(text="a", sampling_params=pb.SamplingParams(top_k=2**32 - 1)), "top_k=4294967295 must be"),
        (pb.GenerateRequest(text="a", sampling_params=pb.SamplingParams(n=129)), "n=129 must be from 1 to 128"),
        (pb.GenerateRequest(text="a", sampling_params=pb.SamplingParams(logprobs=-1)), "logprobs=-1 must be"),
        (pb.GenerateRequest(text="a", sampling_params=pb.SamplingParams(stop=[""])), "stop='' must not be empty"),
        (pb.GenerateRequest(text="a", sampling_params=pb.SamplingParams(logit_bias={-1: 1.0})), "logit_bias=-1 must"),
        (pb.GenerateRequest(text="a", sampling_params=pb.SamplingParams(choice=pb.ChoiceConstraint())), "choice=[]"),
    ],
)
def test_client_mistakes_name_field_value_and_remedy(request_, words):
    with pytest.raises(RequestError) as caught:
        read_request(request_)
    assert words in str(caught.value)
    assert caught.value.status is Status.INVALID_ARGUMENT


def test_sampling_survives_the_round_trip():
    sampling = SamplingParams(
        temperature=0.0, top_p=0.5, top_k=3, seed=0, max_tokens=2, stop_token_ids=(7,), ignore_eos=True
    )
    shaped = SamplingParams(
        n=2, min_p=0.5, repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=-0.5, logit_bias={1: 2.0},
        min_tokens=1, stop=("x",), include_stop_str_in_output=True, skip_special_tokens=False, logprobs=0,
        prompt_logprobs=0,
    )
    constrained = [SamplingParams(**{name: value}) for name, value in (
        ("json_schema", "{}"), ("json_object", True), ("regex", "a"), ("grammar", "start: /a/"), ("choice", ("a", "b")),
    )]
    for params in (sampling, shaped, *constrained, SamplingParams()):
        assert read_request(pb.GenerateRequest(text="a", sampling_params=write_sampling(params))).sampling == params


def test_chunk_counts_its_own_tokens_and_complete_all():
    delta = Delta(
        request_id="r", token_ids=np.array([4, 5], np.int32), finish_reason=FinishReason.STOP, prompt_tokens=3,
        completion_tokens=7, cached_tokens=1, matched_token_id=5,
    )
    chunk = write_chunk(delta, PROMPT).chunk
    assert list(chunk.token_ids) == [4, 5]
    assert (chunk.completion_tokens, chunk.prompt_tokens, chunk.cached_tokens) == (2, 3, 1)
    done = write_complete(delta, PROMPT).complete
    assert (list(done.output_ids), done.completion_tokens, done.finish_reason) == ([4, 5], 7, "stop")
    assert done.matched_token_id == 5 and done.index == 0
    assert not (done.HasField("output_logprobs") or chunk.HasField("output_logprobs"))


def test_logprobs_index_and_stop_string_are_written():
    logprobs = TokenLogprobs(
        chosen=np.array([-1.0, -2.0], np.float32), ranks=np.array([1, 9], np.int32),
        top_ids=np.array([[4, 6], [7, 8]], np.int32), top=np.array([[-1.0, -1.5], [-0.5, -0.75]], np.float32),
    )
    delta = Delta(request_id="r", token_ids=np.array([4, 5], np.int32), index=2, logprobs=logprobs,
                  finish_reason=FinishReason.STOP, matched_stop="end")
    done = write_complete(delta, PROMPT).complete
    for message in (write_chunk(delta, PROMPT).chunk, done):
        assert message.index == 2
        assert list(message.output_logprobs.token_logprobs) == [-1.0, -2.0]
        assert list(message.output_logprobs.token_ids) == [4, 5]
        tops = [(list(top.token_ids), list(top.values)) for top in message.output_logprobs.top_logprobs]
        assert tops == [([4, 6], [-1.0, -1.5]), ([7, 8], [-0.5, -0.75])]
    assert done.matched_stop_str == "end" and not done.HasField("matched_token_id")


def test_prompt_logprobs_have_an_entry_per_prompt_token_and_the_first_is_empty():
    logprobs = TokenLogprobs(
        chosen=np.array([-1.0, -2.0], np.float32), ranks=np.array([1, 9], np.int32),
        top_ids=np.array([[4, 6], [7, 8]], np.int32), top=np.array([[-1.0, -1.5], [-0.5, -0.75]], np.float32),
    )
    none = TokenLogprobs(chosen=logprobs.chosen[:0], ranks=logprobs.ranks[:0], top_ids=logprobs.top_ids[:0],
                         top=logprobs.top[:0])
    delta = Delta(request_id="r", token_ids=np.array([4]), prompt_logprobs=logprobs, finish_reason=FinishReason.STOP)
    for message in (write_chunk(delta, PROMPT).chunk, write_complete(delta, PROMPT).complete):
        got = message.input_logprobs
        assert list(got.token_ids) == PROMPT.tolist()
        assert [one.value if one.HasField("value") else None for one in got.token_logprobs] == [None, -1.0, -2.0]
        tops = [(list(top.token_ids), list(top.values)) for top in got.top_logprobs]
        assert tops == [([], []), ([4, 6], [-1.0, -1.5]), ([7, 8], [-0.5, -0.75])]
    single = write_chunk(dataclasses.replace(delta, prompt_logprobs=none), PROMPT[:1]).chunk.input_logprobs
    assert (len(single.token_logprobs), list(single.token_ids)) == (1, [8])
    assert not write_chunk(dataclasses.replace(delta, prompt_logprobs=None), PROMPT).chunk.HasField("input_logprobs")
