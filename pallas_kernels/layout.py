"""Where every byte of cached state lies, from plain integers: one layout for all programs, kernels and transfers.

A page holds the compressed entries and index keys of `page_size` consecutive tokens, for every source of compressed
KV (a layer that owns a compressor), in layer order:

    for each source:   page_size / ratio compressed rows, each its values and then its scales
    for each source:   page_size / ratio key values, then as many key scales (planar)

A window row is its values and then its scales. Packed records follow docs/model.md, "Quantised caches": window rows
are E4M3 with a power-of-two scale per 32 values, compressed rows E2M1 with an E4M3 scale per 16, keys E2M1 with a
power-of-two scale per 32. f32 records hold the values as they are and no scales. Released sizes, packed: 528 B per
window row, 288 B per compressed row, 68 B per key, 890 B per token, 56,960 B per page of 64 tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Literal

from widemesh.pallas_kernels.formats import FP8_GROUP, MXFP4_GROUP, NVFP4_GROUP

Record = Literal["packed", "f32"]
Code = Literal["f32", "fp8", "nvfp4", "mxfp4"]

_GROUP = {"fp8": FP8_GROUP, "nvfp4": NVFP4_GROUP, "mxfp4": MXFP4_GROUP}


@dataclasses.dataclass(frozen=True, kw_only=True)
class VectorLayout:
    """Bytes of one cached vector of `dim` values."""

    code: Code
    dim: int

    @property
    def value_bytes(self) -> int:
        """Bytes of the codes alone."""
        if self.code == "f32":
            return 4 * self.dim
        return self.dim if self.code == "fp8" else -(-self.dim // 2)

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales, one per group; a short last group has one too."""
        return 0 if self.code == "f32" else -(-self.dim // _GROUP[self.code])

    @property
    def num_bytes(self) -> int:
        """Values and scales together."""
        return self.value_bytes + self.scale_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceLayout:
    """The parts of one source in a page. Offsets are in bytes from the start of the page."""

    ratio: int  # tokens per row
    rows: int  # rows per page
    row: VectorLayout
    key: VectorLayout
    row_offset: int
    key_offset: int

    @property
    def key_scale_offset(self) -> int:
        """Where the key scales of the page begin."""
        return self.key_offset + self.rows * self.key.value_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class PageLayout:
    """Layout of pages and of window rows."""

    page_size: int  # tokens
    page_bytes: int
    sources: tuple[SourceLayout, ...]
    window: VectorLayout

    @classmethod
    def build(
        cls, *, page_size: int, ratios: Sequence[int], head_dim: int, index_dim: int, record: Record
    ) -> PageLayout:
        """Layout for sources of these ratios in layer order.

        Raises ValueError for a page size that no whole number of groups fills.
        """
        for ratio in ratios:
            if page_size < 1 or page_size % ratio:
                raise ValueError(f"page_size={page_size} must be a multiple of the compress ratio {ratio}")
        packed = record == "packed"
        row = VectorLayout(code="nvfp4" if packed else "f32", dim=head_dim)
        key = VectorLayout(code="mxfp4" if packed else "f32", dim=index_dim)
        rows = [page_size // ratio for ratio in ratios]
        *row_offsets, keys_begin = _offsets((n * row.num_bytes for n in rows), 0)
        *key_offsets, end = _offsets((n * key.num_bytes for n in rows), keys_begin)
        sources = tuple(
            SourceLayout(ratio=ratio, rows=n, row=row, key=key, row_offset=row_offset, key_offset=key_offset)
            for ratio, n, row_offset, key_offset in zip(ratios, rows, row_offsets, key_offsets, strict=True)
        )
        window = VectorLayout(code="fp8" if packed else "f32", dim=head_dim)
        return cls(page_size=page_size, page_bytes=end, sources=sources, window=window)


def _offsets(sizes: Iterator[int], begin: int) -> list[int]:
    """Running sums from `begin`, the end included."""
    offsets = [begin]
    for size in sizes:
        offsets.append(offsets[-1] + size)
    return offsets
