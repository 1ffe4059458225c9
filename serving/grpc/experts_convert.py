"""The state of expert placement to protocol messages and back."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from jaxtyping import Int32, Int64

from widemesh.eplb import ExpertLayout
from widemesh.serving.expert_control import ExpertStatus
from widemesh.serving.grpc.protos import experts_pb2 as pb

_LAYOUT = ("num_layers", "num_experts", "ranks", "num_redundant_experts", "max_copies_per_expert", "num_groups",
           "num_nodes")  # fmt: skip
# Fields that are the same in the dataclass and in the message.
_PLAIN = ("model", "placement_hash", "imported_hash", "load_steps", "balancedness", "phase", "layers_done",
          "layers_total", "last_failure", "moved_bytes", "moved_rows", "least_rows", "is_paused", "is_disabled",
          "steps_to_trigger", "feasible")  # fmt: skip


def write_status(status: ExpertStatus, *, include_load: bool, include_placement: bool) -> pb.GetExpertStatusResponse:
    """The message, with the arrays that are asked for."""
    layout = {name: getattr(status.layout, name) for name in _LAYOUT}
    response = pb.GetExpertStatusResponse(
        layout=pb.ExpertLayout(num_slots=status.layout.num_slots, **layout), rebalances=status.rebalances,
        **{name: getattr(status, name) for name in _PLAIN},
    )  # fmt: skip
    if include_load:
        response.load.CopyFrom(pb.Int64Array(shape=status.load.shape, values=status.load.reshape(-1).tolist()))
    if include_placement:
        owner = status.slot_owner
        response.slot_owner.CopyFrom(pb.Int32Array(shape=owner.shape, values=owner.reshape(-1).tolist()))
    return response


def read_status(response: pb.GetExpertStatusResponse) -> ExpertStatus:
    """The state in a message that has both arrays. Raises ValueError, of which ConfigError is one, for a wrong one."""
    layout = ExpertLayout(**{name: getattr(response.layout, name) for name in _LAYOUT})
    shape = (layout.num_layers, layout.num_slots)
    return ExpertStatus(
        layout=layout, slot_owner=_read_array(response.slot_owner, shape, np.int32),
        load=_read_array(response.load, shape, np.int64), rebalances=dict(response.rebalances),
        **{name: getattr(response, name) for name in _PLAIN},
    )  # fmt: skip


def _read_array(
    array: pb.Int32Array | pb.Int64Array, shape: tuple[int, int], dtype: type[np.integer[Any]]
) -> Int32[np.ndarray, "L X"] | Int64[np.ndarray, "L X"]:
    if tuple(array.shape) != shape or len(array.values) != math.prod(shape):
        raise ValueError(f"an array of shape {tuple(array.shape)} with {len(array.values)} values; it must be {shape}")
    return np.array(array.values, dtype).reshape(shape)
