"""Which models can be cut into how many parts, and what is said of the others."""

from __future__ import annotations

import dataclasses

import pytest

from widemesh.model.config import ConfigError
from widemesh.model.presets import FLASH, TINY_MESH, TINY_STRUCTURE
from widemesh.serving.config import EngineConfig
from widemesh.serving.memory_plan import plan_memory
from widemesh.serving.tensor_split import check_split, possible_parts


def config(tp: int, **values) -> EngineConfig:
    return EngineConfig(**{"prefill_devices": tp, "decode_devices": tp, "tensor_parallel_size": tp} | values)


def test_possible_parts():
    assert possible_parts(FLASH, "w8a8") == [1, 2, 4, 8]
    assert possible_parts(TINY_MESH, "reference") == [1, 2, 4]
    # One block of 32 is one part, unless nothing is quantised in front of the matrix.
    assert (possible_parts(TINY_STRUCTURE, "w8a8"), possible_parts(TINY_STRUCTURE, "plain")) == ([1], [1, 2])


@pytest.mark.parametrize("numerics", ["plain", "kvq", "w8a8", "reference"])
def test_default_preset_splits_in_four(numerics):
    for tp in (1, 2, 4):
        config(tp, numerics=numerics).check_model(TINY_MESH)


@pytest.mark.parametrize(
    ("model", "parts", "numerics", "message"),
    [
        (TINY_MESH, 3, "plain", "tensor_parallel_size=3 does not divide num_attention_heads=8; use one of 1, 2, 4"),
        (TINY_MESH, 8, "plain", "tensor_parallel_size=8 does not divide o_groups=4; use one of 1, 2, 4"),
        (dataclasses.replace(TINY_MESH, moe_intermediate_size=130), 4, "kvq",
         "tensor_parallel_size=4 does not divide moe_intermediate_size=130; use one of 1, 2"),
        (dataclasses.replace(TINY_MESH, moe_intermediate_size=96), 2, "w8a8",
         "tensor_parallel_size=2 does not divide moe_intermediate_size=96 into whole blocks of 32, which "
         "numerics='w8a8' needs; use one of 1"),
        (dataclasses.replace(TINY_MESH, o_lora_rank=24), 2, "reference",
         r"tensor_parallel_size=2 does not divide o_groups \* o_lora_rank=96 into whole blocks of 32"),
        (dataclasses.replace(TINY_MESH, vocab_size=514), 4, "plain", "does not divide vocab_size=514; use one of 1, 2"),
        (dataclasses.replace(TINY_MESH, engram_head_dim=34), 4, "plain", "does not divide engram_head_dim=34"),
    ],
)  # fmt: skip
def test_what_does_not_divide_is_named(model, parts, numerics, message):
    with pytest.raises(ConfigError, match=message):
        check_split(model, parts, numerics)
    check_split(model, 1, numerics)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tensor_parallel_size": 0}, "tensor_parallel_size=0 must be at least 1"),
        ({"tensor_parallel_size": 4}, "prefill_devices=2 must be a multiple of tensor_parallel_size=4; use 4"),
        ({"tensor_parallel_size": 2, "decode_devices": 5},
         "decode_devices=5 must be a multiple of tensor_parallel_size=2; use 6"),
        ({"tensor_parallel_size": 2, "decode_devices": 6},
         "max_num_seqs=8 must be a multiple of decode_devices=6 / tensor_parallel_size=2; use 9"),
        ({"tensor_parallel_size": 2, "prefill_devices": 6, "max_num_batched_tokens": 2},
         "max_num_batched_tokens=2 must be at least prefill_devices=6 / tensor_parallel_size=2; use 3 or more"),
    ],
)  # fmt: skip
def test_devices_come_in_whole_ranks(values, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**values)


def test_ranks_are_groups_of_devices():
    one = config(2, prefill_devices=4, decode_devices=8, max_num_seqs=12, max_num_batched_tokens=64)
    assert (one.prefill_ranks, one.decode_ranks, one.slots_per_rank, one.chunk_rows) == (2, 4, 3, 32)
    sizes = one.scheduler
    assert (sizes.prefill_ranks, sizes.decode_ranks, sizes.slots_per_rank) == (2, 4, 3)


def test_packed_weights_are_refused():
    """Where `serving` means packed weights; on a CPU it does not."""
    model, parts = FLASH, config(2, numerics="serving")
    with pytest.raises(ConfigError, match="tensor_parallel_size=2 cannot be used with packed weights"):
        plan_memory(model, parts, "gpu")
    plan_memory(dataclasses.replace(TINY_MESH), parts, "cpu")
