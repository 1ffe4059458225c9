"""Named shapes of the hyper-connections, for tests, the ahead-of-time report and benchmarks."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class MhcShape:
    """T rows of C streams of D values."""

    name: str
    rows: int
    streams: int = 4
    hidden: int = 5120


RELEASED = (
    MhcShape(name="decode", rows=64),
    MhcShape(name="verify", rows=384),
    MhcShape(name="prefill", rows=2048),
)
