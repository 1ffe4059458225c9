"""Swaps that take load off a layer's busiest rank, where packing in one greedy pass has left something to gain."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float64, Int32

_LEAST_GAIN = 1e-3  # of a rank's mean load; below it a swap is not worth the row that it moves


def refine(owner: Int32[np.ndarray, "L R Q"], load: Float64[np.ndarray, "L R Q"], *, max_swaps: int,
           enough: Float64[np.ndarray, "L"] | None = None) -> None:  # fmt: skip
    """Swap slots of each layer's busiest rank with slots of others, in place, as long as its maximum falls.

    Each time the swap is made that leaves the busier of the two ranks least busy, ties to the first; no swap puts an
    expert on a rank twice. All layers make their n-th swap together, `max_swaps` at the most. A layer stops when its
    busiest rank carries no more than `enough`.
    """
    layers, ranks, quota = owner.shape
    mean = load.sum((1, 2)) / ranks
    enough = mean if enough is None else enough
    active = np.arange(layers)
    for _ in range(max_swaps):
        active = active[load[active].sum(2).max(1) > enough[active]]
        if not len(active):
            return
        own, one = owner[active], load[active]
        each = np.arange(len(active))
        total = one.sum(2)
        busiest = total.argmax(1)
        top = total[each, busiest]
        mine, my_load = own[each, busiest], one[each, busiest]
        # Load that each pair of slots (mine, theirs) would move off the busiest rank, and what both would then carry.
        moved = my_load[:, :, None, None] - one[:, None]
        after = np.maximum(top[:, None, None, None] - moved, total[:, None, :, None] + moved)
        theirs_here = (own[:, :, :, None] == mine[:, None, None]).any(3) & (own >= 0)
        mine_there = (own[:, None] == mine[:, :, None, None]).any(3) & (mine >= 0)[:, :, None]
        after = np.where(theirs_here[:, None] | mine_there[..., None], np.inf, after).reshape(len(active), -1)
        best = after.argmin(1)
        gains = after[each, best] < top - _LEAST_GAIN * mean[active]
        place, rank, other = np.unravel_index(best, (quota, ranks, quota))
        at, mine_at, theirs_at = active[gains], (busiest[gains], place[gains]), (rank[gains], other[gains])
        for x in (owner, load):
            x[at, *mine_at], x[at, *theirs_at] = x[at, *theirs_at], x[at, *mine_at]
        active = at
