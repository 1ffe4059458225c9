"""Copies of one expert on ranks of their own: two on one rank share nothing, and the load stays where it was."""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Float64, Int32


def find_duplicates(owner: Int32[np.ndarray, "L R Q"]) -> Bool[np.ndarray, "L R Q"]:
    """Slots whose expert lies on the same rank in an earlier slot too. Empty slots are none."""
    order = np.argsort(owner, axis=-1, kind="stable")
    ordered = np.take_along_axis(owner, order, -1)
    again = np.zeros(owner.shape, bool)
    again[..., 1:] = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
    found = np.empty_like(again)
    np.put_along_axis(found, order, again, -1)
    return found


def spread_duplicates(owner: Int32[np.ndarray, "L R Q"], load: Float64[np.ndarray, "L R Q"]) -> None:
    """Swap slots between ranks, in place, until no rank holds an expert twice. `load` per slot is swapped along.

    Of all swaps that part copies, each time the one is taken that leaves the busier of the two ranks least busy, so a
    layer's maximum grows only where no swap keeps it. As long as no expert has more copies than there are ranks, some
    swap always makes progress: a rank without the expert has another one more often than the crowded rank does.
    """
    while (crowded := find_duplicates(owner)).any():
        for layer in np.flatnonzero(crowded.any((1, 2))):
            rank, place = np.argwhere(crowded[layer])[0]
            _swap_best(owner[layer], load[layer], int(rank), int(place))


def _swap_best(owner: Int32[np.ndarray, "R Q"], load: Float64[np.ndarray, "R Q"], rank: int, place: int) -> None:
    ranks, quota = owner.shape
    expert, moved = owner[rank, place], load[rank, place]
    total = load.sum(1)
    held = owner[:, :, None] == owner[:, None, :]
    # How much crowding a swap removes: copies of the incoming expert beside it there, less those it finds here.
    beside = np.where(owner >= 0, held.sum(2) - 1, 0)
    here = np.where(owner >= 0, (owner[:, :, None] == owner[rank]).sum(2), 0)
    parts = (beside[rank, place] + beside - here > 0) & ~(owner == expert).any(1)[:, None]
    parts[rank] = False
    if not parts.any():
        raise ValueError(f"expert {expert} has more copies than there are ranks; they cannot be spread over {ranks}")
    gone, come = total[rank] - moved + load, total[:, None] - load + moved
    after = np.where(parts, np.maximum(gone, come), np.inf)
    there, other = divmod(int(after.argmin()), quota)
    owner[rank, place], owner[there, other] = owner[there, other], expert
    load[rank, place], load[there, other] = load[there, other], moved
