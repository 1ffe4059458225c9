"""The published placement policy in plain Python, item by item: what `widemesh bench eplb` times the planner beside.

After DeepSeek's description (https://github.com/deepseek-ai/EPLB): no arrays, no limit on copies, two copies may share
a rank. Tests compare the planner with it wherever neither matters.
"""

from __future__ import annotations

from collections.abc import Sequence


def pack_plainly(load: Sequence[float], bins: int) -> tuple[list[int], list[int]]:
    """(bin, place in it) of each item: by falling load, into the lightest bin that has a place left."""
    quota = len(load) // bins
    if quota == 1:
        return list(range(bins)), [0] * bins
    weight, held = [0.0] * bins, [0] * bins
    bin_of, place_of = [0] * len(load), [0] * len(load)
    for item in sorted(range(len(load)), key=lambda i: -load[i]):
        chosen = min((i for i in range(bins) if held[i] < quota), key=lambda i: weight[i])
        bin_of[item], place_of[item] = chosen, held[chosen]
        weight[chosen] += load[item]
        held[chosen] += 1
    return bin_of, place_of


def replicate_plainly(load: Sequence[float], total: int) -> list[int]:
    """Which item each of `total` copies is of: the next one always of the item with the greatest load per copy."""
    owner, copies = list(range(len(load))), [1] * len(load)
    while len(owner) < total:
        hottest = max(range(len(load)), key=lambda i: load[i] / copies[i])
        owner.append(hottest)
        copies[hottest] += 1
    return owner


def place_plainly(load: Sequence[float], slots: int, groups: int, nodes: int, ranks: int) -> list[int]:
    """The owner of each slot of one layer: groups to machines, copies within each, slots to its ranks."""
    if groups % nodes:
        groups = nodes = 1
    size, owner = len(load) // groups, []
    totals = [sum(load[group * size : (group + 1) * size]) for group in range(groups)]
    node_of, place_of = pack_plainly(totals, nodes)
    for node in range(nodes):
        here = sorted((place_of[group], group) for group in range(groups) if node_of[group] == node)
        experts = [group * size + i for _, group in here for i in range(size)]
        node_load = [load[expert] for expert in experts]
        copy_of = replicate_plainly(node_load, slots // nodes)
        copies = [copy_of.count(i) for i in range(len(experts))]
        rank_of, slot_of = pack_plainly([node_load[i] / copies[i] for i in copy_of], ranks // nodes)
        quota = slots // ranks
        placed = [-1] * (slots // nodes)
        for i, rank, slot in zip(copy_of, rank_of, slot_of, strict=True):
            placed[rank * quota + slot] = experts[i]
        owner += placed
    return owner
