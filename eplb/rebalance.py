"""From the load of a window and the placement that serves to the next placement, or to none."""

from __future__ import annotations

import dataclasses

import numpy as np
from jaxtyping import Int32, Num

from widemesh.eplb.balance import balancedness, busiest_rank, expected_slot_load
from widemesh.eplb.duplicates import spread_duplicates
from widemesh.eplb.keeping import keep_ranks, keep_slots
from widemesh.eplb.layout import ExpertLayout
from widemesh.eplb.placement import initial_placement
from widemesh.eplb.policy import check_load, plan_placement
from widemesh.eplb.refining import refine

_NEAR = 0.01  # more on the busiest rank than a new plan leaves there, for which swaps are preferred to it


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Rebalance:
    """A decision, with the balancedness that it expects if the load stays as it was in the window."""

    slot_owner: Int32[np.ndarray, "L X"]  # to serve with from now on; the current one if `is_skipped`
    before: float
    after: float
    layers: Int32[np.ndarray, "n"]  # layers that change, the one that gains most first
    is_skipped: bool  # too little to gain


def plan_rebalance(load: Num[np.ndarray, "L E"], current: Int32[np.ndarray, "L X"], layout: ExpertLayout, *,
                   min_gain: float, max_swaps: int) -> Rebalance:  # fmt: skip
    """The placement to go to from `current` under the load of the last window.

    A layer moves only if that takes at least the share `min_gain` off its busiest rank, and nothing moves unless all
    layers together save as much. So no layer becomes worse under this load. Where swaps within the current placement
    come as close as `_NEAR` to a new plan, they are all that happens; the sets of experts of a new plan are laid on the
    ranks, and in the slots, where most of them are already. A pure function: every host comes to the same result.
    Raises ValueError as `check_load` does.
    """
    check_load(load, layout)
    ranks = layout.ranks
    wanted = _wanted(load, current, layout, max_swaps)
    busiest, least = (busiest_rank(load, owner, ranks) for owner in (current, wanted))
    moves = (least < busiest) & (least <= (1 - min_gain) * busiest)
    gain = np.where(moves, busiest - least, 0)
    is_skipped = not moves.any() or bool(gain.sum() < min_gain * busiest.sum())
    layers = np.flatnonzero(moves)
    chosen = current if is_skipped else np.where(moves[:, None], wanted, current)
    before, after = (balancedness(expected_slot_load(load, owner), ranks) for owner in (current, chosen))
    return Rebalance(
        slot_owner=chosen, before=before, after=after, is_skipped=is_skipped,
        layers=layers[np.argsort(-gain[layers], kind="stable")].astype(np.int32)[: 0 if is_skipped else None],
    )  # fmt: skip


def _wanted(load: Num[np.ndarray, "L E"], current: Int32[np.ndarray, "L X"], layout: ExpertLayout,
            max_swaps: int) -> Int32[np.ndarray, "L X"]:  # fmt: skip
    """What each layer would have if moving cost nothing, or nearly that with little to move."""
    ranks, nodes = layout.ranks, layout.num_nodes if layout.is_hierarchical else 1
    wanted = plan_placement(load, layout, max_swaps)
    first = initial_placement(layout)
    if not layout.is_hierarchical:  # nor is the first placement
        wins = busiest_rank(load, wanted, ranks) <= busiest_rank(load, first, ranks)
        wanted = np.where(wins[:, None], wanted, first)  # one greedy pass can lose to the placement of the start
    by_rank, old = (x.reshape(layout.num_layers, ranks, -1) for x in (wanted, current))
    wanted = keep_slots(keep_ranks(by_rank, old, layout.num_experts, nodes), old).reshape(current.shape)
    if layout.is_hierarchical:  # swaps would have to know which groups belong together
        return wanted
    enough = busiest_rank(load, wanted, ranks) * (1 + _NEAR)
    near = old.copy()
    share = expected_slot_load(load, current).reshape(near.shape)
    spread_duplicates(near, share)
    refine(near, share, max_swaps=max_swaps, enough=enough)
    swapped = near.reshape(current.shape)
    return np.where((busiest_rank(load, swapped, ranks) <= enough)[:, None], swapped, wanted)
