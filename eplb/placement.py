"""Which expert each physical slot holds: the first placement, and what any placement must fulfil."""

from __future__ import annotations

import zlib

import numpy as np
from jaxtyping import Int32

from widemesh.eplb.balance import count_copies
from widemesh.eplb.layout import ExpertLayout
from widemesh.model.config import ConfigError


def initial_slot_owner(num_experts: int, ranks: int, num_redundant_experts: int = 0) -> Int32[np.ndarray, "X"]:
    """Slot e holds expert e, redundant slot i expert i mod num_experts.

    The number of slots is the smallest multiple of `ranks` that holds them all, so every rank has equally many; those
    left over are empty (-1).
    """
    filled = num_experts + num_redundant_experts
    owner = np.full(-(-filled // ranks) * ranks, -1, np.int32)
    owner[:filled] = np.arange(filled, dtype=np.int32) % num_experts
    return owner


def initial_placement(layout: ExpertLayout) -> Int32[np.ndarray, "L X"]:
    """`initial_slot_owner` in every layer."""
    owner = initial_slot_owner(layout.num_experts, layout.ranks, layout.num_redundant_experts)
    return np.tile(owner, (layout.num_layers, 1))


def check_placement(slot_owner: np.ndarray, layout: ExpertLayout, source: str = "slot_owner") -> None:
    """Refuse a placement that a model with this layout cannot run. Raises ConfigError, which begins with `source`."""
    wanted = (layout.num_layers, layout.num_slots)
    if slot_owner.shape != wanted:
        raise ConfigError(
            f"{source} has shape {slot_owner.shape}; it must be {wanted}: {layout.num_layers} layers, and "
            f"{layout.num_slots} slots for {layout.num_experts} experts and {layout.num_redundant_experts} redundant "
            f"ones on {layout.ranks} ranks"
        )
    if slot_owner.dtype.kind != "i":
        raise ConfigError(f"{source} holds {slot_owner.dtype}; it must hold whole numbers, an expert or -1")
    wrong = np.argwhere((slot_owner < -1) | (slot_owner >= layout.num_experts))
    if len(wrong):
        layer, slot = wrong[0]
        raise ConfigError(f"{source}: slot {slot} of layer {layer} holds {slot_owner[layer, slot]}; it must hold an "
                          f"expert from 0 to {layout.num_experts - 1}, or -1 for none")  # fmt: skip
    copies = count_copies(slot_owner, layout.num_experts)
    missing = np.argwhere(copies == 0)
    if len(missing):
        layer, expert = missing[0]
        raise ConfigError(f"{source}: no slot of layer {layer} holds expert {expert}; every expert from 0 to "
                          f"{layout.num_experts - 1} needs at least one slot in every layer")  # fmt: skip
    many = np.argwhere(copies > layout.max_copies)
    if len(many):
        layer, expert = many[0]
        raise ConfigError(
            f"{source}: layer {layer} holds expert {expert} in {copies[layer, expert]} slots; it may take 1 to "
            f"{layout.max_copies} with num_redundant_experts={layout.num_redundant_experts}, "
            f"max_copies_per_expert={layout.max_copies_per_expert} and {layout.ranks} ranks"
        )


def placement_hash(slot_owner: Int32[np.ndarray, "L X"]) -> int:
    """32 bits that tell placements apart, as an int32; the same on every host, and another for other layers.

    It is for comparing what ranks hold, one number each; it does not protect against forgery.
    """
    content = np.array([*slot_owner.shape, *slot_owner.reshape(-1)], "<i4").tobytes()
    return int(np.uint32(zlib.crc32(content)).view(np.int32))
