"""Tokenizers of the tiny presets: whole vocabularies, texts that come back, the same on every machine."""

import dataclasses
import hashlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from widemesh.model.config import ConfigError
from widemesh.model.presets import PRESETS
from widemesh.model.tiny_tokenizer import IMAGE_TOKEN, tiny_tokenizer
from widemesh.model.token_map import build_token_map

TINY = [name for name in PRESETS if name.startswith("tiny-")]
BYTES, _ = tiny_tokenizer(PRESETS["tiny-mesh"])


@pytest.mark.parametrize("name", TINY)
def test_vocabulary_is_whole_and_special_ids_are_the_configured_ones(name):
    config = PRESETS[name]
    tokenizer, _ = tiny_tokenizer(config)
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    assert sorted(vocab.values()) == list(range(config.vocab_size))
    assert all(tokenizer.decode([i], skip_special_tokens=False) for i in range(config.vocab_size))
    named = {"<bos>": 0, "<eos>": 1, "<pad>": 2, IMAGE_TOKEN: config.image_token_id,
             "<noise>": config.dspark_noise_token_id}
    assert {text: tokenizer.token_to_id(text) for text in named} == named
    assert tokenizer.decode(list(named.values())) == ""  # all special


@pytest.mark.parametrize("name", TINY)
def test_tokenizer_config_names_the_special_tokens(name):
    tokenizer_config = tiny_tokenizer(PRESETS[name])[1]
    assert [tokenizer_config[f"{kind}_token"] for kind in ("bos", "eos", "pad")] == ["<bos>", "<eos>", "<pad>"]
    assert tokenizer_config["add_bos_token"] is True
    assert tokenizer_config["model_max_length"] == PRESETS[name].max_position_embeddings


@pytest.mark.parametrize(("name", "digest"), [
    ("tiny-structure", "ec1f237109a493fa"),
    ("tiny-geometry", "ae665b10ce670541"),
    ("tiny-mesh", "d382dea086963e4d"),
])
def test_the_same_everywhere(name, digest):
    """A changed digest is a changed vocabulary: checkpoints made before would speak in other words."""
    tokenizer, _ = tiny_tokenizer(PRESETS[name])
    vocab = sorted((i, text) for text, i in tokenizer.get_vocab(with_added_tokens=True).items())
    assert hashlib.sha256(repr(vocab).encode()).hexdigest()[:16] == digest


@settings(deadline=None)
@given(st.text())
def test_bytes_bring_any_text_back(text):
    ids = BYTES.encode(text).ids
    assert BYTES.decode(ids, skip_special_tokens=False) == text


@settings(deadline=None)
@given(st.text(alphabet=st.characters(exclude_characters="\ufffd", codec="utf-8"), max_size=40))
def test_bytes_stream_without_broken_characters(text):
    stream, pieces = DecodeStream(skip_special_tokens=False), []
    for token_id in BYTES.encode(text).ids:
        piece = stream.step(BYTES, token_id)
        pieces.append(piece or "")
    assert "".join(pieces) == text


def test_merges_shorten_text():
    text = "The answer to a question is written token by token."
    assert len(BYTES.encode(text).ids) < len(text) / 2
    assert BYTES.encode(text).tokens[:2] == ["The", "Ġanswer"]


def test_special_texts_are_special_ids():
    assert BYTES.encode(f"<bos>a{IMAGE_TOKEN}<eos>").ids == [0, BYTES.token_to_id("a"), 510, 1]


def test_saved_and_read_back_is_the_same(tmp_path):
    BYTES.save(str(tmp_path / "tokenizer.json"))
    read = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = "def answer(question): 你好 <eos>"
    assert read.encode(text).ids == BYTES.encode(text).ids
    assert (build_token_map(read) == build_token_map(BYTES)).all()


def test_a_vocabulary_beyond_the_text_is_filled_with_reserved_tokens():
    config = dataclasses.replace(PRESETS["tiny-mesh"], vocab_size=1024, image_token_id=1022, dspark_noise_token_id=1023)
    tokenizer, _ = tiny_tokenizer(config)
    assert sorted(tokenizer.get_vocab().values()) == list(range(1024))
    assert tokenizer.decode([1021], skip_special_tokens=False).startswith("<reserved_")
    assert tokenizer.decode(tokenizer.encode("reading twice").ids) == "reading twice"


def test_words_come_back_and_others_are_unknown():
    tokenizer, tokenizer_config = tiny_tokenizer(PRESETS["tiny-geometry"])
    ids = tokenizer.encode("ba  DA\tdá nonsense").ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == "ba DA <unk> <unk>"  # the accent is a mark of its own
    assert tokenizer_config["unk_token"] == "<unk>"
    assert tokenizer.decode(tokenizer.encode("da\u0301 Fa").ids) == "da\u0301 Fa"


def test_spellings_of_a_word_share_a_compressed_id():
    tokenizer, _ = tiny_tokenizer(PRESETS["tiny-geometry"])
    token_map = build_token_map(tokenizer)
    same = {token_map[tokenizer.token_to_id(text)] for text in ("ba", "Ba", "BA", "ba\u0301")}
    assert len(same) == 1 and token_map[tokenizer.token_to_id("da")] not in same


def test_impossible_sizes_are_refused():
    with pytest.raises(ConfigError, match=r"engram_compressed_vocab_size=20 cannot be reached .* from 37 to 128"):
        tiny_tokenizer(dataclasses.replace(PRESETS["tiny-structure"], engram_compressed_vocab_size=20))
    with pytest.raises(ConfigError, match=r"'<pad>': 128.* below vocab_size=128"):
        tiny_tokenizer(dataclasses.replace(PRESETS["tiny-structure"], pad_token_id=128))
