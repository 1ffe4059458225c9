"""The tables by which a step finds an expert's slots, made anew from the placement whenever it changes."""

from __future__ import annotations

import dataclasses

import numpy as np
from jaxtyping import Int32

from widemesh.eplb.balance import count_copies
from widemesh.pallas_kernels import replica_hash


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ExpertMaps:
    """A pure function of `slot_owner`: never changed, only replaced."""

    slot_owner: Int32[np.ndarray, "L X"]  # expert of each slot; -1: empty
    expert_slots: Int32[np.ndarray, "L E C"]  # slots of each expert, in rising order, then -1
    copies: Int32[np.ndarray, "L E"]  # how many of them there are; at least 1


def build_maps(slot_owner: Int32[np.ndarray, "L X"], num_experts: int, max_copies: int) -> ExpertMaps:
    """Maps of a placement that `check_placement` lets pass. Raises ValueError if an expert has 0 or too many slots."""
    copies = count_copies(slot_owner, num_experts)
    if copies.min() < 1 or copies.max() > max_copies:
        raise ValueError(f"experts must have 1 to {max_copies} slots; there are {copies.min()} to {copies.max()}")
    layers, num_slots = slot_owner.shape
    # Slots by expert, empty ones first, and a slot's turn among those of its expert.
    order = np.argsort(slot_owner, axis=1, kind="stable").astype(np.int32)
    owner = np.take_along_axis(slot_owner, order, 1)
    empty = num_slots - copies.sum(1, keepdims=True)
    start = empty + np.cumsum(copies, 1) - copies
    turn = np.arange(num_slots) - np.take_along_axis(start, np.maximum(owner, 0), 1)
    layer, held = np.nonzero(owner >= 0)
    slots = np.full((layers, num_experts, max_copies), -1, np.int32)
    slots[layer, owner[layer, held], turn[layer, held]] = order[layer, held]
    return ExpertMaps(slot_owner=slot_owner, expert_slots=slots, copies=copies)


def choose_slot(row: Int32[np.ndarray, "T"], position: Int32[np.ndarray, "T"], expert: Int32[np.ndarray, "T"],
                slots: Int32[np.ndarray, "E C"], copies: Int32[np.ndarray, "E"]) -> Int32[np.ndarray, "T"]:  # fmt: skip
    """The slot that serves each row of one layer: by a hash of its number over all ranks, its position and its expert.

    Expert -1 gives slot -1.
    """
    given = (x.astype(np.uint32) for x in (row, position, expert, copies[expert]))
    turn = replica_hash.copy_turn(*given).astype(np.int32)
    return np.where(expert < 0, -1, slots[expert, turn])
