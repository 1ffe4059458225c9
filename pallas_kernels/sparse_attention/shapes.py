"""Named shapes of `attend_packed`: of the released model for reports and tuning, and tiny ones for the interpreter."""

from __future__ import annotations

import dataclasses

from widemesh.pallas_kernels.layout import PageLayout, SourceLayout


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttendShape:
    """One call of the op."""

    name: str
    requests: int
    rows: int  # of each request
    kept: int  # window rows per request: a ring, or the chunk and the window before it
    k: int = 512
    window: int = 128
    heads: int = 64
    dim: int = 512
    page_size: int = 64
    pages_per_request: int = 256

    @property
    def layout(self) -> PageLayout:
        """Three sources of ratio 2 and one of ratio 1, as released."""
        return PageLayout.build(page_size=self.page_size, ratios=(2, 2, 2, 1), head_dim=self.dim, index_dim=128,
                                record="packed")  # fmt: skip

    @property
    def source(self) -> SourceLayout:
        """The source that is read."""
        return self.layout.sources[0]


DECODE = AttendShape(name="decode, 64 rows", requests=64, rows=1, kept=160)
VERIFY = AttendShape(name="verify, 64 x 6 rows", requests=64, rows=6, kept=160)
PREFILL = AttendShape(name="prefill, 2048 rows", requests=1, rows=2048, kept=2048 + 127)

RELEASED = (DECODE, VERIFY, PREFILL)
