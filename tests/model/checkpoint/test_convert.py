"""The golden checkpoints to plain and back: bytes against the originals' digests, values tensor by tensor."""

import hashlib
import json
import shutil

import numpy as np
import pytest

from widemesh.model.checkpoint import Checkpoint, CheckpointError, convert_checkpoint
from widemesh.model.checkpoint import convert as convert_module


def test_plain_rebuild_has_the_original_bytes(golden, tmp_path):
    convert_checkpoint(golden, tmp_path / "plain", "plain")
    digests = json.loads((golden / "plain_sha256.json").read_text())  # of every tensor of the plain original
    plain = Checkpoint.open(tmp_path / "plain")
    assert plain.form == "plain"
    assert set(plain.table) == {name for name in digests if not name.startswith("mtp.")}
    for name in plain.table:
        assert hashlib.sha256(plain.raw(name).tobytes()).hexdigest() == digests[name], name


def test_quantised_to_plain_to_quantised_keeps_every_value(golden, tmp_path):
    convert_checkpoint(golden, tmp_path / "plain", "plain")
    convert_checkpoint(tmp_path / "plain", tmp_path / "back", "quantized")
    first, plain, back = (Checkpoint.open(f) for f in (golden, tmp_path / "plain", tmp_path / "back"))
    assert back.form == "quantized"
    for name in first.table:
        assert np.array_equal(first.read(name), plain.read(name)), name
        assert np.array_equal(first.read(name), back.read(name)), name


def test_extras_configuration_and_tokenizer_come_along(golden, tmp_path):
    convert_checkpoint(golden, tmp_path / "plain", "plain", max_shard_bytes=300_000)
    first, plain = Checkpoint.open(golden), Checkpoint.open(tmp_path / "plain")
    assert plain.extras == first.extras
    assert "mtp.0.main_proj.scale" in first.extras and "mtp.0.ffn.experts.1.w2.weight" in first.extras
    for name in first.extras:
        assert plain.raw(name).dtype == first.raw(name).dtype
        assert plain.raw(name).tobytes() == first.raw(name).tobytes()
    assert plain.config == first.config
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "plain" / name).read_bytes() == (golden / name).read_bytes()
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    assert config == json.loads((golden / "config.json").read_text())
    assert not list((tmp_path / "plain").glob("inputs*"))


def test_same_form_passes_bytes_through(rewrite, tmp_path):
    def shrink_scale(tensors):
        # A scale that our own encoder would never choose, and a scale of NaN.
        scale = tensors["layers.0.attn.wkv.scale"].copy()
        scale.view(np.uint8)[:] = 0
        tensors["layers.0.attn.wkv.scale"] = scale
        nan = tensors["layers.0.ffn.experts.0.w1.scale"].copy()
        nan.view(np.uint8)[0, 0] = 255
        tensors["layers.0.ffn.experts.0.w1.scale"] = nan

    source = rewrite(shrink_scale)
    convert_checkpoint(source, tmp_path / "same", "quantized")
    before, after = Checkpoint.open(source), Checkpoint.open(tmp_path / "same")
    for name in before.files:
        assert after.raw(name).tobytes() == before.raw(name).tobytes()
    assert after.read("layers.0.attn.wkv.weight").any()  # 2^-127 is a value, not zero
    assert np.isnan(after.read("layers.0.ffn.experts.0.w1.weight")[0, :32]).all()


def test_large_tensors_are_dequantised_in_pieces(golden_b, tmp_path, monkeypatch):
    convert_checkpoint(golden_b, tmp_path / "whole", "plain")
    monkeypatch.setattr(convert_module, "_CHUNK_VALUES", 100)
    convert_checkpoint(golden_b, tmp_path / "pieces", "plain")
    whole, pieces = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "pieces"))
    assert whole == pieces


def test_bad_sources_and_targets(golden_b, tmp_path):
    with pytest.raises(CheckpointError, match="does not exist"):
        convert_checkpoint(tmp_path / "none", tmp_path / "out", "plain")
    assert not (tmp_path / "out").exists()
    shutil.copytree(golden_b, tmp_path / "own")
    with pytest.raises(CheckpointError, match="already holds"):
        convert_checkpoint(tmp_path / "own", tmp_path / "own", "plain")
    with pytest.raises(ValueError, match="form='bf16'"):
        convert_checkpoint(golden_b, tmp_path / "out", "bf16")
