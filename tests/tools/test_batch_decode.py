"""`widemesh generate --file`: order, ids, overrides, and bad lines that cost no other its result."""

from __future__ import annotations

import errno
import io
import json
import os
from types import SimpleNamespace

import numpy as np
import pytest

from widemesh.serving.config import EngineConfig
from widemesh.serving.request import Delta, FinishReason, RequestError, SamplingParams, TokenLogprobs
from widemesh.serving.tokens import load_tokenizer
from widemesh.tools.batch_decode import decode_file, parse_line
from widemesh.tools.cli import main

VOCAB = 512


def decode(folder, tmp_path, lines, *args):
    """Run the command on lines (objects, or raw bytes); returns its status and the parsed output."""
    file, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    file.write_bytes(b"\n".join(x if isinstance(x, bytes) else json.dumps(x).encode() for x in lines))
    status = main(["generate", "--model", str(folder), "--file", str(file), "--out", str(out), *args])
    return status, [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]


def test_results_come_in_order_with_ids(byte_folder, tmp_path, fake_engine, expected_tokens):
    made = fake_engine()
    lines = [
        {"prompt_token_ids": [i], "max_tokens": 1 + i % 5, **({"id": f"n{i}"} if i % 2 else {})} for i in range(3, 43)
    ]
    status, out = decode(byte_folder, tmp_path, lines, "--engine.max-num-seqs", "4", "--temperature", "0")
    assert status == 0
    assert [line["id"] for line in out] == [f"n{i}" if i % 2 else i - 2 for i in range(3, 43)]
    assert [line["token_ids"] for line in out] == [expected_tokens([i], 1 + i % 5, VOCAB) for i in range(3, 43)]
    assert all(line["finish_reason"] == "length" for line in out)
    assert made.configs[0].max_num_seqs == 4 and made.engines[0].asked[0][2].is_greedy
    assert not made.engines[0].is_alive  # closed


def test_text_is_decoded_without_special_and_stop_tokens(byte_folder, tmp_path, fake_engine):
    from widemesh.serving.tokens import load_tokenizer

    ids = load_tokenizer(byte_folder).encode("sea 😀!").ids
    fake_engine(script=[*ids[:-1], 1, ids[-1]])
    _, out = decode(byte_folder, tmp_path, [{"prompt": "go", "stop_token_ids": [ids[-1]], "id": None}])
    assert (out[0]["text"], out[0]["finish_reason"], out[0]["id"]) == ("sea 😀", "stop", None)


def test_bad_lines_cost_no_other_its_result(byte_folder, tmp_path, fake_engine, capsys):
    fake_engine()
    lines = [
        {"prompt": "the", "max_tokens": 1},
        b"{not json",
        b"\xff\xfe",
        b"[1]",
        b"",  # a blank line is no line
        {"id": "u", "prompt": "a", "temprature": 1},
        {"id": "both", "prompt": "a", "prompt_token_ids": [1]},
        {"id": "none"},
        {"id": "range", "prompt_token_ids": [512]},
        {"id": "huge", "prompt_token_ids": [2**40]},
        {"id": "kind", "prompt": "a", "max_tokens": "three"},
        {"id": "value", "prompt": "a", "temperature": -1},
        {"id": "long", "prompt_token_ids": [1] * 2000},
        {"id": "half\ud800", "prompt": "a\ud800"},
        b'{"id": NaN, "prompt": "a"}',
        b'{"id": [1e999], "prompt": "a"}',
        {"prompt": "the", "max_tokens": 1, "id": "last"},
    ]
    status, out = decode(byte_folder, tmp_path, lines)
    assert status == 0
    assert [line["id"] for line in out] == [
        1, 2, 3, 4, "u", "both", "none", "range", "huge", "kind", "value", "long", "half\ud800", 15, 16, "last"]
    words = ["is not valid JSON", "is not valid JSON", "must be a JSON object", "temprature=1 is no known field",
             "and not both", "must be there, or prompt_token_ids", "input_ids=512", "prompt_token_ids=1099511627776",
             "max_tokens='three' must be of type int", "temperature=-1.0 must be", "2000 tokens are too many",
             "lone surrogates", "id=nan cannot be written as JSON; use text or a whole number",
             "id=[inf] cannot be written as JSON"]  # fmt: skip
    for line, expected in zip(out[1:-1], words, strict=True):
        assert expected in line["error"] and set(line) == {"id", "error"}
    assert out[0]["finish_reason"] == out[-1]["finish_reason"] == "length"
    assert "14 of 16 lines have an \"error\"" in capsys.readouterr().err


def test_an_engine_that_dies_keeps_what_was_done(byte_folder, tmp_path, fake_engine, capsys):
    fake_engine(die_after=3)
    lines = [{"prompt_token_ids": [5], "max_tokens": 2}] * 6
    status, out = decode(byte_folder, tmp_path, lines, "--engine.max-num-seqs", "4")
    assert status == 2
    assert [("error" in line) for line in out] == [False] * 3 + [True] * 3
    assert "the engine stopped" in out[-1]["error"] and "the engine stopped" in capsys.readouterr().err


def test_a_full_disk_ends_the_run_with_its_own_error(byte_folder, fake_engine):
    class Full(io.StringIO):
        def write(self, text):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    engine = fake_engine().build(EngineConfig(model=str(byte_folder)))
    lines = [(number, b'{"prompt_token_ids": [5], "max_tokens": 2}') for number in range(6)]
    with pytest.raises(OSError, match="No space left on device"):  # not in a group
        decode_file(engine, lines, Full(), SamplingParams())


def test_a_request_that_the_engine_cannot_finish_is_an_error(byte_folder, tmp_path, fake_engine, capsys):
    fake_engine(err_after=2)
    status, out = decode(byte_folder, tmp_path, [{"prompt_token_ids": [5], "max_tokens": n} for n in (1, 4, 2)])
    assert status == 0
    assert [line.get("finish_reason", line.get("error")) for line in out] == [
        "length", "the engine could not finish this line; its log says why", "length"]
    assert "1 of 3 lines have an \"error\"" in capsys.readouterr().err


def test_the_text_is_without_the_token_that_ended_it(byte_folder, tmp_path, fake_engine):
    """Also where special tokens are shown."""
    fake_engine(script=[70, 71, 72])
    lines = [{"prompt_token_ids": [5], "stop_token_ids": [72], "skip_special_tokens": False},
             {"prompt_token_ids": [5], "max_tokens": 2}]  # fmt: skip
    _, (stopped, short) = decode(byte_folder, tmp_path, lines)
    assert stopped["token_ids"] == [70, 71, 72] and stopped["text"] == short["text"] != ""


def test_the_output_appears_whole_or_not_at_all(byte_folder, tmp_path, fake_engine, monkeypatch, capsys):
    made = fake_engine()
    out = tmp_path / "out.jsonl"
    out.write_text("old")
    file = tmp_path / "in.jsonl"
    file.write_text('{"prompt": "a"}')
    args = ["generate", "--file", str(file), "--out", str(out), "--model"]
    assert main([*args, "/no/such"]) == 2
    assert out.read_text() == "old" and sorted(p.name for p in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]
    assert main(["generate", "--file", str(file), "--model", "x", "--out", str(tmp_path / "no" / "out")]) == 2
    assert "its folder does not exist; make it first" in capsys.readouterr().err and len(made.engines) == 0
    assert main([*args, str(byte_folder), "--max-tokens", "2"]) == 0
    assert json.loads(out.read_text())["finish_reason"] == "length"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


def test_an_empty_file_gives_an_empty_file(byte_folder, tmp_path, fake_engine):
    fake_engine()
    assert decode(byte_folder, tmp_path, [b"", b"  "]) == (0, [])


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"temperature": 1}, SamplingParams(temperature=1.0)),
        ({"seed": None, "max_tokens": None}, SamplingParams()),
        ({"stop_token_ids": [1, 2], "ignore_eos": True}, SamplingParams(stop_token_ids=(1, 2), ignore_eos=True)),
        ({"stop": ["a", "b"], "regex": "x"}, SamplingParams(stop=("a", "b"), regex="x")),
        ({"logit_bias": {"3": 1, "4": -2.5}, "min_p": 0}, SamplingParams(logit_bias={3: 1.0, 4: -2.5})),
    ],
)
def test_overrides_of_a_line(fields, expected):
    _, sampling = parse_line(json.dumps({"prompt": "a", **fields}).encode(), SamplingParams(seed=5, max_tokens=7))
    defaults = {"seed": 5, "max_tokens": 7}
    assert sampling == SamplingParams(**{**defaults, **{k: getattr(expected, k) for k in fields}})


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"n": 2}, "n=2 is not offered in a file"),
        ({"stop": "a"}, "stop='a' must be of type tuple"),
        ({"stop": [1]}, "stop=1 must be of type str"),
        ({"logit_bias": {"x": 1}}, "logit_bias={'x': 1} must be of type"),
        ({"logit_bias": {"3": "1"}}, "logit_bias='1' must be of type float"),
        ({"regex": 5}, "regex=5 must be of type str"),
    ],
)
def test_what_a_line_cannot_ask_for(fields, words):
    with pytest.raises(RequestError, match=f"^{words}"):
        parse_line(json.dumps({"prompt": "a", **fields}).encode(), SamplingParams())


def test_text_ends_before_a_stop_string_and_logprobs_are_written(byte_folder):
    tokenizer = load_tokenizer(byte_folder)
    ids = [tokenizer.token_to_id(char) for char in "abbc"]

    async def stream(prompt, sampling):
        for count, token in enumerate(ids, 1):
            logprobs = TokenLogprobs(chosen=np.array([-count / 2]), ranks=np.array([1]), top_ids=np.array([[7, 9]]),
                                     top=np.array([[-0.5, -1.5]]))  # fmt: skip
            yield Delta(request_id="r", token_ids=np.array([token]), logprobs=logprobs,
                        prompt_logprobs=logprobs if count == 1 else None,
                        finish_reason=FinishReason.STOP if count == 4 else None)  # fmt: skip

    engine = SimpleNamespace(tokenizer=tokenizer, is_alive=True, config=SimpleNamespace(max_num_seqs=1), stream=stream)
    out, line = io.StringIO(), {"prompt": "go", "stop": ["bc"], "logprobs": 2}
    assert decode_file(engine, [(1, json.dumps(line).encode())], out, SamplingParams()).failed == 0
    result = json.loads(out.getvalue())
    assert (result["text"], result["token_ids"], result["finish_reason"]) == ("ab", ids, "stop")
    assert result["logprobs"] == [-0.5, -1.0, -1.5, -2.0]
    assert result["top_logprobs"] == [{"7": -0.5, "9": -1.5}] * 4
    assert (result["prompt_logprobs"], result["prompt_top_logprobs"]) == ([-0.5], [{"7": -0.5, "9": -1.5}])


@pytest.mark.parametrize("value", ["true", "1.5", '"1"', "[1]", "1e999", "NaN"])
def test_wrong_kinds_are_refused(value):
    field = "temperature" if value in ("1e999", "NaN") else "max_tokens"
    with pytest.raises(RequestError, match=f"^{field}="):
        parse_line(f'{{"prompt": "a", "{field}": {value}}}'.encode(), SamplingParams())


@pytest.fixture
def expected_tokens():
    return lambda ids, count, vocab: [(sum(ids) + k) % vocab for k in range(count)]
