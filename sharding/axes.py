"""The one table from logical axis names to mesh axes.

Layers name logical axes only; nothing else in the project knows which mesh axis a dimension lies on.
"""

from __future__ import annotations

from jax.sharding import Mesh, NamedSharding, PartitionSpec

EP_AXIS = "ep"
TP_AXIS = "tp"

# Dense weights are replicated over `ep`; what is not named here is replicated. Over `tp` lie the dimensions in which
# large matrices are cut; each must divide evenly (`EngineConfig.check_model`).
LOGICAL_TO_MESH: dict[str, str | None] = {
    "slot": EP_AXIS,  # requests, and everything a request owns
    "expert": EP_AXIS,  # physical expert slots
    "engram_rows": EP_AXIS,  # of tables that are 189 GiB in the released model; filled up to whole parts
    "heads": TP_AXIS,  # query heads: each device attends with its own
    "o_groups": TP_AXIS,  # of the output projection, in the order of the heads
    "ffn": TP_AXIS,  # width of routed and shared experts
    "vocab": TP_AXIS,  # rows of the embedding and of the head
    "engram_columns": TP_AXIS,  # of a table's rows: a device reads its part of every row
    "engram_out": TP_AXIS,  # outputs of Engram's key and value projection
}


def partition_spec(axes: tuple[str | None, ...]) -> PartitionSpec:
    """Mesh axes of an array from its logical axes, one name (or None) per dimension."""
    return PartitionSpec(*(LOGICAL_TO_MESH.get(name) if name else None for name in axes))


def whole_parts(shape: tuple[int, ...], axes: tuple[str | None, ...], ranks: int) -> tuple[int, ...]:
    """The shape with dimensions that lie in parts over `ep` rounded up to a multiple of its ranks."""
    spec = partition_spec(axes)
    return tuple(-(-size // ranks) * ranks if part == EP_AXIS else size for size, part in zip(shape, spec, strict=True))


def named_sharding(mesh: Mesh, axes: tuple[str | None, ...]) -> NamedSharding:
    """`partition_spec` on a mesh."""
    return NamedSharding(mesh, partition_spec(axes))
