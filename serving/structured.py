"""Constraints on the form of an output (a JSON schema, a regular expression, a grammar, choices), by llguidance.

A constraint is checked and compiled on the caller's thread when the request arrives. Then the engine asks for the
mask of the next token and tells which one was drawn.
"""

from __future__ import annotations

import collections
import json
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt32
from llguidance import LLMatcher, LLTokenizer

from widemesh.serving.request import RequestError, SamplingParams
from widemesh.serving.sampling import mask_words

_MAX_MESSAGE_CHARS = 200
_MAX_KEPT = 64  # compiled constraints


class ConstraintError(RuntimeError):
    """A constraint that cannot go on, though its tokens followed it. The message says why."""


class Constraint:
    """Where one output stands in its grammar. For one thread at a time."""

    def __init__(self, matcher: LLMatcher, words: int, mask: UInt32[np.ndarray, "W"] | None = None):
        """At the matcher's place; `mask` is the one of that place, if it is known. Raises ConstraintError."""
        self._matcher, self._words = matcher, words
        self.mask = self._next_mask() if mask is None else mask

    @property
    def is_done(self) -> bool:
        """Whether no token can follow but the end."""
        return self._matcher.is_stopped()

    def advance(self, token: int) -> None:
        """Take the next token of the output and compute the mask after it. Raises ConstraintError."""
        if not self._matcher.consume_token(token):
            raise ConstraintError(f"token {token} does not fit the constraint ({_reason(self._matcher)})")
        if not self._matcher.is_stopped():
            self.mask = self._next_mask()

    def fork(self) -> Constraint:
        """The same place in the same grammar, to go on from there independently."""
        return Constraint(self._matcher.deep_copy(), self._words, self.mask)

    def _next_mask(self) -> UInt32[np.ndarray, "W"]:
        # llguidance may append a word without tokens.
        mask = np.frombuffer(self._matcher.compute_bitmask(), "<u4")[: self._words].astype(np.uint32)
        if self._matcher.is_error():
            raise ConstraintError(_reason(self._matcher))
        if not mask.any():
            raise ConstraintError("no token of the vocabulary can follow")
        return mask


class ConstraintCompiler:
    """Makes constraints for one tokenizer, and keeps the latest ones: many requests bring the same schema.

    Thread-safe; reads the tokenizer when the first constraint is asked for.
    """

    def __init__(self, folder: str | Path, vocab: int, eos_token_ids: Iterable[int]):
        self._folder, self._vocab, self._eos = Path(folder), vocab, list(eos_token_ids)
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._made: collections.OrderedDict[tuple[str, Any], Constraint] = collections.OrderedDict()

    def compile(self, sampling: SamplingParams) -> Constraint | None:
        """The constraint that `sampling` asks for, if any. Raises RequestError if none can be made of it.

        A grammar that is new may take a second.
        """
        field = sampling.constraint
        if field is None:
            return None
        value = getattr(sampling, field)
        key = field, tuple(value) if field == "choice" else value
        with self._lock:
            made = self._made.get(key)
            if made is not None:
                self._made.move_to_end(key)
                return made.fork()
        made = self._make(*key)
        with self._lock:
            self._made[key] = made
            while len(self._made) > _MAX_KEPT:
                self._made.popitem(last=False)
            return made.fork()

    def _make(self, field: str, value: Any) -> Constraint:
        try:
            matcher = LLMatcher(self._shared_tokenizer(), _grammar(field, value), log_level=0)
            if matcher.is_error():
                raise ConstraintError(_reason(matcher))
            return Constraint(matcher, mask_words(self._vocab))
        except (ValueError, ConstraintError) as err:
            shown = value[:57] + "..." if isinstance(value, str) and len(value) > 60 else value
            raise RequestError(field, shown, f"cannot be followed ({_one_line(str(err))}); correct it") from None

    def _shared_tokenizer(self) -> LLTokenizer:
        with self._lock:
            if self._tokenizer is None:
                path = self._folder / "tokenizer.json"
                self._tokenizer = LLTokenizer(str(path), n_vocab=self._vocab, eos_token=self._eos)
            return self._tokenizer


def _grammar(field: str, value: Any) -> str:
    """llguidance's form of a constraint. Raises ValueError for what is not even JSON."""
    match field:
        case "json_schema":
            return LLMatcher.grammar_from_json_schema(value)
        case "json_object":
            return LLMatcher.grammar_from_json_schema('{"type": "object"}')
        case "regex":
            return LLMatcher.grammar_from_regex(value)
        case "choice":
            # Lark takes JSON's strings, but no raw DEL in them.
            quoted = (json.dumps(one, ensure_ascii=False).replace("\x7f", "\\u007f") for one in value)
            return LLMatcher.grammar_from_lark("start: " + " | ".join(quoted))
        case _:
            return LLMatcher.grammar_from_lark(value)


def _reason(matcher: LLMatcher) -> str:
    return _one_line(matcher.get_error() or matcher.stop_reason())


def _one_line(text: str) -> str:
    return " ".join(text.split())[:_MAX_MESSAGE_CHARS]
