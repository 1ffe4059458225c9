"""Who sends what to whom: an all-gather over N ranks in ceil(log2 N) rounds.

Before round k a rank holds the rows of 2^k ranks, its own first. It sends them to one rank, receives as many from
another, and holds 2^(k+1); the last round sends only what is still missing.

    N a power of two: recursive doubling. Position i of rank r is the row of rank r XOR i; round k swaps with r XOR 2^k.
    otherwise: Bruck et al., IEEE TPDS 8(11), 1997. Position i of rank r is the row of rank (r + i) mod N; round k
               sends to r - 2^k and receives from r + 2^k.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Round:
    """One send and one receive of a rank: the first `rows` positions go out, what comes in follows at `start`."""

    to: int
    source: int
    start: int
    rows: int


@dataclasses.dataclass(frozen=True)
class Schedule:
    """One rank's part of the all-gather; the row of rank i lies at `position[i]` when it is over."""

    rounds: tuple[Round, ...]
    position: tuple[int, ...]


def make_schedule(rank: int, size: int) -> Schedule:
    """The rounds of `rank` among `size` ranks, of which there are ceil(log2 size)."""
    spans = [1 << k for k in range((size - 1).bit_length())]
    if size & (size - 1) == 0:
        rounds = [Round(rank ^ span, rank ^ span, span, span) for span in spans]
        return Schedule(tuple(rounds), tuple(rank ^ other for other in range(size)))
    rounds = [Round((rank - span) % size, (rank + span) % size, span, min(span, size - span)) for span in spans]
    return Schedule(tuple(rounds), tuple((other - rank) % size for other in range(size)))
