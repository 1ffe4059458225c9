"""Dispatch of sparse attention by the form of the selection."""

from __future__ import annotations

from jaxtyping import Array, Float, Int32

from widemesh.pallas_kernels.sparse_attention.dense import attend_mask
from widemesh.pallas_kernels.sparse_attention.reference import attend_gathered
from widemesh.pallas_kernels.sparse_attention.selection import SelectedMask, Selection


def sparse_attention(
    q: Float[Array, "B S N H"],
    window_kv: Float[Array, "B WS H"],
    start: Int32[Array, "B"],
    first: Int32[Array, "B"],
    entries: Float[Array, "B L H"] | Float[Array, "B S k H"],
    selection: Selection,
    sink: Float[Array, "N"],
    *,
    window: int,
    ratio: int,
    start_bound: int,
    bf16_rounding: bool = False,
) -> Float[Array, "B S N H"]:
    """Attention over window and selected entries; see `attend_gathered` for the layout.

    `entries`: all L of them for a mask; those that the indices name for indices.

    Raises ValueError for bf16 rounding with a mask: the released rounding depends on the order of the slots, which
    only indices have.
    """
    if isinstance(selection, SelectedMask):
        if bf16_rounding:
            raise ValueError("bf16_rounding=True needs a selection by indices, not by mask")
        return attend_mask(q, window_kv, start, first, entries, selection.mask, sink, window=window, ratio=ratio,
                           start_bound=start_bound)  # fmt: skip
    return attend_gathered(q, window_kv, start, first, entries, selection.indices >= 0, sink, window=window,
                           bf16_rounding=bf16_rounding)  # fmt: skip
