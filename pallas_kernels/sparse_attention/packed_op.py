"""Attention that reads window rows and selected entries as the bytes they are cached as."""

from __future__ import annotations

from jaxtyping import Array, Float, Int32, UInt8

from widemesh.pallas_kernels.gpu import Implementation, choose, device_target
from widemesh.pallas_kernels.layout import SourceLayout, VectorLayout
from widemesh.pallas_kernels.sparse_attention.packed_reference import attend_packed_reference


def attend_packed(
    q: Float[Array, "B S N H"],
    window_rows: UInt8[Array, "B M row_bytes"],
    origin: Int32[Array, "B"],
    start: Int32[Array, "B"],
    first: Int32[Array, "B"],
    pages: UInt8[Array, "pages page_bytes"],
    table: Int32[Array, "B P"],
    indices: Int32[Array, "B S k"],
    sink: Float[Array, "N"],
    *,
    source: SourceLayout | None,
    window_layout: VectorLayout,
    window: int,
    implementation: Implementation | None = None,
) -> Float[Array, "B S N H"]:
    """Attention of each row over its window and its selected entries, with a sink per head. Result in q's dtype.

    Row i of request b stands at position p = start + i and sees the window rows at positions
    max(first, p - window + 1) .. p and the entries indices[b, i] of `source` (-1 = none; k may be 0, and then `source`
    may be None). The window row of position p lies at (p - origin) mod M: a ring, or a plain array whose first row is
    at position `origin`. Keys and values are the same vectors, shared by all heads:

        w[n, j] = exp(q[n] . k[j] / sqrt(H)),   out[n] = sum_j w[n, j] k[j] / (sum_j w[n, j] + exp(sink[n]))

    A row that sees nothing gives zeros. Window rows have the layout `window_layout`.

    The kernel computes with float16 operands and f32 sums: cached values are exact in it, q is clipped to its range,
    the weights are rounded to 11 bits.

    Raises ValueError when M is too small for the rows that one step sees together, a record has another size, or, for
    the kernel, N is no multiple of 64, H not 512, a cache not packed, or window and k too long for its lists.
    """
    check_shapes(q, window_rows, indices, source, window_layout, window)
    if choose("attend_packed", implementation) == "reference":
        return attend_packed_reference(q, window_rows, origin, start, first, pages, table, indices, sink,
                                       source=source, window_layout=window_layout, window=window)  # fmt: skip
    # The kernels are imported where they run: a CPU process needs neither their modules nor their start-up time.
    from widemesh.pallas_kernels.sparse_attention.mosaic import attend_packed_mosaic

    target = device_target()
    assert target is not None, "choose() takes the kernel only where there is a target"
    return attend_packed_mosaic(q, window_rows, origin, start, first, pages, table, indices, sink, source=source,
                                window_layout=window_layout, window=window, target=target)  # fmt: skip


def check_shapes(
    q: Float[Array, "B S N H"],
    window_rows: UInt8[Array, "B M row_bytes"],
    indices: Int32[Array, "B S k"],
    source: SourceLayout | None,
    window_layout: VectorLayout,
    window: int,
) -> None:
    """Raise ValueError for arrays that do not fit together."""
    dim = q.shape[3]
    needed = window - 1 + q.shape[1]
    if window_rows.shape[1] < needed:
        raise ValueError(
            f"window_rows holds M={window_rows.shape[1]} rows, but {q.shape[1]} query rows with window={window} see "
            f"{needed} positions; pass at least {needed}"
        )
    if window_rows.shape[2] != window_layout.num_bytes:
        raise ValueError(
            f"window_rows has records of {window_rows.shape[2]} bytes, window_layout says {window_layout.num_bytes}; "
            "pass the layout that wrote them"
        )
    for name, layout in (("window_layout", window_layout), ("source.row", source.row if source else window_layout)):
        if layout.dim != dim:
            raise ValueError(f"{name}.dim={layout.dim} must equal the head dim of q, {dim}")
    if source is None and indices.shape[2]:
        raise ValueError(f"indices name k={indices.shape[2]} entries per row; pass the source they belong to")
