"""`widemesh init-tiny`: a folder that the rest of the project takes for a checkpoint, the same every time."""

from __future__ import annotations

import hashlib

import pytest

from widemesh.model.checkpoint import Checkpoint
from widemesh.model.presets import PRESETS
from widemesh.serving.tokens import encode_prompt, load_tokenizer, load_tokenizer_config
from widemesh.tools.cli import main


def digests(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


@pytest.mark.parametrize("form", ["plain", "quantized"])
def test_it_writes_a_whole_checkpoint(tmp_path, capsys, form):
    folder = tmp_path / "deep" / "tiny"
    assert main(["init-tiny", str(folder), "--preset", "tiny-structure", "--form", form, "--seed", "3"]) == 0
    assert str(folder) in capsys.readouterr().out
    checkpoint = Checkpoint.open(folder)
    assert (checkpoint.config, checkpoint.form) == (PRESETS["tiny-structure"], form)
    tokenizer = load_tokenizer(folder)
    ids = encode_prompt(tokenizer, "bada", load_tokenizer_config(folder))
    assert ids[0] == checkpoint.config.bos_token_id and tokenizer.get_vocab_size() == checkpoint.config.vocab_size


def test_the_same_seed_gives_the_same_bytes(tmp_path):
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        assert main(["init-tiny", str(tmp_path / name), "--preset", "tiny-structure", "--seed", seed]) == 0
    first, same, other = (digests(tmp_path / name) for name in "abc")
    assert first == same
    assert first["model.safetensors"] != other["model.safetensors"] and first["config.json"] == other["config.json"]


def test_a_folder_with_something_in_it_is_left_alone(tmp_path, capsys):
    (tmp_path / "mine").write_text("x")
    assert main(["init-tiny", str(tmp_path)]) == 2
    assert "exists already and is not an empty folder" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
