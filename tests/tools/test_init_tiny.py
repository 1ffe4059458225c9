"""`widemesh init-tiny`: a folder that the rest of the project takes for a checkpoint, the same every time."""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path

import numpy as np
import pytest

from widemesh.model.checkpoint import Checkpoint, tensor_table
from widemesh.model.checkpoint.storage import quantise
from widemesh.model.presets import PRESETS
from widemesh.model.random_weights import random_tensor, random_tensors
from widemesh.model.tiny_tokenizer import tiny_tokenizer
from widemesh.serving.tokens import encode_prompt, load_tokenizer, load_tokenizer_config
from widemesh.tools.cli import main
from widemesh.tools.init_tiny import write_tiny


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


def test_it_holds_the_draft(tmp_path):
    """And the backbone, of which it changes no byte: each tensor is drawn by its own name."""
    write_tiny(tmp_path, preset="tiny-mesh", seed=2, form="quantized")
    config = PRESETS["tiny-mesh"]
    checkpoint = Checkpoint.open(tmp_path, num_speculative_tokens=config.dspark_block_size)
    assert checkpoint.config.with_draft(0) == config
    assert set(checkpoint.table) == set(tensor_table(config.with_draft(1))) and checkpoint.extras == ()
    for name in (
        "embed.weight", "head.weight", "layers.1.engram.embed.weight", "layers.4.attn.wq_b.weight",
        "layers.9.ffn.experts.15.w2.weight", "layers.0.hc_attn_base", "mtp.0.main_proj.weight", "mtp.2.attn.attn_sink",
        "mtp.1.ffn.experts.7.w1.weight", "mtp.2.confidence_head.proj.weight",
    ):  # fmt: skip
        spec = checkpoint.table[name]
        wanted = quantise(spec, random_tensor(name, spec.shape, 2))
        for own, other in zip(checkpoint.stored(name), wanted, strict=True):
            assert (own is None and other is None) or own.tobytes() == other.tobytes(), name
    with_draft, without = dict(random_tensors(config.with_draft(5), 2)), dict(random_tensors(config, 2))
    assert list(with_draft)[: len(without)] == list(without)
    assert all(np.array_equal(with_draft[name], without[name]) for name in list(without)[::20])


def test_the_same_seed_gives_the_same_bytes(tmp_path):
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        assert main(["init-tiny", str(tmp_path / name), "--preset", "tiny-structure", "--seed", seed]) == 0
    first, same, other = (digests(tmp_path / name) for name in "abc")
    assert first == same
    assert first["model.safetensors"] != other["model.safetensors"] and first["config.json"] == other["config.json"]


@pytest.mark.parametrize("is_there", [False, True])
@pytest.mark.parametrize("name", ["tokenizer.json", "config.json"])
def test_a_write_that_fails_is_in_nobodys_way(tmp_path, monkeypatch, capsys, is_there, name):
    folder, write_text = tmp_path / "tiny", Path.write_text
    if is_there:
        folder.mkdir()

    def fail(path, *args, **kwargs):
        write_text(path, *args, **kwargs)
        if path.name.startswith(name):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    args = ["init-tiny", str(folder), "--preset", "tiny-structure"]
    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", fail)
        assert main(args) == 2
    err = capsys.readouterr().err
    assert "No space left on device" in err and err.count("\n") == 1
    assert folder.exists() == is_there and not (is_there and any(folder.iterdir()))
    assert main(args) == 0


def test_the_tokenizer_is_as_its_library_writes_it(tmp_path):
    write_tiny(tmp_path / "a", preset="tiny-structure", seed=0, form="quantized")
    tiny_tokenizer(PRESETS["tiny-structure"])[0].save(str(tmp_path / "b"))
    assert (tmp_path / "a" / "tokenizer.json").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_folder_with_something_in_it_is_left_alone(tmp_path, capsys):
    (tmp_path / "mine").write_text("x")
    assert main(["init-tiny", str(tmp_path)]) == 2
    assert "exists already and is not an empty folder" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
