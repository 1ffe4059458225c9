"""Moving a request's state from the prefill mesh to the decode mesh, device to device, in one process."""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from widemesh.model.cache import Cache
from widemesh.serving.programs import HandOver
from widemesh.sharding.own_ranks import OwnRanks


def take_rank(cache: Cache, rank: int) -> Cache:
    """The part of a cache that lies on one rank's (first) device, as arrays of that device. Copies nothing."""
    return jax.tree.map(lambda array: _shard_at(array, rank), cache)


def _shard_at(array: jax.Array, rank: int) -> jax.Array:
    for shard in array.addressable_shards:
        rows = shard.data.shape[0]
        if (shard.index[0].start or 0) == rank * rows:
            return shard.data
    raise ValueError(f"rank {rank} holds no part of an array of sharding {array.sharding}")


class InProcessTransfer:
    """`device_put` from one device of the prefill mesh to one of the decode mesh, or to all devices of one rank.

    `moved_bytes` counts what was copied. The receiving program takes one hand-over per rank, so ranks without one get
    idle arrays that were put on their own device once and never move.
    """

    def __init__(self, decode_mesh: Mesh, own: OwnRanks):
        self._total = own.total
        # Of each own rank its devices, which all hold its state.
        self._groups = [list(group) for group in decode_mesh.devices[own.first : own.first + own.count]]
        self._idle: dict[tuple[tuple[int, ...], str, jax.Device], jax.Array] = {}
        self.moved_bytes = 0

    def send(self, handed: HandOver, rank: int, sharding: NamedSharding) -> HandOver:
        """Hand-over for the import program: `handed` on own decode rank `rank` (-1 = none), idle arrays elsewhere."""

        def place(part: jax.Array) -> jax.Array:
            if rank >= 0:
                self.moved_bytes += part.nbytes * len(self._groups[rank])
            pieces = [
                jax.device_put(part, device) if r == rank else self._idle_part(part, device)
                for r, group in enumerate(self._groups) for device in group
            ]  # fmt: skip
            shape = (self._total * part.shape[0], *part.shape[1:])
            return jax.make_array_from_single_device_arrays(shape, sharding, pieces)

        return jax.tree.map(place, handed)

    def _idle_part(self, like: jax.Array, device: jax.Device) -> jax.Array:
        key = (like.shape, str(like.dtype), device)
        if key not in self._idle:
            # From the host: zeros made on the device are a program, which may have to be compiled while serving.
            self._idle[key] = jax.device_put(np.zeros(like.shape, like.dtype), device)
        return self._idle[key]
