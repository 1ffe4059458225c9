"""Checkpoints in the released layout: the tensor table, reading, writing, converting."""

from widemesh.model.checkpoint.convert import convert_checkpoint
from widemesh.model.checkpoint.errors import CheckpointError
from widemesh.model.checkpoint.reader import Checkpoint
from widemesh.model.checkpoint.storage import Form
from widemesh.model.checkpoint.table import TensorSpec, is_recognised_extra, tensor_table
from widemesh.model.checkpoint.writer import write_checkpoint

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "Form",
    "TensorSpec",
    "convert_checkpoint",
    "is_recognised_extra",
    "tensor_table",
    "write_checkpoint",
]
