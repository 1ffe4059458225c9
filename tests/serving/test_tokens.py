"""Loading a tokenizer, the rules for a prompt's first token, and text that comes in pieces."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest

from widemesh.model.config import ConfigError
from widemesh.model.presets import PRESETS
from widemesh.model.tiny_tokenizer import tiny_tokenizer
from widemesh.serving.request import RequestError
from widemesh.serving.tokens import BROKEN, Detokenizer, encode_prompt, load_tokenizer

GOLDEN = Path(__file__).parents[1] / "golden" / "A"
TEXT = "Größe 你好，世界 😀👩‍👩‍👧 end"


@pytest.fixture(scope="module")
def byte_tokenizer():
    return tiny_tokenizer(PRESETS["tiny-mesh"])[0]


def test_loads_the_golden_tokenizer():
    tokenizer = load_tokenizer(GOLDEN)
    assert tokenizer.token_to_id("<bos>") == 0
    assert encode_prompt(tokenizer, "the", {}).tolist() == [3]


def test_truncation_and_padding_of_the_file_are_switched_off(tmp_path):
    content = json.loads((GOLDEN / "tokenizer.json").read_text())
    content["truncation"] = {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0}
    content["padding"] = {
        "strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 2, "pad_type_id": 0,
        "pad_token": "<pad>",
    }
    content["pre_tokenizer"] = {"type": "WhitespaceSplit"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert encode_prompt(load_tokenizer(tmp_path), "the cat", {}).tolist() == [3, 8]


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "does not exist"),
        ({"tokenizer.json": "{"}, "is no usable tokenizer"),
        ({"tokenizer.json": None, "tokenizer_config.json": "[1"}, "is not valid JSON"),
        pytest.param({"tokenizer.json": None, "tokenizer_config.json": "[" * 100_000}, "is not valid JSON", id="deep"),
        ({"tokenizer.json": None, "tokenizer_config.json": "[1]"}, "must hold a JSON object, not list"),
        ({"tokenizer.json": None, "tokenizer_config.json": '{"add_bos_token": true, "bos_token": "<s>"}'},
         "bos_token='<s>'"),
        ({"tokenizer.json": None, "tokenizer_config.json": '{"add_bos_token": true}'}, "bos_token=None"),
    ],
)
def test_a_broken_folder_is_named(tmp_path, files, words):
    for name, content in files.items():
        if content is None:
            shutil.copy(GOLDEN / name, tmp_path / name)
        else:
            (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match="tokenizer") as caught:
        load_tokenizer(tmp_path)
    assert words in str(caught.value)


@pytest.mark.parametrize("bos", ["<bos>", {"content": "<bos>", "special": True}])
def test_bos_is_prepended_only_on_demand_and_once(bos):
    tokenizer = load_tokenizer(GOLDEN)
    config = {"add_bos_token": True, "bos_token": bos}
    assert encode_prompt(tokenizer, "the", config).tolist() == [0, 3]
    assert encode_prompt(tokenizer, "<bos>the", config).tolist() == [0, 3]
    assert encode_prompt(tokenizer, "the", {**config, "add_bos_token": False}).tolist() == [3]
    assert encode_prompt(tokenizer, "the", {"bos_token": bos}).tolist() == [3]


def test_special_tokens_of_the_tokenizer_are_added(byte_tokenizer):
    from tokenizers import Tokenizer, processors

    tokenizer = Tokenizer.from_str(byte_tokenizer.to_str())
    bos = tokenizer.token_to_id("<bos>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", bos)])
    plain = encode_prompt(byte_tokenizer, "sea", {}).tolist()
    assert encode_prompt(tokenizer, "sea", {}).tolist() == [bos, *plain]
    assert encode_prompt(tokenizer, "sea", {"add_bos_token": True, "bos_token": "<bos>"}).tolist() == [bos, *plain]


def test_a_lone_surrogate_is_refused(byte_tokenizer):
    with pytest.raises(RequestError, match="surrogates"):
        encode_prompt(byte_tokenizer, "a\ud800", {})


@pytest.mark.parametrize("step", [1, 2, 5, 1000])
def test_characters_split_over_tokens_come_whole(byte_tokenizer, step):
    ids = encode_prompt(byte_tokenizer, TEXT, {}).tolist()
    assert len(ids) > len(TEXT)  # the emoji and most of the Chinese are several tokens each
    detokenizer = Detokenizer(byte_tokenizer)
    pieces = [detokenizer.feed(ids[i : i + step]) for i in range(0, len(ids), step)]
    assert not any(BROKEN in piece for piece in pieces)
    assert "".join(pieces) == TEXT
    assert detokenizer.flush() == ""


def test_an_unfinished_character_at_the_end_is_dropped(byte_tokenizer):
    ids = encode_prompt(byte_tokenizer, "ab😀", {}).tolist()
    detokenizer = Detokenizer(byte_tokenizer)
    assert detokenizer.feed(ids[:-1]) + detokenizer.flush() == "ab"


def test_text_before_an_unfinished_character_is_not_lost(byte_tokenizer):
    newline = encode_prompt(byte_tokenizer, "\n", {}).tolist()
    half = encode_prompt(byte_tokenizer, "😀", {}).tolist()[:2]
    detokenizer = Detokenizer(byte_tokenizer)
    shown = detokenizer.feed([*half, *newline, *half])
    assert (shown + detokenizer.flush()).endswith("\n")  # bytes in the middle that are no character show as U+FFFD


def test_special_tokens_are_not_shown_unless_asked_for(byte_tokenizer):
    ids = [*encode_prompt(byte_tokenizer, "sea", {}).tolist(), byte_tokenizer.token_to_id("<eos>")]
    hidden, shown = Detokenizer(byte_tokenizer), Detokenizer(byte_tokenizer, skip_special_tokens=False)
    assert hidden.feed(ids) + hidden.flush() == "sea"
    assert shown.feed(ids) + shown.flush() == "sea<eos>"


def test_any_ids_decode_to_what_decoding_at_once_gives(byte_tokenizer):
    rng = random.Random(0)
    for _ in range(50):
        ids = [rng.randrange(byte_tokenizer.get_vocab_size()) for _ in range(40)]
        detokenizer = Detokenizer(byte_tokenizer)
        text = "".join(detokenizer.feed([i]) for i in ids) + detokenizer.flush()
        assert text.rstrip(BROKEN) == byte_tokenizer.decode(ids, skip_special_tokens=True).rstrip(BROKEN)
