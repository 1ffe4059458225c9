"""Protocol messages to what the engine takes, and back. One table says what becomes of every field.

A field is *used*, *left to the client* (it is about showing text, which clients do), or *refused*: a field that is set
and not supported is never ignored. Unset fields, and zero in fields that cannot tell zero from unset, take the default
of `SamplingParams`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from google.protobuf.message import Message
from jaxtyping import Int32
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from widemesh.serving.request import Delta, RequestError, SamplingParams, Status

MAX_TOKEN_ID = 2**31 - 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Use:
    """The field is read."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForClient:
    """The field asks for nothing of the engine: it is about text, and clients detokenise."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Refuse:
    """The field is not supported: UNIMPLEMENTED if it is set, unless to one of the values that switch it off."""

    off: tuple[Any, ...] = ()
    remedy: str = "leave it unset"


Rule = Use | ForClient | Refuse

REQUEST_RULES: Mapping[str, Rule] = {
    "request_id": Use(),
    "tokenized": Use(),
    "text": Use(),
    "sampling_params": Use(),
    "stream": Use(),
    "kv_transfer_params": Refuse(),
    "kv_transfer_params_json": Refuse(),
    "data_parallel_rank": Refuse(),
    "mm_inputs": Refuse(remedy="send text only"),
    "extra_mm_inputs": Refuse(remedy="send text only"),
    "media_refs": Refuse(remedy="send text only"),
}

TOKENIZED_RULES: Mapping[str, Rule] = {
    "original_text": ForClient(),
    "input_ids": Use(),
}

SAMPLING_RULES: Mapping[str, Rule] = {
    "temperature": Use(),
    "top_p": Use(),
    "top_k": Use(),
    "max_tokens": Use(),
    "stop_token_ids": Use(),
    "ignore_eos": Use(),
    "seed": Use(),
    "skip_special_tokens": ForClient(),
    "spaces_between_special_tokens": ForClient(),
    "n": Refuse(off=(1,), remedy="send one request per sample"),
    "min_p": Refuse(),
    "frequency_penalty": Refuse(),
    "presence_penalty": Refuse(),
    "repetition_penalty": Refuse(off=(1.0,), remedy="leave it unset or use 1"),
    "min_tokens": Refuse(),
    "stop": Refuse(remedy="use stop_token_ids, or stop in the client"),
    "include_stop_str_in_output": Refuse(),
    "logprobs": Refuse(),
    "prompt_logprobs": Refuse(),
    "logit_bias": Refuse(),
    "truncate_prompt_tokens": Refuse(remedy="shorten the prompt in the client"),
    "json_schema": Refuse(),
    "regex": Refuse(),
    "grammar": Refuse(),
    "structural_tag": Refuse(),
    "json_object": Refuse(off=(False,)),
    "choice": Refuse(),
    "grammar_from_first_token": Refuse(),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateCall:
    """One Generate request, checked: `prompt` is text that is still to be encoded, or ids."""

    request_id: str  # empty: the engine makes one
    prompt: str | Int32[np.ndarray, " S"]
    sampling: SamplingParams
    stream: bool


def read_request(request: pb.GenerateRequest) -> GenerateCall:
    """Check and convert one request. Raises RequestError that names the first field that cannot be served."""
    used = _used_fields(request, REQUEST_RULES)
    return GenerateCall(
        request_id=request.request_id,
        prompt=_read_prompt(request),
        sampling=_read_sampling(used.get("sampling_params", pb.SamplingParams())),
        stream=request.stream,
    )


def _read_prompt(request: pb.GenerateRequest) -> str | Int32[np.ndarray, " S"]:
    kind = request.WhichOneof("input")
    if kind is None:
        raise RequestError("input", None, "is missing; set text or tokenized.input_ids")
    if kind == "text":
        if not request.text:
            raise RequestError("text", "", "must not be empty; send at least one character or use tokenized.input_ids")
        return request.text
    _used_fields(request.tokenized, TOKENIZED_RULES)
    ids = np.array(request.tokenized.input_ids, np.uint32)
    if ids.size == 0:
        raise RequestError("input_ids", [], "must not be empty; send at least one token id")
    if ids.max() > MAX_TOKEN_ID:
        raise RequestError("input_ids", int(ids.max()), "is outside the vocabulary; send ids of the served tokenizer")
    return ids.astype(np.int32)


def _read_sampling(message: pb.SamplingParams) -> SamplingParams:
    values = _used_fields(message, SAMPLING_RULES)
    if "stop_token_ids" in values:
        values["stop_token_ids"] = tuple(values["stop_token_ids"])
    return SamplingParams(**values)


def _used_fields(message: Message, rules: Mapping[str, Rule]) -> dict[str, Any]:
    """Fields of `message` that are set and used, by name. A field without a rule counts as refused."""
    used: dict[str, Any] = {}
    for field, value in message.ListFields():
        match rules.get(field.name, Refuse()):
            case Use():
                used[field.name] = value
            case Refuse() as rule if value not in rule.off:
                raise RequestError(field.name, _shown(value), f"is not supported yet; {rule.remedy}",
                                   Status.UNIMPLEMENTED)
    return used


def _shown(value: Any) -> Any:
    """A value short enough for an error message."""
    if isinstance(value, int | float):
        return value
    if isinstance(value, Message):
        value = f"<{value.DESCRIPTOR.name}>"
    elif not isinstance(value, str):  # repeated and map fields
        value = f"<{len(value)} {'entry' if len(value) == 1 else 'entries'}>"
    return value if len(value) <= 60 else value[:57] + "..."


# --- the other way -----------------------------------------------------------------------------------------------


def write_sampling(sampling: SamplingParams) -> pb.SamplingParams:
    """The message such that a server that reads it gets `sampling` back (floats rounded to 32 bits)."""
    values = {f.name: getattr(sampling, f.name) for f in dataclasses.fields(sampling)}
    return pb.SamplingParams(**{name: value for name, value in values.items() if value is not None})


def write_chunk(delta: Delta) -> pb.GenerateResponse:
    """One streamed chunk: `completion_tokens` counts the tokens of this chunk alone."""
    return pb.GenerateResponse(chunk=pb.GenerateStreamChunk(
        token_ids=delta.token_ids.tolist(),
        prompt_tokens=delta.prompt_tokens,
        completion_tokens=len(delta.token_ids),
        cached_tokens=delta.cached_tokens,
    ))


def write_complete(last: Delta, output_ids: Int32[np.ndarray, " n"]) -> pb.GenerateResponse:
    """The closing message. `output_ids`: the last delta's when streaming (clients add up chunks), else every id.

    `completion_tokens` counts the whole request in both cases.
    """
    if last.finish_reason is None:
        raise ValueError("the last delta of a request has no finish_reason")
    complete = pb.GenerateComplete(
        output_ids=output_ids.tolist(),
        finish_reason=str(last.finish_reason),
        prompt_tokens=last.prompt_tokens,
        completion_tokens=last.completion_tokens,
        cached_tokens=last.cached_tokens,
    )
    if last.matched_token_id is not None:
        complete.matched_token_id = last.matched_token_id
    return pb.GenerateResponse(complete=complete)
