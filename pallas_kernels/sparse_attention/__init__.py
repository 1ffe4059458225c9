"""Attention over the sliding window and the selected compressed entries."""

from widemesh.pallas_kernels.sparse_attention.op import sparse_attention
from widemesh.pallas_kernels.sparse_attention.reference import visible_entries
from widemesh.pallas_kernels.sparse_attention.selection import (
    SelectedIndices,
    SelectedMask,
    Selection,
    empty_selection,
)

__all__ = ["SelectedIndices", "SelectedMask", "Selection", "empty_selection", "sparse_attention", "visible_entries"]
