"""What may stay of an earlier placement: ranks are renamed and slots reordered, which changes no rank's load."""

from __future__ import annotations

import numpy as np
from jaxtyping import Int32


def keep_ranks(owner: Int32[np.ndarray, "L R Q"], old: Int32[np.ndarray, "L R Q"], num_experts: int,
               nodes: int = 1) -> Int32[np.ndarray, "L R Q"]:  # fmt: skip
    """The same sets of experts, each on the rank of its node that holds most of them already.

    Pairs of set and rank are matched in order of falling overlap, ties to the first. Ranks do not leave their node.
    """
    layers, ranks, quota = owner.shape
    owner, old = (x.reshape(layers * nodes, ranks // nodes, quota) for x in (owner, old))
    overlap = _held(owner, num_experts) @ _held(old, num_experts).transpose(0, 2, 1)
    every, (rows, each, _) = np.arange(layers * nodes), owner.shape
    placed = np.empty_like(owner)
    for _ in range(each):
        best = overlap.reshape(rows, -1).argmax(1)
        chosen, rank = best // each, best % each
        placed[every, rank] = owner[every, chosen]
        overlap[every, chosen] = -1
        overlap[every, :, rank] = -1
    return placed.reshape(layers, ranks, quota)


def _held(owner: Int32[np.ndarray, "rows R Q"], num_experts: int) -> np.ndarray:
    """One where a rank holds an expert; float32, because numpy multiplies matrices of integers slowly."""
    held = np.zeros((*owner.shape[:2], num_experts + 1), np.float32)
    np.put_along_axis(held, np.where(owner < 0, num_experts, owner), 1, -1)
    return held[..., :num_experts]


def keep_slots(owner: Int32[np.ndarray, "L R Q"], old: Int32[np.ndarray, "L R Q"]) -> Int32[np.ndarray, "L R Q"]:
    """The same experts on each rank, in the slot that they had where they had one; the others fill the rest in order.

    The i-th copy of an expert on a rank stays in the i-th slot that held it there.
    """
    stays = (owner[..., :, None] == old[..., None, :]) & _same_turn(owner, old)
    kept, taken = stays.any(-1), stays.any(-2)
    # Leftovers and free slots, in order: a stable sort of the flags brings both to the front.
    left = np.argsort(kept, axis=-1, kind="stable")
    free = np.argsort(taken, axis=-1, kind="stable")
    placed = np.empty_like(owner)
    np.put_along_axis(placed, free, np.take_along_axis(owner, left, -1), -1)
    return np.where(taken, old, placed)


def _same_turn(owner: Int32[np.ndarray, "L R Q"], old: Int32[np.ndarray, "L R Q"]) -> np.ndarray:
    """Whether slot i of `owner` and slot j of `old` hold equally many earlier copies of their experts."""
    return _turn(owner)[..., :, None] == _turn(old)[..., None, :]


def _turn(owner: Int32[np.ndarray, "L R Q"]) -> np.ndarray:
    quota = owner.shape[-1]
    earlier = np.tri(quota, k=-1, dtype=bool)
    return ((owner[..., :, None] == owner[..., None, :]) & earlier).sum(-1)
