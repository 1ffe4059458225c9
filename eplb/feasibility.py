"""What a load allows: the best balance that any placement can reach, and how many redundant experts are worth it."""

from __future__ import annotations

import dataclasses

import numpy as np
from jaxtyping import Num

from widemesh.eplb.balance import balancedness, expected_slot_load
from widemesh.eplb.layout import ExpertLayout
from widemesh.eplb.packing import replicate
from widemesh.eplb.policy import check_load, plan_placement

_PLANNED = 8  # numbers of redundant experts that are planned with before the best so far is taken


@dataclasses.dataclass(frozen=True, kw_only=True)
class Advice:
    """A number of redundant experts, the bound with it, and what the policy makes of this load with it."""

    num_redundant_experts: int
    bound: float
    planned: float


def feasible_balancedness(load: Num[np.ndarray, "L E"], layout: ExpertLayout) -> float:
    """No placement with this layout is more balanced under this load, copies lying on different ranks; 0 without load.

    The busiest rank carries at least the mean, and at least the hottest slot with the coldest company that fills a
    rank up. Giving copies to the expert with the greatest load per copy makes the hottest slot as cool as it can be.
    """
    check_load(load, layout)
    load = load.astype(np.float64)
    mean = load.sum(1) / layout.ranks
    hottest = expected_slot_load(load, replicate(load, layout.num_slots, layout.max_copies)).max(1)
    coldest = np.sort(load, axis=1)[:, : layout.slots_per_rank - 1].sum(1) / layout.max_copies
    least = np.maximum(mean, hottest + coldest)
    return float(mean.sum() / least.sum()) if least.sum() > 0 else 0.0


def advise_redundancy(load: Num[np.ndarray, "L E"], layout: ExpertLayout, *, max_swaps: int,
                      goal: float = 0.98) -> Advice:  # fmt: skip
    """The fewest redundant experts with which a plan reaches the share `goal` of what any number of them allows.

    The layout says all but the number. Numbers whose bound is too low are not planned with, and of the others at most
    `_PLANNED`; if none reaches the goal, it is the best of them. The rest to 1 is less than a fresh load of the same
    kind differs by.
    """
    layouts = [dataclasses.replace(layout, num_redundant_experts=n) for n in layout.legal_redundant_experts()]
    reach = goal * feasible_balancedness(load, layouts[-1])  # the bound grows with the number
    planned_with: list[Advice] = []
    for one in layouts:
        bound = feasible_balancedness(load, one)
        if bound < reach and one is not layouts[-1]:
            continue
        planned = balancedness(expected_slot_load(load, plan_placement(load, one, max_swaps)), one.ranks)
        planned_with.append(Advice(num_redundant_experts=one.num_redundant_experts, bound=bound, planned=planned))
        if planned >= reach or len(planned_with) == _PLANNED:
            break
    return max(planned_with, key=lambda advice: advice.planned)
