"""Moving a request's state from the prefill mesh to the decode mesh, device to device, in one process."""

from __future__ import annotations

import jax
from jax.sharding import Mesh, NamedSharding

from widemesh.model.cache import Cache
from widemesh.serving.programs import HandOver


def take_rank(cache: Cache, rank: int) -> Cache:
    """The part of a cache that lies on one rank's device, as arrays of that device. Copies nothing."""
    return jax.tree.map(lambda array: _shard_at(array, rank), cache)


def _shard_at(array: jax.Array, rank: int) -> jax.Array:
    rows = array.shape[0] // len(array.sharding.device_set)
    for shard in array.addressable_shards:
        if (shard.index[0].start or 0) == rank * rows:
            return shard.data
    raise ValueError(f"rank {rank} holds no part of an array of sharding {array.sharding}")


class InProcessTransfer:
    """`device_put` from one device of the prefill mesh to one of the decode mesh.

    `moved_bytes` counts what was copied. The receiving program takes one hand-over per rank, so ranks without one get
    idle arrays that were made once on their own device and never move.
    """

    def __init__(self, decode_mesh: Mesh):
        self._devices = list(decode_mesh.devices[:, 0])
        self._idle: dict[tuple[tuple[int, ...], str, int], jax.Array] = {}
        self.moved_bytes = 0

    def send(self, handed: HandOver, rank: int, sharding: NamedSharding) -> HandOver:
        """Hand-over for the import program: `handed` on decode rank `rank`, idle arrays elsewhere."""

        def place(part: jax.Array) -> jax.Array:
            self.moved_bytes += part.nbytes
            pieces = [
                jax.device_put(part, device) if r == rank else self._idle_part(part, r)
                for r, device in enumerate(self._devices)
            ]
            shape = (len(self._devices) * part.shape[0], *part.shape[1:])
            return jax.make_array_from_single_device_arrays(shape, sharding, pieces)

        return jax.tree.map(place, handed)

    def _idle_part(self, like: jax.Array, rank: int) -> jax.Array:
        key = (like.shape, str(like.dtype), rank)
        if key not in self._idle:
            self._idle[key] = jax.device_put(jax.numpy.zeros(like.shape, like.dtype), self._devices[rank])
        return self._idle[key]
