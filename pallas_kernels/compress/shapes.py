"""Named shapes of compression into pages, for tests, the ahead-of-time report and benchmarks."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompressShape:
    """B requests with S rows each."""

    name: str
    requests: int
    rows: int
    ratio: int
    head_dim: int = 512
    index_dim: int = 128
    pairs: int = 32
    drafts: int = 5  # rows that may be taken back: the ring keeps as many beyond ratio - 1
    page_size: int = 64
    table_pages: int = 2048  # 131,072 tokens
    pages: int = 65_536
    positions: int = 1_048_576

    @property
    def open_rows(self) -> int:
        """Rows of the ring."""
        return self.ratio - 1 + self.drafts if self.ratio > 1 else 0


RELEASED = (
    CompressShape(name="decode", requests=64, rows=1, ratio=2),
    CompressShape(name="verify", requests=64, rows=6, ratio=2),
    CompressShape(name="prefill", requests=1, rows=2048, ratio=2),
    CompressShape(name="prefill-ratio-1", requests=1, rows=2048, ratio=1),
)
