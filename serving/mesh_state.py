"""Parameters, cache and tables on one mesh, and writes to its page tables."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Int32

from widemesh.eplb import initial_slot_owner
from widemesh.model.cache import Cache, init_cache, page_layout
from widemesh.model.checkpoint import Checkpoint
from widemesh.model.loading import StoredTensor, load_parameters, place_parameters, split_model
from widemesh.model.numerics import numerics_named
from widemesh.model.rope import RopeTables
from widemesh.serving.config import EngineConfig
from widemesh.serving.programs import Programs
from widemesh.serving.scheduling import PageWrites
from widemesh.sharding import named_sharding

_SMALLEST_WRITE = 16  # table entries of the smallest program that writes them
_WRITE_GROWTH = 16  # from one size to the next

_log = logging.getLogger(__name__)


class MeshState:
    """What one mesh holds. `slots` and `pages` are per rank."""

    def __init__(self, checkpoint: Checkpoint, config: EngineConfig, mesh: Mesh, *, slots: int, pages: int):
        model, sizes = checkpoint.config, config.scheduler
        _log.info("reading the weights for %d devices", mesh.devices.size)
        graph, numerics = split_model(model)[0], numerics_named(config.numerics, mesh.devices.flat[0].platform)
        self.ranks, self.slots_per_rank, self.pages_per_rank = mesh.devices.shape[0], slots, pages
        self.table_pages = sizes.pages_per_slot
        self.max_len = self.table_pages * config.page_size
        self.programs = Programs(
            config=model, numerics=numerics, graph=graph, mesh=mesh, max_len=self.max_len
        )
        self.sharding = self.programs.sharding()
        self.replicated = named_sharding(mesh, ())
        self._model, self._mesh = model, mesh
        self._fill(checkpoint, config)
        self._write_table = self.programs.write_table()

    def _fill(self, checkpoint: Checkpoint, config: EngineConfig) -> None:
        """Put on the devices what the programs take."""
        model = self._model
        self.parameters = self.place(checkpoint.read, checkpoint.stored)
        self.rope: RopeTables = jax.device_put(RopeTables.build(model, self.max_len), self.replicated)
        layout = page_layout(model, self.programs.numerics, config.page_size)

        def make() -> Cache:
            return init_cache(model, layout, slots=self.ranks * self.slots_per_rank,
                              pages=self.ranks * self.pages_per_rank, table_pages=self.table_pages)  # fmt: skip

        self.cache: Cache = jax.jit(make, out_shardings=self.sharding)()  # made where it lies

    def place(
        self, read: Callable[[str], np.ndarray], stored: Callable[[str], StoredTensor] | None = None
    ) -> nnx.State[Any, Any]:
        """Parameters of this mesh, laid out as its programs take them, from a function that reads released tensors.

        For packed weights see `load_parameters`.
        """
        owner = initial_slot_owner(self._model.n_routed_experts, self._mesh.devices.size)
        host: nnx.State[Any, Any] = load_parameters(self._model, self.programs.numerics, owner, read, stored)
        return place_parameters(host, self._mesh)

    def put(self, host: Any) -> Any:
        """Host arrays with one part per rank, on the devices. The arrays must not be written again."""
        return jax.device_put(host, self.sharding)

    def one_slot(self, slot: int) -> Int32[np.ndarray, "R"]:
        """For programs that take one slot per rank: this one, counted over the mesh, and -1 elsewhere."""
        slots = np.full(self.ranks, -1, np.int32)
        rank, local = divmod(slot, self.slots_per_rank)
        slots[rank] = local
        return slots

    def write_sizes(self) -> list[int]:
        """Numbers of table entries per rank that `write_table` has programs for."""
        sizes, most = [_SMALLEST_WRITE], self.slots_per_rank * self.table_pages
        while sizes[-1] < most:
            sizes.append(sizes[-1] * _WRITE_GROWTH)
        return sizes

    def write_table(self, writes: PageWrites) -> None:
        """Set entries of the page tables."""
        most = self.most_writes(writes)
        size = next(size for size in self.write_sizes() if size >= most)
        self.cache = self._write_table(self.cache, self.packed_writes(writes, size))

    def most_writes(self, writes: PageWrites) -> int:
        """Entries of the rank that has the most."""
        return int(np.bincount(writes.slots // np.int32(self.slots_per_rank), minlength=self.ranks).max())

    def packed_writes(self, writes: PageWrites, size: int) -> Int32[np.ndarray, "R size 3"]:
        """Table entries by rank, filled up with -1. No rank may have more than `size`."""
        packed = np.full((self.ranks, size, 3), -1, np.int32)
        if self.ranks == 1:
            columns = packed[0, : len(writes)].T
            columns[0], columns[1], columns[2] = writes.slots, writes.places, writes.pages
            return packed
        rank, local = np.divmod(writes.slots, np.int32(self.slots_per_rank))
        order = np.argsort(rank, kind="stable")
        begins = np.searchsorted(rank[order], np.arange(self.ranks))
        place = np.arange(len(order)) - begins[rank[order]]
        entries = np.stack([local, writes.places, writes.pages], axis=1)[order]
        packed[rank[order], place] = entries
        return packed
