"""Named shapes: of the released model for reports and tuning, and tiny ones for the interpreter."""

from __future__ import annotations

import dataclasses

from widemesh.pallas_kernels.layout import PageLayout, SourceLayout


@dataclasses.dataclass(frozen=True, kw_only=True)
class SelectShape:
    """One call of the op."""

    name: str
    requests: int
    rows: int  # of each request
    entries: int  # room of each request
    ratio: int = 1
    heads: int = 32
    dim: int = 128
    k: int = 512
    block: int = 8
    top_blocks: int | None = None
    among_blocks: int | None = None  # candidates per row that entries must belong to
    page_size: int = 64
    head_dim: int = 512

    @property
    def pages_per_request(self) -> int:
        """Of the page table."""
        return self.entries * self.ratio // self.page_size

    @property
    def layout(self) -> PageLayout:
        """Three sources of ratio 2 and one of ratio 1, as released."""
        return PageLayout.build(page_size=self.page_size, ratios=(2, 2, 2, 1), head_dim=self.head_dim,
                                index_dim=self.dim, record="packed")  # fmt: skip

    @property
    def source(self) -> SourceLayout:
        """The source that is read."""
        return next(source for source in self.layout.sources if source.ratio == self.ratio)


DECODE_8K = SelectShape(name="decode, 8K entries", requests=64, rows=1, entries=8192, ratio=2)
DECODE_128K = SelectShape(name="decode, 128K entries, candidates written", requests=64, rows=1, entries=131_072,
                          top_blocks=2048)  # fmt: skip
DECODE_BLOCKS = SelectShape(name="decode, among 2048 blocks of 128K entries", requests=64, rows=1, entries=131_072,
                            among_blocks=2048)  # fmt: skip
VERIFY_128K = SelectShape(name="verify, 6 rows, 128K entries, candidates written", requests=64, rows=6,
                          entries=131_072, top_blocks=2048)  # fmt: skip
PREFILL = SelectShape(name="prefill, 2048 rows, 8K entries", requests=1, rows=2048, entries=8192, ratio=2)

RELEASED = (DECODE_8K, DECODE_128K, DECODE_BLOCKS, VERIFY_128K, PREFILL)

TINY = SelectShape(name="tiny", requests=4, rows=1, entries=640, heads=32, k=20, top_blocks=9, head_dim=32)
TINY_RATIO_2 = SelectShape(name="tiny, ratio 2", requests=2, rows=3, entries=576, ratio=2, heads=16, k=130, head_dim=32)
TINY_BLOCKS = SelectShape(name="tiny, among blocks", requests=2, rows=1, entries=640, heads=32, k=20,
                          among_blocks=70, head_dim=32)  # fmt: skip
