"""Protocol messages to what the engine takes, and back. One table says what becomes of every field.

A field is *used*, *granted* (it asks for what is done anyhow), *left to the client* (it is about showing text, which
clients do), or *refused*: a field that is set and not supported is never ignored. Unset fields, and zero in fields
that cannot tell zero from unset, take the default of `SamplingParams`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from google.protobuf.message import Message
from jaxtyping import Int32
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from widemesh.serving.request import Delta, RequestError, SamplingParams, Status, TokenLogprobs

MAX_TOKEN_ID = 2**31 - 1
PRIORITY_KEY = "x-priority"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Use:
    """The field is read."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Granted:
    """The field asks for what every request gets."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForClient:
    """The field asks for nothing of the engine: it is about text, and clients detokenise."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Refuse:
    """The field is not supported: UNIMPLEMENTED if it is set, unless to one of the values that switch it off."""

    off: tuple[Any, ...] = ()
    remedy: str = "leave it unset"


Rule = Use | Granted | ForClient | Refuse

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
    "skip_special_tokens": Use(),  # in the search for `stop`; shown text is the client's
    "spaces_between_special_tokens": ForClient(),
    "n": Use(),
    "min_p": Use(),
    "frequency_penalty": Use(),
    "presence_penalty": Use(),
    "repetition_penalty": Use(),
    "min_tokens": Use(),
    "stop": Use(),
    "include_stop_str_in_output": Use(),
    "logprobs": Use(),
    "prompt_logprobs": Use(),
    "logit_bias": Use(),
    "truncate_prompt_tokens": Refuse(remedy="shorten the prompt in the client"),
    "json_schema": Use(),
    "regex": Use(),
    "grammar": Use(),
    "structural_tag": Refuse(remedy="use json_schema, regex or grammar"),
    "json_object": Use(),
    "choice": Use(),
    "grammar_from_first_token": Granted(),
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


def read_priority(metadata: Iterable[tuple[str, str | bytes]] | None) -> int:
    """Priority of a call, from its metadata `x-priority`: the protocol has no field for it. Lower goes first."""
    for key, value in metadata or ():
        if key == PRIORITY_KEY:
            try:
                return int(value)
            except ValueError:
                remedy = "must be a whole number; lower goes first, 0 is usual"
                raise RequestError(PRIORITY_KEY, value, remedy) from None
    return 0


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
    for name in ("stop_token_ids", "stop"):
        if name in values:
            values[name] = tuple(values[name])
    if "logit_bias" in values:
        values["logit_bias"] = dict(values["logit_bias"])
    if "choice" in values:
        values["choice"] = tuple(values["choice"].choices)
        if not values["choice"]:
            raise RequestError("choice", [], "must hold at least one string, or be left unset")
    values.pop("skip_special_tokens", None)
    if "stop" in values:  # without, the field says nothing to the engine, and false cannot be told from unset
        values["skip_special_tokens"] = message.skip_special_tokens
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
    """The message such that a server that reads it gets `sampling` back: floats rounded to 32 bits, and without
    `skip_special_tokens` if there are no stop strings.
    """
    values = {f.name: getattr(sampling, f.name) for f in dataclasses.fields(sampling)}
    choice = values.pop("choice")
    if not values["json_object"]:  # the field shares its place with the other constraints
        del values["json_object"]
    message = pb.SamplingParams(**{name: value for name, value in values.items() if value is not None})
    if choice:
        message.choice.choices.extend(choice)
    return message


def write_chunk(delta: Delta, prompt: Int32[np.ndarray, " S"]) -> pb.GenerateResponse:
    """One streamed chunk: `completion_tokens` counts the tokens of this chunk alone. `prompt` is the request's."""
    return pb.GenerateResponse(chunk=pb.GenerateStreamChunk(
        token_ids=delta.token_ids.tolist(),
        prompt_tokens=delta.prompt_tokens,
        completion_tokens=len(delta.token_ids),
        cached_tokens=delta.cached_tokens,
        output_logprobs=_write_logprobs(delta),
        input_logprobs=_write_prompt_logprobs(delta, prompt),
        index=delta.index,
    ))


def write_complete(last: Delta, prompt: Int32[np.ndarray, " S"]) -> pb.GenerateResponse:
    """The closing message of one sample. `last` is its last delta when streaming (clients add up chunks), else all
    its deltas in one. `completion_tokens` counts the whole sample in both cases. `prompt` is the request's.
    """
    if last.finish_reason is None:
        raise ValueError("the last delta of a request has no finish_reason")
    complete = pb.GenerateComplete(
        output_ids=last.token_ids.tolist(),
        finish_reason=str(last.finish_reason),
        prompt_tokens=last.prompt_tokens,
        completion_tokens=last.completion_tokens,
        cached_tokens=last.cached_tokens,
        output_logprobs=_write_logprobs(last),
        input_logprobs=_write_prompt_logprobs(last, prompt),
        index=last.index,
    )
    if last.matched_token_id is not None:
        complete.matched_token_id = last.matched_token_id
    if last.matched_stop is not None:
        complete.matched_stop_str = last.matched_stop
    return pb.GenerateResponse(complete=complete)


def _write_logprobs(delta: Delta) -> pb.OutputLogProbs | None:
    """One value per token, and one list of the most likely ones per token."""
    if delta.logprobs is None:
        return None
    return pb.OutputLogProbs(
        token_logprobs=delta.logprobs.chosen.tolist(),
        token_ids=delta.token_ids.tolist(),
        top_logprobs=_write_top(delta.logprobs),
    )


def _write_prompt_logprobs(delta: Delta, prompt: Int32[np.ndarray, " S"]) -> pb.InputLogProbs | None:
    """One entry per token of the prompt; the first token's are empty, since nothing comes before it."""
    if delta.prompt_logprobs is None:
        return None
    return pb.InputLogProbs(
        token_logprobs=[pb.InputTokenLogProb(),
                        *(pb.InputTokenLogProb(value=value) for value in delta.prompt_logprobs.chosen.tolist())],
        token_ids=prompt.tolist(),
        top_logprobs=[pb.TopLogProbs(), *_write_top(delta.prompt_logprobs)],
    )  # fmt: skip


def _write_top(logprobs: TokenLogprobs) -> list[pb.TopLogProbs]:
    return [
        pb.TopLogProbs(values=values.tolist(), token_ids=ids.tolist())
        for values, ids in zip(logprobs.top, logprobs.top_ids, strict=True)
    ]
