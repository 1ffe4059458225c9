"""Named shapes of the Engram kernels, for tests, the ahead-of-time report and benchmarks."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngramShape:
    """T rows; each looks up `columns` table rows."""

    name: str
    rows: int
    streams: int = 4
    hidden: int = 5120
    columns: int = 24
    dim: int = 256
    table_rows: int = 1 << 24  # 4.1 GiB: enough that byte offsets need 64 bits. The released tables have 384 million


RELEASED = (
    EngramShape(name="decode", rows=64),
    EngramShape(name="verify", rows=384),
    EngramShape(name="prefill", rows=2048),
)
