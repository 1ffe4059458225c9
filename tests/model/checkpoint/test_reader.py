"""Opening checkpoints: what is read, and one error that names everything wrong with a folder."""

import json
import logging
import shutil

import ml_dtypes
import numpy as np
import pytest

from widemesh.model.checkpoint import Checkpoint, CheckpointError, storage
from widemesh.model.checkpoint.tensor_file import TensorFile, write_tensor_file


def problems_of(folder, num_speculative_tokens=0) -> tuple[str, ...]:
    with pytest.raises(CheckpointError) as raised:
        Checkpoint.open(folder, num_speculative_tokens)
    assert str(folder) in str(raised.value)
    assert all(problem in str(raised.value) for problem in raised.value.problems)
    return raised.value.problems


def test_golden_opens_and_reads(golden):
    checkpoint = Checkpoint.open(golden)
    assert checkpoint.form == "quantized" and checkpoint.folder == golden
    assert checkpoint.extras and all(name.startswith("mtp.") for name in checkpoint.extras)
    for spec in checkpoint.table.values():
        values = checkpoint.read(spec.name)
        assert values.dtype == np.float32 and values.shape == spec.shape and np.isfinite(values).all()


def test_golden_opens_and_reads_with_its_draft(golden, caplog):
    with caplog.at_level(logging.INFO):
        checkpoint = Checkpoint.open(golden, num_speculative_tokens=3)
    assert checkpoint.form == "quantized" and checkpoint.config.num_speculative_tokens == 3
    assert checkpoint.extras == () and not caplog.records  # scales are no extras either
    drafts = [spec for spec in checkpoint.table.values() if spec.name.startswith("mtp.")]
    assert {spec.kind for spec in drafts} == {"bf16", "f32", "fp8", "fp4"}
    for spec in drafts:
        values, (weight, scales) = checkpoint.read(spec.name), checkpoint.stored(spec.name)
        assert values.dtype == np.float32 and values.shape == spec.shape and np.isfinite(values).all()
        assert np.array_equal(storage.decode(spec.kind, weight, scales), values)


def test_one_log_line_counts_the_extras(golden_b, caplog):
    with caplog.at_level(logging.INFO):
        checkpoint = Checkpoint.open(golden_b)
    assert len(caplog.records) == 1
    count = len(checkpoint.extras)
    assert f"{count} tensors are not used yet and skipped (mtp: {count})" in caplog.records[0].getMessage()


def test_values_are_dequantised_by_hand(golden_b):
    checkpoint = Checkpoint.open(golden_b)
    for spec in checkpoint.table.values():
        if spec.kind not in ("fp8", "fp4", "engram"):
            continue
        weight = checkpoint.raw(spec.name)
        scale = checkpoint.raw(storage.scale_name(spec.name)).astype(np.float64)
        if spec.kind == "fp4":
            byte = weight.view(np.uint8)
            codes = np.stack([byte & 15, byte >> 4], axis=-1).reshape(spec.shape)
            values = codes.astype(np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
        else:
            values = weight.astype(np.float64)
        rows, columns = np.indices(spec.shape)
        want = values * scale[rows // 32 if spec.kind == "fp8" else rows, columns // 32]
        assert np.array_equal(checkpoint.read(spec.name), want), spec.name


def test_row_ranges(golden_b):
    checkpoint = Checkpoint.open(golden_b)
    for name in ("layers.2.engram.embed.weight", "layers.1.ffn.experts.3.w1.weight", "embed.weight"):
        whole = checkpoint.read(name)
        assert np.array_equal(checkpoint.read(name, 3, 7), whole[3:7])
        assert np.array_equal(checkpoint.read(name, 5), whole[5:])
    blocks = "layers.1.attn.wo_a.weight"  # 72 rows, the last block partial
    whole = checkpoint.read(blocks)
    assert whole.shape[0] == 72
    assert np.array_equal(checkpoint.read(blocks, 32, 64), whole[32:64])
    assert np.array_equal(checkpoint.read(blocks, 32), whole[32:])
    assert np.array_equal(checkpoint.read(blocks, 64, 96), whole[64:])
    with pytest.raises(ValueError, match="start=8 must be a multiple of 32"):
        checkpoint.read(blocks, 8)


def test_raw_gives_stored_bytes_without_reading(golden_b):
    checkpoint = Checkpoint.open(golden_b)
    name = "layers.2.engram.embed.weight"
    assert np.shares_memory(checkpoint.raw(name), checkpoint.files[name].data)
    assert checkpoint.raw(name).dtype == ml_dtypes.float8_e4m3fn
    assert checkpoint.raw("layers.2.engram.embed.scale").dtype == ml_dtypes.float8_e8m0fnu
    assert checkpoint.raw("mtp.0.attn_norm.weight").dtype == ml_dtypes.bfloat16
    for read in (checkpoint.raw, checkpoint.read):
        with pytest.raises(KeyError, match="nonsense"):
            read("nonsense")
    for read in (checkpoint.read, checkpoint.stored):
        with pytest.raises(KeyError, match=r"'mtp.0.attn_norm.weight' is no tensor of this model"):
            read("mtp.0.attn_norm.weight")


def test_a_folder_may_mix_plain_and_quantised(rewrite, golden_b):
    name = "layers.0.attn.wq_a.weight"
    original = Checkpoint.open(golden_b)

    def dequantise(tensors):
        tensors[name] = original.read(name).astype(ml_dtypes.bfloat16)
        del tensors["layers.0.attn.wq_a.scale"]

    mixed = Checkpoint.open(rewrite(dequantise))
    assert mixed.form == "mixed"
    assert np.array_equal(mixed.read(name), original.read(name))


# --- broken folders ---------------------------------------------------------------------------------------------


def test_missing_folder_and_a_file_in_its_place(tmp_path, golden_b):
    assert "does not exist" in problems_of(tmp_path / "nowhere")[0]
    assert "is not a folder" in problems_of(golden_b / "config.json")[0]


def test_empty_folder_names_config_and_weights(tmp_path):
    config, weights = problems_of(tmp_path)
    assert "config.json does not exist" in config
    assert "neither model.safetensors.index.json nor model.safetensors exists" in weights


@pytest.mark.parametrize("text", ["", "{", "[]", '{"model_type": "llama"}', '{"model_type": "deepseek_v41"}', "\xff"])
def test_bad_config(tmp_path, golden_b, text):
    shutil.copyfile(golden_b / "model.safetensors", tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    (problem,) = problems_of(tmp_path)
    assert "config" in problem or "llama" in problem


def test_unsupported_model_type_is_named(tmp_path, golden_b):
    shutil.copyfile(golden_b / "model.safetensors", tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert "model_type='llama' is not supported" in problems_of(tmp_path)[0]


def test_truncated_weights(tmp_path, golden_b):
    shutil.copyfile(golden_b / "config.json", tmp_path / "config.json")
    whole = (golden_b / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    (problem,) = problems_of(tmp_path)
    assert problem.startswith("model.safetensors is truncated, damaged or no safetensors file")


def test_every_kind_of_wrong_tensor_is_named_at_once(rewrite):
    def break_it(tensors):
        del tensors["norm.weight"]
        del tensors["layers.3.attn.q_norm.weight"]
        del tensors["layers.0.ffn.shared_experts.w1.scale"]
        tensors["layers.0.attn.wq_c.weight"] = np.zeros(3, np.float32)
        tensors["lm_head.weight"] = np.zeros(3, np.float32)
        tensors["embed.weight"] = tensors["embed.weight"][:-1]
        tensors["layers.1.ffn.experts.0.w2.weight"] = tensors["layers.1.ffn.experts.0.w2.weight"][:, :-1]
        tensors["layers.1.attn.wkv.scale"] = tensors["layers.1.attn.wkv.scale"][:0]
        tensors["head.weight"] = tensors["head.weight"].astype(np.float16)
        tensors["layers.0.attn.attn_sink"] = tensors["layers.0.attn.attn_sink"].astype(ml_dtypes.bfloat16)
        tensors["layers.0.attn.wo_b.scale"] = tensors["layers.0.attn.wo_b.scale"].view(np.uint8)

    problems = problems_of(rewrite(break_it))
    assert problems[0] == (
        "missing tensors (3): layers.0.ffn.shared_experts.w1.scale, layers.3.attn.q_norm.weight, norm.weight"
    )
    assert problems[1] == "unexpected tensors (2): layers.0.attn.wq_c.weight, lm_head.weight"
    named = dict(problem.split(" has ") for problem in problems[2:])
    vocab, hidden, width = 192, 32, 32
    assert named == {
        "embed.weight": f"shape [{vocab - 1}, {hidden}]; config.json makes it [{vocab}, {hidden}]",
        "layers.0.attn.attn_sink": "dtype BF16; it must be F32",
        "layers.0.attn.wo_b.scale": "dtype U8; it must be F8_E8M0",
        "layers.1.attn.wkv.scale": "shape [0, 1]; config.json makes it [1, 1]",
        "layers.1.ffn.experts.0.w2.weight": (
            f"shape [{hidden}, {width // 2 - 1}]; config.json makes it [{hidden}, {width // 2}]"
        ),
        "head.weight": "dtype F16; it must be BF16",
    }


def test_a_draft_that_is_not_there_is_missed_only_if_it_is_to_run(rewrite, golden_b):
    names = [name for name in Checkpoint.open(golden_b).extras if not name.endswith(".scale")]

    def break_it(tensors):
        for name in [name for name in tensors if name.startswith("mtp.")]:
            del tensors[name]

    folder = rewrite(break_it)
    assert Checkpoint.open(folder).extras == ()
    (problem,) = problems_of(folder, num_speculative_tokens=3)
    count, missing = problem.split(": ")
    assert count == f"missing tensors ({len(names)})" and sorted(missing.split(", ")) == names


def test_what_is_wrong_with_a_draft_is_named_if_it_is_to_run(rewrite):
    def break_it(tensors):
        del tensors["mtp.1.markov_head.head.weight"]
        tensors["mtp.0.main_proj.weight"] = tensors["mtp.0.main_proj.weight"][:, :-32]
        tensors["mtp.1.attn.attn_sink"] = tensors["mtp.1.attn.attn_sink"].astype(ml_dtypes.bfloat16)

    folder = rewrite(break_it)
    assert Checkpoint.open(folder).extras
    assert problems_of(folder, num_speculative_tokens=3) == (
        "missing tensors (1): mtp.1.markov_head.head.weight",
        "mtp.0.main_proj.weight has shape [32, 64]; config.json makes it [32, 96]",
        "mtp.1.attn.attn_sink has dtype BF16; it must be F32",
    )


def test_more_drafts_than_the_checkpoint_was_trained_for(golden_b):
    (problem,) = problems_of(golden_b, num_speculative_tokens=5)
    assert problem.startswith("num_speculative_tokens=5 exceeds dspark_block_size=4")


def test_hundreds_of_missing_tensors_are_all_named(rewrite):
    removed = []

    def break_it(tensors):
        backbone = (name for name in tensors if name.startswith("layers."))
        removed.extend(name for name in backbone if ".experts." in name and name.endswith(".weight"))
        for name in removed:
            del tensors[name]

    (problem,) = problems_of(rewrite(break_it))
    assert len(removed) > 300
    assert sorted(problem.split(": ")[1].split(", ")) == sorted(removed)


def test_a_scale_beside_a_plain_weight_is_unexpected(rewrite):
    def break_it(tensors):
        tensors["layers.0.attn.wkv.weight"] = tensors["layers.0.attn.wkv.weight"].astype(ml_dtypes.bfloat16)

    assert problems_of(rewrite(break_it)) == ("unexpected tensors (1): layers.0.attn.wkv.scale",)


# --- shards -----------------------------------------------------------------------------------------------------


@pytest.fixture
def sharded(tmp_path, golden_b):
    """Golden B cut into three shards with an index, and a misleading model.safetensors beside them."""
    folder = tmp_path / "sharded"
    folder.mkdir()
    shutil.copyfile(golden_b / "config.json", folder / "config.json")
    file = TensorFile.open(golden_b / "model.safetensors")
    weight_map = {}
    for part in range(3):
        names = sorted(file.entries)[part::3]
        write_tensor_file(folder / f"part{part}.safetensors", {n: file.tensor(n) for n in names})
        weight_map.update(dict.fromkeys(names, f"part{part}.safetensors"))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    write_tensor_file(folder / "model.safetensors", {"other": np.zeros(1, np.float32)})
    return folder


def test_shards_read_like_one_file_and_other_files_are_ignored(sharded, golden_b):
    one, many = Checkpoint.open(golden_b), Checkpoint.open(sharded)
    assert many.extras == one.extras and set(many.files) == set(one.files)
    for name in one.table:
        assert np.array_equal(one.read(name), many.read(name))


def test_missing_and_damaged_shards_and_a_wrong_tensor_at_once(sharded):
    (sharded / "part0.safetensors").unlink()
    with open(sharded / "part1.safetensors", "r+b") as file:
        file.truncate(1000)
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    weight_map = index["weight_map"]
    lost = min(name for name, shard in weight_map.items() if shard == "part0.safetensors")
    weight_map[lost] = "part2.safetensors"
    weight_map["layers.99.norm.weight"] = "gone.safetensors"
    weight_map["layers.98.norm.weight"] = "../A/model.safetensors"
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    problems = problems_of(sharded)
    count = sum(shard == "part0.safetensors" for shard in weight_map.values())
    assert any(p == f"part0.safetensors does not exist; copy the whole checkpoint ({count} tensors are in it)"
               for p in problems)  # fmt: skip
    assert any(p.startswith("part1.safetensors is truncated") for p in problems)
    assert any(p.startswith("gone.safetensors does not exist") for p in problems)
    assert any("'../A/model.safetensors'; only files of the folder itself" in p for p in problems)
    assert f"model.safetensors.index.json places tensors in part2.safetensors that it does not hold: {lost}" in problems
    assert len(problems) == 5  # no tensor of a bad shard is reported again as missing


@pytest.mark.parametrize("text", [
    "", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 3}}', pytest.param("[" * 100_000, id="deep"),
])  # fmt: skip
def test_bad_index(sharded, text):
    (sharded / "model.safetensors.index.json").write_text(text)
    (problem,) = problems_of(sharded)
    assert problem.startswith("model.safetensors.index.json cannot be used (")


def test_an_index_that_lists_too_little_names_the_rest_as_missing(sharded):
    path = sharded / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    del index["weight_map"]["norm.weight"]
    path.write_text(json.dumps(index))
    assert problems_of(sharded) == ("missing tensors (1): norm.weight",)
