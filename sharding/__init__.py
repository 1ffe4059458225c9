"""Meshes, the logical-axis table and the collectives: of the MoE exchange, and of layers in parts over `tp`.

Names are imported on first use: the step ticket below this folder must not bring jax.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from widemesh.sharding.axes import EP_AXIS, TP_AXIS, named_sharding, partition_spec, whole_parts
    from widemesh.sharding.exchange import AllGatherExchange, Exchange, LocalExchange
    from widemesh.sharding.mesh import MeshError, MeshPair, make_mesh, make_meshes, request_cpu_devices
    from widemesh.sharding.tensor_parallel import TensorParallel

__all__ = ["EP_AXIS", "TP_AXIS", "AllGatherExchange", "Exchange", "LocalExchange", "MeshError", "MeshPair",
           "TensorParallel", "make_mesh", "make_meshes", "named_sharding", "partition_spec", "request_cpu_devices",
           "whole_parts"]  # fmt: skip

# The modules above, each of which is looked through for a name that is wanted; no list of names is kept twice.
_MODULES = ("axes", "exchange", "mesh", "tensor_parallel")


def __getattr__(name: str) -> object:
    if name in __all__:
        for module in _MODULES:
            found = getattr(importlib.import_module(f"widemesh.sharding.{module}"), name, None)
            if found is not None:
                return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
