"""Attention over the sliding window and the selected compressed entries."""

from widemesh.pallas_kernels.sparse_attention.op import sparse_attention
from widemesh.pallas_kernels.sparse_attention.packed_op import attend_packed
from widemesh.pallas_kernels.sparse_attention.reference import visible_entries
from widemesh.pallas_kernels.sparse_attention.selection import (
    SelectedIndices,
    SelectedMask,
    Selection,
    empty_selection,
)

__all__ = [
    "SelectedIndices",
    "SelectedMask",
    "Selection",
    "attend_packed",
    "empty_selection",
    "sparse_attention",
    "visible_entries",
]
