"""Working through the rows of a step a few at a time, each on no more compressed entries than it can see.

For ops that compare every row with every entry on a CPU: the intermediates of one block stay in a core's second-level
cache, and causality halves the work of a prefill.
"""

from __future__ import annotations

from collections.abc import Callable

from jax import lax
from jaxtyping import Array, Int32, Shaped

# Rows whose blocks share one bound on the entries, a multiple of this. Smaller tiers follow the causal edge more
# closely, but each adds its ops to the program.
_TIER_ROWS = 128
_MOST_TIERS = 8


def fill_row_blocks(
    out: Shaped[Array, "B S ..."],
    body: Callable[[Int32[Array, ""] | int, int, int], Shaped[Array, "B rows ..."]],
    *,
    block: int,
    entries: int,
    ratio: int,
    start_bound: int,
) -> Shaped[Array, "B S ..."]:
    """`out` with `body(first, rows, limit)` written at row `first` on, for blocks of `block` rows, in order.

    `limit` (static) bounds the entries that the block's rows can see if no request starts after `start_bound`: entry j
    is seen from position (j + 1) * ratio - 1 on; with ratio 0 there are none. Axes of `body`'s result after the rows
    may be shorter than those of `out`; the rest of `out` stays.
    """

    def write(first: Int32[Array, ""] | int, rows: int, limit: int, out: Array) -> Array:
        return lax.dynamic_update_slice(out, body(first, rows, limit), (0, first, *[0] * (out.ndim - 2)))

    for first, last, limit in _tiers(out.shape[1], entries, ratio, start_bound):
        count, rest = divmod(last - first, block)
        if count == 1:
            out = write(first, block, limit, out)
        elif count:
            out = lax.fori_loop(
                0, count, lambda i, out, first=first, limit=limit: write(first + i * block, block, limit, out), out
            )
        if rest:
            out = write(last - rest, rest, limit, out)
    return out


def _tiers(rows: int, entries: int, ratio: int, start_bound: int) -> list[tuple[int, int, int]]:
    """(first row, row after the last, limit); neighbours with the same limit are joined."""
    tiers: list[tuple[int, int, int]] = []
    size = max(1, -(-rows // (_TIER_ROWS * _MOST_TIERS))) * _TIER_ROWS
    for first in range(0, rows, size):
        last = min(first + size, rows)
        limit = min(entries, (start_bound + last) // ratio) if ratio else 0
        if tiers and tiers[-1][2] == limit:
            first = tiers.pop()[0]
        tiers.append((first, last, limit))
    return tiers
