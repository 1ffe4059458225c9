"""Meshes: disjoint devices, one clear error when there are too few, the axis table."""

from __future__ import annotations

import jax
import pytest
from jax.sharding import PartitionSpec

from widemesh.sharding import MeshError, make_meshes, partition_spec


def test_meshes_are_disjoint() -> None:
    pair = make_meshes(2, 4)
    assert pair.prefill.axis_names == pair.decode.axis_names == ("ep", "tp")
    assert (pair.prefill.devices.shape, pair.decode.devices.shape) == ((2, 1), (4, 1))
    assert not set(pair.prefill.devices.flat) & set(pair.decode.devices.flat)


def test_neighbours_share_a_rank() -> None:
    pair = make_meshes(2, 4, tensor_parallel_size=2)
    assert (pair.prefill.devices.shape, pair.decode.devices.shape) == ((1, 2), (2, 2))
    assert [device.id for device in pair.decode.devices.flat] == [2, 3, 4, 5]
    with pytest.raises(MeshError, match="tensor_parallel_size=2 does not divide 3 devices; use a number of devices"):
        make_meshes(2, 3, tensor_parallel_size=2)


def test_too_few_devices() -> None:
    with pytest.raises(MeshError, match=f"need 99 devices but JAX has {len(jax.devices())} of kind cpu; set XLA_FLAGS"):
        make_meshes(1, 98)


def test_axis_table() -> None:
    assert partition_spec(("expert", "ffn", "embed")) == PartitionSpec("ep", "tp", None)
    assert partition_spec(("engram_rows", "engram_columns")) == PartitionSpec("ep", "tp")
    assert partition_spec(("index_heads", "q_lora")) == PartitionSpec(None, None)
    assert partition_spec(("slot", None)) == PartitionSpec("ep", None)
