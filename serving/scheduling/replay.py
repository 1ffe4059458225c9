"""Where a prefill starts after a prefix hit, and how long its last chunk must be.

Pages hold no window rows, so a request that takes its first H tokens from the prefix cache runs some of them again
for their window rows. Rows below H are not written: other requests read those pages.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple

from widemesh.model.config import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplayConfig:
    """How much is run again. `bounded` is cheap and an approximation, `exact` and `full` change no logit."""

    prefix: Literal["bounded", "exact"] = "bounded"  # rows before a prefix hit: one window, or all that matter
    tail: Literal["bounded", "full"] = "bounded"  # rows of the later layers: one window per prompt, or all

    def __post_init__(self) -> None:
        if self.prefix not in ("bounded", "exact"):
            raise ConfigError(f"prefix={self.prefix!r} is no kind of replay; use 'bounded' or 'exact'")
        if self.tail not in ("bounded", "full"):
            raise ConfigError(f"tail={self.tail!r} is no kind of replay; use 'bounded' or 'full'")


class Restart(NamedTuple):
    """A prefill runs tokens from `start` and writes pages from token `write_from`, the length of the hit."""

    start: int
    write_from: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplayRule:
    """`ReplayConfig` for one model."""

    config: ReplayConfig = ReplayConfig()
    window: int  # tokens that a window row's query sees, itself included
    num_layers: int
    max_ratio: int  # tokens of the largest compressed entry; a start never splits one

    def restart(self, hit: int) -> Restart:
        """For a hit of so many tokens. (0, 0) when the hit is not worth taking."""
        if self.config.prefix == "bounded":
            if hit <= self.window:
                return Restart(0, 0)
            start = hit - self.window
        else:
            # The last layer's window at H needs W rows below it, and each layer under it another W - 1.
            start = max(0, hit - (self.window + (self.num_layers - 1) * (self.window - 1)))
        return Restart(start // self.max_ratio * self.max_ratio, hit)

    def shortest_last_chunk(self, rows: int) -> int:
        """Fewest rows of the last chunk when `rows` are run in all: the tail runs on the last chunk alone."""
        return min(self.window, rows) if self.config.tail == "bounded" else 1


def next_chunk(rows_left: int, most: int, shortest_last: int) -> int:
    """Rows of the next chunk, at most `most`; 0 when that is too few for a chunk that leaves a whole last one.

    A last chunk is never shorter than `shortest_last`; the chunk before it is cut instead.
    """
    return rows_left if rows_left <= most else max(0, min(most, rows_left - shortest_last))
