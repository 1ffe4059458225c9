"""Writing checkpoints: both forms, shards, refusals, and no half-written folder that looks whole."""

import json

import ml_dtypes
import numpy as np
import pytest

from widemesh.model.checkpoint import Checkpoint, CheckpointError, tensor_table, write_checkpoint
from widemesh.model.checkpoint.writer import write_stored
from widemesh.model.config import ModelConfig


@pytest.fixture
def config(golden_b) -> ModelConfig:
    return ModelConfig.from_dir(golden_b)


def random_weights(config: ModelConfig) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(5)
    return {name: rng.normal(size=spec.shape).astype(np.float32) for name, spec in tensor_table(config).items()}


def test_plain_rounds_to_bfloat16_and_keeps_float32_where_the_release_does(tmp_path, config):
    weights = random_weights(config)
    write_checkpoint(tmp_path / "new" / "folder", config, weights.items(), form="plain")
    checkpoint = Checkpoint.open(tmp_path / "new" / "folder")
    assert checkpoint.form == "plain" and checkpoint.config == config and checkpoint.extras == ()
    for name, spec in checkpoint.table.items():
        dtype = np.float32 if spec.kind == "f32" else ml_dtypes.bfloat16
        assert checkpoint.raw(name).dtype == dtype
        assert np.array_equal(checkpoint.raw(name), weights[name].astype(dtype))
    names = sorted(path.name for path in (tmp_path / "new" / "folder").iterdir())
    assert names == ["config.json", "model.safetensors"]


def test_quantised_values_are_near_and_stable(tmp_path, config):
    weights = random_weights(config)
    write_checkpoint(tmp_path / "q", config, weights.items(), form="quantized")
    first = Checkpoint.open(tmp_path / "q")
    assert first.form == "quantized"
    worst = {"bf16": 2**-8, "f32": 0.0, "fp8": 2**-4, "engram": 2**-4, "fp4": 0.25}
    for name, spec in first.table.items():
        want, got = weights[name], first.read(name)
        assert np.all(np.abs(got - want) <= worst[spec.kind] * np.maximum(np.abs(want), np.abs(want).max() / 2)), name
    write_checkpoint(tmp_path / "again", config, ((n, first.read(n)) for n in first.table), form="quantized")
    again = Checkpoint.open(tmp_path / "again")
    for name in first.table:
        assert np.array_equal(first.read(name), again.read(name))


def test_extras_are_stored_as_they_come(tmp_path, config):
    extra = np.arange(6, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).reshape(2, 3)
    write_checkpoint(
        tmp_path, config, random_weights(config).items(), form="plain", extras=[("mtp.0.x.weight", extra)]
    )
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.extras == ("mtp.0.x.weight",)
    assert checkpoint.raw("mtp.0.x.weight").dtype == extra.dtype
    assert checkpoint.raw("mtp.0.x.weight").tobytes() == extra.tobytes()


def test_shards_with_an_index(tmp_path, config):
    weights = random_weights(config)
    write_checkpoint(tmp_path, config, weights.items(), form="plain", max_shard_bytes=200_000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    shards = sorted(set(index["weight_map"].values()))
    assert len(shards) > 3 and shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        [*shards, "config.json", "model.safetensors.index.json"]
    )
    checkpoint = Checkpoint.open(tmp_path)
    assert index["metadata"]["total_size"] == sum(checkpoint.raw(name).nbytes for name in weights)
    assert np.array_equal(checkpoint.read("norm.weight"), weights["norm.weight"].astype(ml_dtypes.bfloat16))


def test_everything_wrong_with_the_tensors_is_named(tmp_path, config):
    weights = random_weights(config)
    del weights["norm.weight"], weights["head.weight"]
    weights["embed.weight"] = weights["embed.weight"][1:]
    weights["nonsense"] = np.zeros(3, np.float32)
    with pytest.raises(CheckpointError) as raised:
        write_checkpoint(tmp_path, config, weights.items(), form="plain")
    shape, unknown, missing = raised.value.problems
    assert shape.startswith("embed.weight has shape [191, 32]; the configuration makes it [192, 32]")
    assert unknown == "nonsense is no tensor of this model's backbone"
    assert missing == "missing tensors (2): norm.weight, head.weight"
    assert list(tmp_path.iterdir()) == []


def test_a_tensor_given_twice_is_refused(tmp_path, config):
    weights = list(random_weights(config).items())
    with pytest.raises(CheckpointError, match=r"embed\.weight was given twice"):
        write_checkpoint(tmp_path, config, [*weights, weights[0]], form="plain")


def test_a_folder_that_holds_a_checkpoint_is_refused_and_untouched(tmp_path, config):
    weights = random_weights(config)
    (tmp_path / "tokenizer.json").write_text("{}")
    write_checkpoint(tmp_path, config, weights.items(), form="plain")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(CheckpointError, match=r"already holds config\.json, model\.safetensors; give a new folder"):
        write_checkpoint(tmp_path, config, weights.items(), form="quantized")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_an_interrupted_write_leaves_no_checkpoint_and_can_be_repeated(tmp_path, config):
    weights = random_weights(config)

    def interrupted():
        for i, item in enumerate(weights.items()):
            if i == 40:
                raise KeyboardInterrupt
            yield item

    with pytest.raises(KeyboardInterrupt):
        write_checkpoint(tmp_path, config, interrupted(), form="plain", max_shard_bytes=20_000)
    with pytest.raises(CheckpointError, match=r"config\.json does not exist"):
        Checkpoint.open(tmp_path)
    # A killed process cannot clean up behind itself.
    for name in ("model-00007.safetensors", "model.safetensors.index.json", "config.json"):
        (tmp_path / f"{name}.partial").write_bytes(b"half")
    write_checkpoint(tmp_path, config, weights.items(), form="plain")
    assert Checkpoint.open(tmp_path).form == "plain"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("max_shard_bytes", [100, 1 << 20])
def test_what_fails_after_the_weights_leaves_nothing_and_can_be_repeated(tmp_path, max_shard_bytes):
    tensors = [(name, np.ones(20, np.float32)) for name in "abc"]
    (tmp_path / "words").write_text("words")
    folder, kept = tmp_path / "new", {"merges.txt": "old"}
    folder.mkdir()
    (folder / "merges.txt").write_text("old")

    def write(config_json, *copies):
        write_stored(folder, config_json, tensors, copies=[tmp_path / name for name in copies],
                     max_shard_bytes=max_shard_bytes)  # fmt: skip

    with pytest.raises(CheckpointError, match="writing failed"):
        write({}, "words", "merges.txt")  # there is no merges.txt to be copied
    assert {path.name: path.read_text() for path in folder.iterdir()} == kept
    with pytest.raises(TypeError):
        write({"a": object()}, "words")
    assert {path.name: path.read_text() for path in folder.iterdir()} == kept
    write({}, "words")
    assert {"words", "merges.txt", "config.json"} < {path.name for path in folder.iterdir()}


def test_a_path_that_is_a_file(tmp_path, config):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="writing failed"):
        write_checkpoint(tmp_path / "file", config, [], form="plain")


def test_an_unknown_form_is_refused(tmp_path, config):
    with pytest.raises(ValueError, match="form='fp8' must be one of 'plain', 'quantized'"):
        write_checkpoint(tmp_path / "x", config, [], form="fp8")
    assert not (tmp_path / "x").exists()
