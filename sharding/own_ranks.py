"""The ranks of a mesh that this process drives, and arrays of which it holds these ranks' parts.

R ranks of the mesh, r of them this process's own. With one process r = R and nothing here does anything.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Shaped

from widemesh.sharding.mesh import MeshError


@dataclasses.dataclass(frozen=True)
class OwnRanks:
    """Neighbours on the mesh: `first` up to `first + count - 1` of `total`, each with `devices_per_rank` devices."""

    first: int
    count: int
    total: int
    devices_per_rank: int

    @classmethod
    def of(cls, mesh: Mesh) -> OwnRanks:
        """Those of the process that asks. Raises MeshError if it holds none, parts of a rank, or not neighbours."""
        grid = mesh.devices.reshape(mesh.devices.shape[0], -1)
        process = jax.process_index()
        is_own = np.array([[device.process_index == process for device in rank] for rank in grid])
        own = np.flatnonzero(is_own.all(axis=1))
        if not len(own) or is_own.any(axis=1).sum() != len(own) or own[-1] - own[0] + 1 != len(own):
            raise MeshError(f"process {process} holds {is_own.sum()} devices of a mesh of {grid.shape[0]} ranks of "
                            f"{grid.shape[1]}, which are no whole, neighbouring ranks; use make_meshes")  # fmt: skip
        return cls(int(own[0]), len(own), *grid.shape)

    @property
    def is_whole(self) -> bool:
        """Whether there is no other process on the mesh."""
        return self.count == self.total

    def hand(self, host: Any, sharding: NamedSharding) -> Any:
        """A tree of host arrays [r * n, ...], as a program takes them that expects [R * n, ...] laid out by `sharding`.

        One process: the arrays as they are, since a call places them in a tenth of the time that anything else takes.
        """
        return host if self.is_whole else self.place(host, sharding)

    def place(self, host: Any, sharding: NamedSharding) -> Any:
        """A tree of host arrays [r * n, ...] as this process's part of device arrays [R * n, ...].

        Of what makes such an array, the callback is quickest: 37 us with 4 devices, 86 us for process-local data, 232
        us for one array after the other.
        """
        return jax.tree.map(lambda array: self._place(np.asarray(array), sharding), host)

    def read(self, array: jax.Array) -> Shaped[np.ndarray, "..."]:
        """This process's part [r * n, ...] of an array [R * n, ...], on the host. Waits for it."""
        if self.is_whole:
            return np.asarray(array)
        # The parts lie in the order of the mesh; devices of a rank hold the same.
        places = range(0, self.count * self.devices_per_rank, self.devices_per_rank)
        parts = [np.asarray(array.addressable_data(place)) for place in places]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _place(self, host: Shaped[np.ndarray, "..."], sharding: NamedSharding) -> jax.Array:
        rows = host.shape[0] // self.count
        begin = self.first * rows

        def part(index: tuple[slice, ...] | None) -> Shaped[np.ndarray, "..."]:
            assert index is not None
            start, stop, _ = index[0].indices(self.total * rows)
            return host[start - begin : stop - begin]

        return jax.make_array_from_callback((self.total * rows, *host.shape[1:]), sharding, part)


def place_everywhere(host: Any, sharding: NamedSharding) -> Any:
    """A tree of host arrays that are the same in every process, laid out by `sharding`.

    Each process hands over what its own devices hold. Unlike `jax.device_put`, which compares the values of all
    processes, this takes no collective.
    """
    if sharding.is_fully_addressable:
        return jax.device_put(host, sharding)
    return jax.tree.map(lambda array: _everywhere(np.asarray(array), sharding), host)


def _everywhere(host: Shaped[np.ndarray, "..."], sharding: NamedSharding) -> jax.Array:
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index or ()])
