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


def test_too_few_devices() -> None:
    with pytest.raises(MeshError, match=f"need 99 devices but JAX has {len(jax.devices())} of kind cpu; set XLA_FLAGS"):
        make_meshes(1, 98)


def test_axis_table() -> None:
    assert partition_spec(("expert", "ffn", "embed")) == PartitionSpec("ep", None, None)
    assert partition_spec(("slot", None)) == PartitionSpec("ep", None)
