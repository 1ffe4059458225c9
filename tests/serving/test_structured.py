"""Constraints: masks that follow the grammar, forks that go their own way, refusals that name the field."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from widemesh.serving.request import RequestError, SamplingParams
from widemesh.serving.structured import Constraint, ConstraintCompiler, ConstraintError
from widemesh.serving.tokens import load_tokenizer

V, EOS = 512, 1


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Path) -> Tokenizer:
    return load_tokenizer(checkpoint)


@pytest.fixture(scope="module")
def compiler(checkpoint: Path) -> ConstraintCompiler:
    return ConstraintCompiler(checkpoint, V, [EOS])


def allowed(constraint: Constraint) -> set[int]:
    bits = np.unpackbits(constraint.mask.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def make(compiler: ConstraintCompiler, **setting) -> Constraint:
    constraint = compiler.compile(SamplingParams(**setting))
    assert constraint is not None
    return constraint


def test_masks_follow_the_grammar(tokenizer: Tokenizer, compiler: ConstraintCompiler) -> None:
    a, b = (tokenizer.token_to_id(char) for char in "ab")
    constraint = make(compiler, regex="ab?")
    assert constraint.mask.shape == (16,) and constraint.mask.dtype == np.uint32
    assert allowed(constraint) == {a}
    constraint.advance(a)
    assert allowed(constraint) == {b, EOS} and not constraint.is_done
    constraint.advance(b)
    assert constraint.is_done


def test_the_end_token_ends_it(tokenizer: Tokenizer, compiler: ConstraintCompiler) -> None:
    constraint = make(compiler, regex="ab?")
    constraint.advance(tokenizer.token_to_id("a"))
    constraint.advance(EOS)
    assert constraint.is_done


def test_a_token_outside_the_mask_is_an_error(tokenizer: Tokenizer, compiler: ConstraintCompiler) -> None:
    with pytest.raises(ConstraintError, match="does not fit the constraint"):
        make(compiler, regex="ab?").advance(tokenizer.token_to_id("b"))


def test_requests_with_one_grammar_go_their_own_ways(tokenizer: Tokenizer, compiler: ConstraintCompiler) -> None:
    """Also after one of them has failed."""
    a = tokenizer.token_to_id("a")
    first, second = make(compiler, regex="aaa"), make(compiler, regex="aaa")
    first.advance(a)
    fork = first.fork()
    with pytest.raises(ConstraintError):
        first.advance(EOS)
    fork.advance(a)
    fork.advance(a)
    second.advance(a)
    assert fork.is_done and not second.is_done
    assert a in allowed(make(compiler, regex="aaa"))


@pytest.mark.parametrize("text", ["left", "é日", 'a"b', "back\\slash", "line\nbreak", "🙂", "a\x7fb"])
def test_choices_are_taken_literally(tokenizer: Tokenizer, compiler: ConstraintCompiler, text: str) -> None:
    constraint = make(compiler, choice=(text, "other"))
    for token in tokenizer.encode(text, add_special_tokens=False).ids:
        assert token in allowed(constraint)
        constraint.advance(token)
    assert constraint.is_done


def test_json(tokenizer: Tokenizer, compiler: ConstraintCompiler) -> None:
    schema = json.dumps({"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"],
                         "additionalProperties": False})  # fmt: skip
    for setting, text in (({"json_schema": schema}, '{"a": 1}'), ({"json_object": True}, '{"b": [null]}')):
        constraint = make(compiler, **setting)
        for token in tokenizer.encode(text, add_special_tokens=False).ids:
            constraint.advance(token)
        assert constraint.is_done
    with pytest.raises(ConstraintError):
        constraint = make(compiler, json_object=True)
        constraint.advance(tokenizer.token_to_id("["))


def test_without_a_constraint_there_is_none(compiler: ConstraintCompiler) -> None:
    assert compiler.compile(SamplingParams()) is None


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"regex": "a("}, "regex='a(' cannot be followed ("),
        ({"json_schema": "{"}, "json_schema='{' cannot be followed ("),
        ({"json_schema": '{"type": "nothing"}'}, "cannot be followed ("),
        ({"json_schema": ""}, "json_schema='' cannot be followed ("),
        ({"grammar": "begin: x"}, "grammar='begin: x' cannot be followed ("),
        ({"grammar": "start: /a/ & /b/"}, "cannot be followed ("),
        ({"regex": "(" * 5000}, "(((...' cannot be followed ("),
    ],
)
def test_an_impossible_constraint_is_refused(compiler: ConstraintCompiler, setting: dict, words: str) -> None:
    for _ in range(2):  # a failure is not kept
        with pytest.raises(RequestError) as caught:
            compiler.compile(SamplingParams(**setting))
        assert words in str(caught.value)
        assert len(str(caught.value)) < 350 and "\n" not in str(caught.value)


def test_only_the_latest_are_kept(compiler: ConstraintCompiler) -> None:
    for number in range(70):
        make(compiler, regex=f"a{{{number + 1}}}")
    assert len(compiler._made) == 64
