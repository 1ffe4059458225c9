"""How evenly a load lies on ranks, counted or expected."""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Float64, Int32, Num


def rank_loads(slot_load: Num[np.ndarray, "... X"], ranks: int) -> Num[np.ndarray, "... R"]:
    """Sum over the slots of each rank."""
    return slot_load.reshape(*slot_load.shape[:-1], ranks, -1).sum(-1)


def balancedness(slot_load: Num[np.ndarray, "... L X"], ranks: int) -> float:
    """Mean rank load over maximum rank load, each summed over layers (and steps) first; 0 if nothing was routed.

    1 is even. A layer counts as much as it takes, so an idle layer or step does not blur the figure.
    """
    load = rank_loads(slot_load, ranks)
    busiest = load.max(-1).sum()
    return float(load.mean(-1).sum() / busiest) if busiest > 0 else 0.0


def fold_slots(slot_load: Num[np.ndarray, "... L X"], slot_owner: Int32[np.ndarray, "L X"],
               num_experts: int) -> Num[np.ndarray, "... L E"]:  # fmt: skip
    """Load per expert from load per slot, under the placement that it was counted in; int64 where that counts.

    Empty slots count for nothing. Steps may lead; whoever wants their sum adds them up first.
    """
    layers, num_slots = slot_owner.shape
    lead = slot_load.shape[:-2]
    column = np.where(slot_owner < 0, num_experts, slot_owner) + (num_experts + 1) * np.arange(layers)[:, None]
    folded = np.zeros((layers * (num_experts + 1), math.prod(lead)), np.result_type(slot_load.dtype, np.int64))
    np.add.at(folded, column.reshape(-1), slot_load.reshape(-1, layers * num_slots).T)
    return folded.T.reshape(*lead, layers, num_experts + 1)[..., :num_experts]


def expected_slot_load(load: Num[np.ndarray, "L E"],
                       slot_owner: Int32[np.ndarray, "L X"]) -> Float64[np.ndarray, "L X"]:  # fmt: skip
    """Load per slot when the copies of an expert share its load evenly."""
    layers, num_experts = load.shape
    copies = count_copies(slot_owner, num_experts)
    # The last column is what an empty slot takes: nothing.
    share = np.zeros((layers, num_experts + 1))
    np.divide(load, copies, out=share[:, :num_experts], where=copies > 0)
    return np.take_along_axis(share, np.where(slot_owner < 0, num_experts, slot_owner), 1)


def busiest_rank(load: Num[np.ndarray, "L E"], slot_owner: Int32[np.ndarray, "L X"],
                 ranks: int) -> Float64[np.ndarray, "L"]:  # fmt: skip
    """Expected load of each layer's busiest rank."""
    return rank_loads(expected_slot_load(load, slot_owner), ranks).max(-1)


def count_copies(slot_owner: Int32[np.ndarray, "L X"], num_experts: int) -> Int32[np.ndarray, "L E"]:
    """Slots of each expert."""
    layers, _ = slot_owner.shape
    wide = slot_owner + 1 + (num_experts + 1) * np.arange(layers)[:, None]
    count = np.bincount(wide.reshape(-1), minlength=layers * (num_experts + 1)).reshape(layers, -1)
    return count[:, 1:].astype(np.int32)
