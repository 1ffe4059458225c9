"""Where the experts of one model lie on a mesh, on the host and on the devices."""

from __future__ import annotations

import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Int32

from widemesh.eplb import ExpertLayout, build_maps, initial_placement
from widemesh.model.step import ReplicaMaps
from widemesh.sharding.own_ranks import OwnRanks, place_everywhere


class PlacedExperts:
    """A placement and its maps. `slot_owner` [L, X] is replaced, never written; the first one is expert e in slot e
    unless another is given."""

    def __init__(self, layout: ExpertLayout, replicated: NamedSharding, given: Int32[np.ndarray, "L X"] | None = None):
        self.layout, self._replicated = layout, replicated
        self.slot_owner = initial_placement(layout) if given is None else given

    def place(self) -> None:
        """Put the maps on the devices, where `replicas` is from then on."""
        self.move(self.slot_owner)

    def move(self, slot_owner: Int32[np.ndarray, "L X"]) -> None:
        """Serve with this placement from the next dispatch on; the weights must lie accordingly by then.

        If it raises, nothing has changed.
        """
        maps = build_maps(slot_owner, self.layout.num_experts, self.layout.max_copies)
        replicas: ReplicaMaps = place_everywhere(ReplicaMaps(maps.expert_slots, maps.copies), self._replicated)  # type: ignore[arg-type]
        self.slot_owner, self.replicas = slot_owner, replicas

    def owners_on(self, own: OwnRanks) -> Int32[np.ndarray, "L X"]:
        """The placement with -1 in the slots of other processes' ranks: zeros, which take no memory."""
        owner, held = self.slot_owner.copy(), self.layout.slots_per_rank
        owner[:, : own.first * held] = owner[:, (own.first + own.count) * held :] = -1
        return owner
