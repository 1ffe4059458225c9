"""Choosing compressed entries: index scores and their top-k in one op."""

from __future__ import annotations

from jaxtyping import Array, Float, Int32, UInt8

from widemesh.pallas_kernels.gpu import Implementation, choose, device_target
from widemesh.pallas_kernels.layout import SourceLayout
from widemesh.pallas_kernels.select_entries.reference import select_entries_reference
from widemesh.pallas_kernels.select_entries.selected import Selected


def select_entries(
    queries: Float[Array, "B S I J"],
    weights: Float[Array, "B S I"],
    pages: UInt8[Array, "pages page_bytes"],
    table: Int32[Array, "B P"],
    visible: Int32[Array, "B S"],
    blocks: Int32[Array, "B S C"] | None,
    *,
    source: SourceLayout,
    k: int,
    block: int,
    top_blocks: int | None,
    implementation: Implementation | None = None,
) -> Selected:
    """The `k` best of the first `visible` entries of each row, and its best blocks if `top_blocks` is given.

        score[b, s, j] = sum over heads i of relu(queries[b, s, i] . key[b, j]) * weights[b, s, i]        in f32

    With `blocks` (ascending block numbers, -1 = empty) only the entries of those blocks compete. Equal scores go to
    the lower index. A block of `block` entries scores its maximum; the block of the newest visible entry is always
    kept and counts toward `top_blocks`. Formulas: docs/model.md, "Index queries and scores" and "Two-level candidates".

    On a GPU no row of scores leaves the chip; the result equals the reference's unless two scores differ by less than
    the order of their f32 sums.

    Raises ValueError if both `blocks` and `top_blocks` are given: candidates are chosen among all entries. Raises
    ValueError for what the GPU kernels cannot read: records that are not packed, an index dim other than 128, pages
    with other than 32 or 64 keys of the source, blocks of other than 8 entries.
    """
    if blocks is not None and top_blocks is not None:
        raise ValueError(
            f"top_blocks={top_blocks} chooses candidate blocks among all entries; leave blocks or top_blocks None"
        )
    implementation = choose("select_entries", implementation)
    target = device_target()
    if implementation == "mosaic" and target is not None:
        from widemesh.pallas_kernels.select_entries.mosaic import select_entries_mosaic

        return select_entries_mosaic(queries, weights, pages, table, visible, blocks, source=source, k=k, block=block,
                                     top_blocks=top_blocks, target=target)  # fmt: skip
    return select_entries_reference(
        queries, weights, pages, table, visible, blocks, source=source, k=k, block=block, top_blocks=top_blocks
    )
