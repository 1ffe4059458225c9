"""A placement from a load: copies for hot experts, then slots packed on ranks. All layers are planned together.

The policy is that of DeepSeek's EPLB (https://github.com/deepseek-ai/EPLB), with additions: an expert has a most number
of copies, its copies lie on different ranks, and swaps may follow.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float64, Int32, Num

from widemesh.eplb.duplicates import spread_duplicates
from widemesh.eplb.layout import ExpertLayout
from widemesh.eplb.packing import pack, replicate
from widemesh.eplb.refining import refine


def plan_placement(load: Num[np.ndarray, "L E"], layout: ExpertLayout, max_swaps: int = 0) -> Int32[np.ndarray, "L X"]:
    """The owner of each slot. Groups of experts go to nodes first, if the layout has both, then slots to ranks.

    With `max_swaps` = 0 the result is the published policy's, wherever that keeps to the limit on copies and puts no
    two of them on one rank; swaps per layer and node take off what its one greedy pass leaves on the busiest rank.
    Stable: the same load gives the same placement, bit for bit. Where experts lie now plays no part. Raises ValueError
    as `check_load` does.
    """
    check_load(load, layout)
    load = load.astype(np.float64)
    layers = len(load)
    grouped = layout.num_groups % layout.num_nodes == 0
    groups, nodes = (layout.num_groups, layout.num_nodes) if grouped else (1, 1)
    of_node = _experts_of_nodes(load, groups, nodes)
    node_load = np.take_along_axis(load, of_node, 1).reshape(layers * nodes, -1)
    local, share = _copies(node_load, layout, nodes)

    ranks, quota = layout.ranks // nodes, layout.slots_per_rank
    rank, place = pack(share, ranks)
    slots = np.full((layers * nodes, ranks * quota), -1, np.int32)
    shares = np.zeros(slots.shape)
    every = np.arange(len(slots))[:, None]
    experts = of_node.reshape(layers * nodes, -1)
    slots[every, rank * quota + place] = np.take_along_axis(experts, local, 1)
    shares[every, rank * quota + place] = share
    by_rank = slots.reshape(-1, ranks, quota)
    by_share = shares.reshape(by_rank.shape)
    spread_duplicates(by_rank, by_share)
    refine(by_rank, by_share, max_swaps=max_swaps)
    return slots.reshape(layers, -1)


def check_load(load: Num[np.ndarray, "L E"], layout: ExpertLayout) -> None:
    """Raises ValueError for a load of another shape than the layout's, with negative or with non-finite entries."""
    wanted = (layout.num_layers, layout.num_experts)
    if load.shape != wanted:
        raise ValueError(f"the load has shape {load.shape}; it must be {wanted}, layers by experts")
    if load.size and not (np.isfinite(load).all() and load.min() >= 0):
        raise ValueError("the load must be finite and not negative")


def _experts_of_nodes(load: Float64[np.ndarray, "L E"], groups: int, nodes: int) -> Int32[np.ndarray, "L E"]:
    """Experts in the order of the nodes that their groups are packed on; within one by group's place, then index."""
    layers, num_experts = load.shape
    size = num_experts // groups
    node, place = pack(load.reshape(layers, groups, size).sum(-1), nodes)
    group_at = np.empty((layers, groups), np.int32)
    np.put_along_axis(group_at, node * (groups // nodes) + place, np.arange(groups, dtype=np.int32)[None], 1)
    return (group_at[:, :, None] * size + np.arange(size, dtype=np.int32)).reshape(layers, num_experts)


def _copies(load: Float64[np.ndarray, "rows E"], layout: ExpertLayout,
            nodes: int) -> tuple[Int32[np.ndarray, "rows X"], Float64[np.ndarray, "rows X"]]:  # fmt: skip
    """Which expert each slot of a node is for, in the order of copying, and its share of the load."""
    local = replicate(load, layout.num_slots // nodes, layout.max_copies)
    copies = np.zeros(load.shape)
    np.add.at(copies, (np.arange(len(load))[:, None], local), 1)
    return local, np.take_along_axis(load / copies, local, 1)
