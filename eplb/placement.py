"""Which expert each physical slot holds: the first placement, and what any placement must fulfil."""

from __future__ import annotations

import reprlib
import zlib
from collections.abc import Sequence
from typing import Any

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


def as_placement(given: Any, layout: ExpertLayout, source: str = "slot_owner") -> Int32[np.ndarray, "L X"]:
    """A checked placement from an array [L, X] or a list of owners per layer. ConfigError as `check_placement`."""
    if isinstance(given, list | tuple):
        return _from_lists(given, layout, source)
    if not hasattr(given, "__array__"):
        raise ConfigError(f"{source} is {_shortly(given)}; it must be an array of whole numbers, {layout.num_layers} "
                          f"layers of {layout.num_slots} slots, as the status of an engine has it")  # fmt: skip
    owner = np.asarray(given)
    check_placement(owner, layout, source)
    return owner.astype(np.int32)


def check_placement(slot_owner: np.ndarray, layout: ExpertLayout, source: str = "slot_owner") -> None:
    """Refuse a placement that a model with this layout cannot run. Raises ConfigError, which begins with `source`."""
    wanted = (layout.num_layers, layout.num_slots)
    if slot_owner.shape != wanted:
        raise ConfigError(
            f"{source} has shape {slot_owner.shape}; it must be {wanted}: {layout.num_layers} layers, and "
            f"{layout.num_slots} slots for {layout.num_experts} experts and {layout.num_redundant_experts} redundant "
            f"ones on {layout.ranks} ranks; use a placement that was exported from a model with these sizes"
        )
    if slot_owner.dtype.kind not in "iu":
        _refuse_wrong_owner(slot_owner.tolist(), layout, source)
    wrong = np.argwhere((slot_owner < -1) | (slot_owner >= layout.num_experts))
    if len(wrong):
        layer, slot = wrong[0].tolist()
        raise _wrong_owner(layer, slot, slot_owner[layer, slot].item(), layout, source)
    slot_owner = slot_owner.astype(np.int32)
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


def _from_lists(layers: Sequence[Any], layout: ExpertLayout, source: str) -> Int32[np.ndarray, "L X"]:
    lengths = [len(one) if isinstance(one, list | tuple) else None for one in layers]
    for layer, length in enumerate(lengths):
        if length is None:
            raise ConfigError(f"{source}: layer {layer} is {_shortly(layers[layer])}; it must be a list of the owners "
                              f"of its {layout.num_slots} slots")  # fmt: skip
        if length != layout.num_slots and len(set(lengths)) > 1:
            raise ConfigError(f"{source}: layer {layer} has length {length}; it must be {layout.num_slots}, an owner "
                              "for each slot")  # fmt: skip
    _refuse_wrong_owner(layers, layout, source)
    owner = np.array(layers, np.int32)
    check_placement(owner, layout, source)
    return owner


def _refuse_wrong_owner(layers: Sequence[Sequence[Any]], layout: ExpertLayout, source: str) -> None:
    for layer, owners in enumerate(layers):
        for slot, owner in enumerate(owners):
            is_whole = isinstance(owner, int | np.integer) and not isinstance(owner, bool)
            if not is_whole or not -1 <= owner < layout.num_experts:
                raise _wrong_owner(layer, slot, owner, layout, source)


def _wrong_owner(layer: int, slot: int, owner: Any, layout: ExpertLayout, source: str) -> ConfigError:
    number = "" if isinstance(owner, int | np.integer) and not isinstance(owner, bool) else ", as a whole number"
    return ConfigError(f"{source}: slot {slot} of layer {layer} holds {_shortly(owner)}; it must hold an expert from 0 "
                       f"to {layout.num_experts - 1}, or -1 for none{number}")  # fmt: skip


def _shortly(value: Any) -> str:
    """As it is written in a file; the beginning of what is long."""
    text = str(value) if isinstance(value, int | float | np.number) else reprlib.repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


def placement_hash(slot_owner: Int32[np.ndarray, "L X"]) -> int:
    """32 bits that tell placements apart, as an int32; the same on every host, and another for other layers.

    It is for comparing what ranks hold, one number each; it does not protect against forgery.
    """
    content = np.array([*slot_owner.shape, *slot_owner.reshape(-1)], "<i4").tobytes()
    return int(np.uint32(zlib.crc32(content)).view(np.int32))


def hash_text(placement_hash: int) -> str:
    """A `placement_hash` as everybody sees it: eight hexadecimal digits."""
    return f"{placement_hash & 0xFFFFFFFF:08x}"
