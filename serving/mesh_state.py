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

from widemesh.eplb import EplbConfig
from widemesh.model.cache import Cache, init_cache, page_layout
from widemesh.model.checkpoint import Checkpoint
from widemesh.model.loading import StoredTensor, load_parameters, place_parameters, split_model
from widemesh.model.numerics import numerics_named
from widemesh.model.rope import RopeTables
from widemesh.serving.config import EngineConfig
from widemesh.serving.exchange_traffic import MeshTraffic
from widemesh.serving.expert_models import DRAFT, TARGET
from widemesh.serving.placed_experts import PlacedExperts
from widemesh.serving.programs import Programs
from widemesh.serving.scheduling import PageWrites
from widemesh.serving.tensor_split import refuse_packed
from widemesh.sharding import named_sharding
from widemesh.sharding.own_ranks import OwnRanks, place_everywhere

_SMALLEST_WRITE = 16  # table entries of the smallest program that writes them
_WRITE_GROWTH = 16  # from one size to the next

_log = logging.getLogger(__name__)


class MeshState:
    """What one mesh holds. `slots` and `pages` are per rank; `eplb` and `draft_eplb` say how many slots experts have.

    `experts` has one part for each model, the target's first. `has_placement`: they start with the placements that
    `config` names, if it does.
    Ranks, slots and pages are counted over this process's own ranks (`own`), which with one process are all.
    """

    def __init__(
        self, checkpoint: Checkpoint, config: EngineConfig, mesh: Mesh, *, slots: int, pages: int,
        eplb: EplbConfig = EplbConfig(), draft_eplb: EplbConfig = EplbConfig(), has_placement: bool = False,
    ):  # fmt: skip
        model, sizes = checkpoint.config, config.scheduler
        _log.info("reading the weights for %d devices", mesh.devices.size)
        graph, numerics = split_model(model)[0], numerics_named(config.numerics, mesh.devices.flat[0].platform)
        if numerics.packed_weights:
            refuse_packed(config.tensor_parallel_size)
        self.own = OwnRanks.of(mesh)
        self.ranks, self.slots_per_rank, self.pages_per_rank = self.own.count, slots, pages
        self.table_pages = sizes.pages_per_slot
        self.max_len = self.table_pages * config.page_size
        self.programs = Programs(
            config=model, numerics=numerics, graph=graph, mesh=mesh, max_len=self.max_len,
            exchange=config.exchange, batch_invariant=config.batch_invariant, eplb=eplb,
            draft_eplb=draft_eplb,
        )  # fmt: skip
        layouts, self.replicated = self.programs.expert_layouts, named_sharding(mesh, ())
        self.experts = tuple(
            PlacedExperts(layout, self.replicated, config.placement(layout, place) if has_placement else None)
            for place, layout in enumerate(layouts)
        )
        self.sharding = self.programs.sharding()
        self.traffic = MeshTraffic(self.programs)
        self._model, self._mesh = model, mesh
        self._fill(checkpoint, config)

    def _fill(self, checkpoint: Checkpoint, config: EngineConfig) -> None:
        """Put on the devices what the programs take."""
        model = self._model
        self.parameters = self.place(checkpoint.read, checkpoint.stored)
        for placed in self.experts:
            placed.place()
        self.rope: RopeTables = place_everywhere(RopeTables.build(model, self.max_len), self.replicated)
        layout = page_layout(model, self.programs.numerics, config.page_size)

        def make() -> Cache:
            return init_cache(model, layout, slots=self.own.total * self.slots_per_rank,
                              pages=self.own.total * self.pages_per_rank, table_pages=self.table_pages)  # fmt: skip

        self.cache: Cache = jax.jit(make, out_shardings=self.sharding)()  # made where it lies

    def place(
        self, read: Callable[[str], np.ndarray], stored: Callable[[str], StoredTensor] | None = None
    ) -> nnx.State[Any, Any]:
        """Parameters of this mesh, laid out as its programs take them, from a function that reads released tensors.

        For packed weights see `load_parameters`. Experts of other processes' ranks are not read.
        """
        owners = [placed.owners_on(self.own) for placed in self.experts]
        host: nnx.State[Any, Any] = load_parameters(
            self._model, self.programs.numerics, owners[TARGET], read, stored,
            draft_owner=owners[DRAFT] if len(owners) > DRAFT else None,
        )  # fmt: skip
        return place_parameters(host, self._mesh)

    @property
    def target(self) -> PlacedExperts:
        """The experts of the target model."""
        return self.experts[TARGET]

    def put(self, host: Any) -> Any:
        """Host arrays with one part per rank, on the devices. The arrays must not be written again."""
        return jax.device_put(host, self.sharding) if self.own.is_whole else self.own.place(host, self.sharding)

    def hand(self, host: Any) -> Any:
        """Host arrays with one part per rank, as a program takes them. They must not be written again."""
        return self.own.hand(host, self.sharding)

    def one_slot(self, slot: int) -> Int32[np.ndarray, "R"]:
        """For programs that take one slot per rank: this one, counted over own ranks, and -1 elsewhere."""
        slots = np.full(self.ranks, -1, np.int32)
        if slot >= 0:
            rank, local = divmod(slot, self.slots_per_rank)
            slots[rank] = local
        return slots

    def write_sizes(self) -> list[int]:
        """Numbers of table entries per rank that `write_table` has programs for."""
        sizes, most = [_SMALLEST_WRITE], self.slots_per_rank * self.table_pages
        while sizes[-1] < most:
            sizes.append(sizes[-1] * _WRITE_GROWTH)
        return sizes

    def write_table(self, writes: PageWrites, most: int) -> None:
        """Set entries of the page tables. `most` are those of the rank that has the most, of any process."""
        size = next(size for size in self.write_sizes() if size >= most)
        self.cache = self.programs.write_table(size)(self.cache, self.hand(self.packed_writes(writes, size)))

    def most_writes(self, writes: PageWrites) -> int:
        """Entries of the rank that has the most."""
        if not len(writes):
            return 0
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
