"""The tensor table against the released checkpoint's counts and the golden files."""

import collections
import math

import pytest

from widemesh.model.checkpoint import is_recognised_extra, storage, tensor_table
from widemesh.model.checkpoint.tensor_file import TensorFile
from widemesh.model.config import ModelConfig
from widemesh.model.presets import FLASH


def test_released_layers_hold_the_released_number_of_tensors():
    stored = collections.Counter()
    for spec in tensor_table(FLASH).values():
        layer = int(spec.name.split(".")[1]) if spec.name.startswith("layers.") else None
        stored[layer] += 1 + storage.has_scale(storage.stored_dtype(spec.kind, "quantized"))
    special = {1: 2340, 2: 2342, 8: 2342, 14: 2348, 20: 2341, 24: 2337, 28: 2337, 32: 2337, 36: 2337, None: 3}
    assert stored == {layer: special.get(layer, 2334) for layer in [*range(40), None]}


def test_released_bytes():
    """The backbone's share of 510,286,023,000 bytes: all but the draft, the vision tower and the image vectors."""
    vision = 1024 * 588 + 1024
    vision += 32 * (2 * 1024 + 3072 * 1024 + 3072 + 1024 * 1024 + 1024 + 5632 * 1024 + 1024 * 2816) + 1024
    vision += 5120 * 9216 + 5120 + 5120 * 5120 + 5120 + 3 * 5120
    total = 0
    for spec in tensor_table(FLASH).values():
        dtype = storage.stored_dtype(spec.kind, "quantized")
        total += math.prod(storage.stored_shape(spec, dtype)) * dtype.itemsize
        total += math.prod(storage.scale_shape(spec)) if storage.has_scale(dtype) else 0
    assert total == 510_286_023_000 - released_draft_bytes() - 2 * vision


def released_draft_bytes():
    """Counted by hand."""
    attention = {
        "fp8": [(1280, 5120), (32768, 1280), (512, 5120), (8192, 4096), (5120, 8192)] + [(2304, 5120)] * 3,
        "bf16": 1280 + 512 + 5120 * 2 + 128 * 5120,
        "f32": 64 + 2 * (24 * 20480 + 24 + 3) + 2 * 128,
    }
    draft = 3 * sum(o * i + (o // 32) * (i // 32) for o, i in attention["fp8"])
    draft += 3 * (2 * attention["bf16"] + 4 * attention["f32"])
    draft += 3 * 128 * 3 * (2304 * 5120 // 2 + 2304 * 5120 // 32)
    draft += 5120 * 15360 + 160 * 480 + 2 * (5120 + 5120 + 2 * 129280 * 256 + 5376)
    return draft


def test_released_draft():
    """Its share of the released bytes, and its tensors: three layers, the features, and the heads."""
    table = list(tensor_table(FLASH.with_draft(5)).values())[len(tensor_table(FLASH)) :]
    assert {spec.name.split(".")[0] for spec in table} == {"mtp"}
    total = 0
    for spec in table:
        dtype = storage.stored_dtype(spec.kind, "quantized")
        total += math.prod(storage.stored_shape(spec, dtype)) * dtype.itemsize
        total += math.prod(storage.scale_shape(spec)) if storage.has_scale(dtype) else 0
    assert total == released_draft_bytes()
    ends = {spec.name for spec in table if not spec.name.split(".", 2)[2].startswith(("attn", "ffn", "hc_"))}
    assert ends == {
        "mtp.0.main_proj.weight", "mtp.0.main_norm.weight", "mtp.2.norm.weight", "mtp.2.markov_head.embed.weight",
        "mtp.2.markov_head.head.weight", "mtp.2.confidence_head.proj.weight",
    }  # fmt: skip


@pytest.mark.parametrize("num_speculative_tokens", [0, 1])
def test_names_shapes_and_dtypes_of_the_golden_files(golden, num_speculative_tokens):
    table = tensor_table(ModelConfig.from_dir(golden).with_draft(num_speculative_tokens))
    expected = {}
    for spec in table.values():
        dtype = storage.stored_dtype(spec.kind, "quantized")
        expected[spec.name] = (storage.stored_shape(spec, dtype), dtype)
        if storage.has_scale(dtype):
            expected[storage.scale_name(spec.name)] = (storage.scale_shape(spec), storage.E8M0)
    file = TensorFile.open(golden / "model.safetensors")
    stored = {name: (file.tensor(name).shape, file.tensor(name).dtype) for name in file.entries}
    has_draft = num_speculative_tokens > 0
    assert {name: what for name, what in stored.items() if has_draft or not name.startswith("mtp.")} == expected


def test_recognised_extras():
    yes = ["mtp.0.attn_norm.weight", "vision.norm.weight", "aligner.w1.bias", "image_start", "image_newline"]
    no = ["embed.weight", "layers.0.mtp.weight", "image_start.weight", "mtp", "visions.norm.weight"]
    assert all(map(is_recognised_extra, yes)) and not any(map(is_recognised_extra, no))
