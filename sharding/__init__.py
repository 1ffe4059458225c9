"""Meshes, the logical-axis table and the collectives of the MoE exchange."""

from widemesh.sharding.axes import EP_AXIS, TP_AXIS, named_sharding, partition_spec, whole_parts
from widemesh.sharding.exchange import AllGatherExchange, Exchange, LocalExchange
from widemesh.sharding.mesh import MeshError, MeshPair, make_mesh, make_meshes, request_cpu_devices

__all__ = ["EP_AXIS", "TP_AXIS", "AllGatherExchange", "Exchange", "LocalExchange", "MeshError", "MeshPair",
           "make_mesh", "make_meshes", "named_sharding", "partition_spec", "request_cpu_devices",
           "whole_parts"]  # fmt: skip
