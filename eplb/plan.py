"""A decision with what there is to say about it."""

from __future__ import annotations

import dataclasses

import numpy as np
from jaxtyping import Int32, Num

from widemesh.eplb.config import EplbConfig
from widemesh.eplb.feasibility import Advice, advise_redundancy, feasible_balancedness
from widemesh.eplb.layout import ExpertLayout
from widemesh.eplb.rebalance import Rebalance, plan_rebalance


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Plan(Rebalance):
    """A `Rebalance`, with the bound for this number of redundant experts, and the number that the load asks for."""

    feasible: float
    advice: Advice


def make_plan(load: Num[np.ndarray, "L E"], current: Int32[np.ndarray, "L X"], layout: ExpertLayout,
              config: EplbConfig) -> Plan:  # fmt: skip
    """Decide on the load of one window: `plan_rebalance`, `feasible_balancedness` and `advise_redundancy` together.

    For 40 layers of 384 experts on 32 ranks about 0.15 s. Raises ValueError as `check_load` does.
    """
    found = plan_rebalance(load, current, layout, min_gain=config.min_gain, max_swaps=config.max_swaps)
    return Plan(
        **{field.name: getattr(found, field.name) for field in dataclasses.fields(found)},
        feasible=feasible_balancedness(load, layout),
        advice=advise_redundancy(load, layout, max_swaps=config.max_swaps),
    )
