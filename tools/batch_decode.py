"""A file of prompts through an engine, without a server: JSON lines in, JSON lines out in the same order.

A line that cannot be served gets an "error" in its place; it never costs the others theirs.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np
from jaxtyping import Int32

from widemesh.serving.request import Delta, FinishReason, RequestError, SamplingParams
from widemesh.serving.stop_strings import StopText

if TYPE_CHECKING:
    from widemesh.serving.engine import Engine

MAX_TOKEN_ID = 2**31 - 1
_SAMPLING_KINDS = {field.name: str(field.type) for field in dataclasses.fields(SamplingParams)}
_KNOWN = ("id", "prompt", "prompt_token_ids", *_SAMPLING_KINDS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a file went."""

    lines: int
    failed: int  # lines with an "error"
    fatal: str = ""  # why the engine stopped before the end; empty when it did not


def read_lines(path: Path) -> list[tuple[int, bytes]]:
    """Number (from 1) and bytes of every line that is not blank. Raises OSError."""
    return [(number, line) for number, line in enumerate(path.read_bytes().split(b"\n"), 1) if line.strip()]


def parse_line(line: bytes, defaults: SamplingParams) -> tuple[str | Int32[np.ndarray, " S"], SamplingParams]:
    """Prompt and sampling of one line. Raises RequestError that names the field."""
    fields = _parse_object(line)
    unknown = [name for name in fields if name not in _KNOWN]
    if unknown:
        raise RequestError(unknown[0], fields[unknown[0]], f"is no known field; use {', '.join(_KNOWN)}")
    if ("prompt" in fields) == ("prompt_token_ids" in fields):
        raise RequestError("prompt", fields.get("prompt"), "must be there, or prompt_token_ids, and not both")
    overrides = {name: _coerce(name, fields[name], kind) for name, kind in _SAMPLING_KINDS.items() if name in fields}
    sampling = dataclasses.replace(defaults, **overrides)
    if sampling.n > 1:
        raise RequestError("n", sampling.n, "is not offered in a file of prompts; repeat the line with other seeds")
    if "prompt" in fields:
        prompt = fields["prompt"]
        if not isinstance(prompt, str) or not prompt:
            raise RequestError("prompt", prompt, "must be text of at least one character")
        return prompt, sampling
    ids = _coerce("prompt_token_ids", fields["prompt_token_ids"], "tuple[int, ...]")
    for i in ids:
        if not 0 <= i <= MAX_TOKEN_ID:
            raise RequestError("prompt_token_ids", i, "is outside the vocabulary; use ids of the model's tokenizer")
    return np.array(ids, np.int32), sampling


def decode_file(
    engine: Engine, lines: list[tuple[int, bytes]], out: TextIO, sampling: SamplingParams, *,
    on_line: Callable[[], None] = lambda: None,
) -> Outcome:
    """Decode every line and write the results to `out` in order; `on_line` is called as each line is done.

    Raises OSError if `out` cannot be written.
    """
    return asyncio.run(_decode(engine, lines, out, sampling, on_line))


async def _decode(
    engine: Engine, lines: list[tuple[int, bytes]], out: TextIO, sampling: SamplingParams, on_line: Callable[[], None]
) -> Outcome:
    results: dict[int, dict[str, Any]] = {}
    pending: Iterator[tuple[int, tuple[int, bytes]]] = iter(enumerate(lines))
    num_written = failed = 0
    fatal = ""

    async def work() -> None:
        nonlocal num_written, failed, fatal
        for index, (number, line) in pending:  # one shared iterator: each line goes to one worker
            result: dict[str, Any] = {"id": _line_id(line, number)}
            try:
                if fatal:
                    raise RuntimeError(fatal)
                result.update(await _decode_line(engine, line, sampling))
            except Exception as err:  # whatever it is, it is this line's alone
                if not isinstance(err, RequestError) and not engine.is_alive:
                    fatal = fatal or f"the engine stopped ({err})"
                result["error"] = str(err) or type(err).__name__
                failed += 1
            results[index] = result
            while num_written in results:
                out.write(_dump(results.pop(num_written)) + "\n")
                num_written += 1
            on_line()

    # Twice as many as run at once, so that the next ones are ready when a slot falls free.
    unwritten: Exception | None = None
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(len(lines), 2 * engine.config.max_num_seqs)):
                group.create_task(work())
    except* OSError as errors:
        unwritten = errors.exceptions[0]
    if unwritten is not None:  # out of its group: it is a sentence for the user
        raise unwritten
    return Outcome(lines=len(lines), failed=failed, fatal=fatal)


async def _decode_line(engine: Engine, line: bytes, defaults: SamplingParams) -> dict[str, Any]:
    prompt, sampling = parse_line(line, defaults)
    deltas: list[Delta] = []
    async with contextlib.aclosing(engine.stream(prompt, sampling)) as stream:
        async for delta in stream:
            deltas.append(delta)
    whole = Delta.join(deltas)
    if whole.finish_reason is FinishReason.ERROR:
        raise RuntimeError("the engine could not finish this line; its log says why")
    text = StopText(engine.tokenizer, sampling)
    text.feed(whole.shown_ids.tolist())
    text.flush()
    result = {"text": text.text, "token_ids": whole.token_ids.tolist(), "finish_reason": str(whole.finish_reason)}
    for before, logprobs in (("", whole.logprobs), ("prompt_", whole.prompt_logprobs)):
        if logprobs is not None:
            result[f"{before}logprobs"] = logprobs.chosen.tolist()
            result[f"{before}top_logprobs"] = [
                dict(zip(ids, values, strict=True))
                for ids, values in zip(logprobs.top_ids.tolist(), logprobs.top.tolist(), strict=True)
            ]
    return result


def _parse_object(line: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as err:  # UnicodeDecodeError is one
        raise RequestError("line", line[:40].decode(errors="replace"), f"is not valid JSON ({err})") from None
    if not isinstance(fields, dict):
        raise RequestError("line", str(fields)[:40], 'must be a JSON object such as {"prompt": "Hello"}')
    try:
        json.dumps(fields.get("id"), allow_nan=False)  # it is written out again
    except (ValueError, RecursionError):
        raise RequestError("id", fields["id"], "cannot be written as JSON; use text or a whole number") from None
    return fields


def _line_id(line: bytes, number: int) -> Any:
    """The line's own "id", or its number."""
    try:
        return _parse_object(line).get("id", number)
    except RequestError:
        return number


def _coerce(name: str, value: Any, kind: str) -> Any:
    """Check one JSON value against the declared type of a field. Integers are accepted for floats, lists for tuples."""
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if value is None and kind.endswith("None"):
        return None
    if kind.startswith("int") and is_int:
        return value
    if kind == "float" and (is_int or isinstance(value, float)):
        return float(value) if abs(value) < 1e300 else float("inf")
    if kind == "bool" and isinstance(value, bool):
        return value
    if kind.startswith("str") and isinstance(value, str):
        return value
    if kind in ("tuple[int, ...]", "tuple[str, ...]") and isinstance(value, list):
        return tuple(_coerce(name, item, kind[6:9]) for item in value)
    if kind.startswith("Mapping[int, float]") and isinstance(value, dict) and all(k.isdecimal() for k in value):
        return {int(key): _coerce(name, item, "float") for key, item in value.items()}
    raise RequestError(name, value, f"must be of type {kind}")


def _dump(result: dict[str, Any]) -> str:
    text = json.dumps(result, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # an "id" with half a surrogate pair: only escapes can carry it
        return json.dumps(result)
    return text
