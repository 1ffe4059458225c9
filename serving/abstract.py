"""What the engine's programs take, as shapes, dtypes and shardings: for compiling them where nothing is allocated.

The mesh may be of devices that are not there (an ahead-of-time topology). Everything is made by the functions that
make the real arrays, so a program traced with these arguments is the one that the engine dispatches.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from widemesh.eplb import ExpertLayout
from widemesh.model.cache import Cache, init_cache, page_layout
from widemesh.model.config import ModelConfig
from widemesh.model.engram_device_hash import EngramDeviceHash
from widemesh.model.loading import is_draft, is_expert, split_model
from widemesh.model.numerics import Numerics
from widemesh.model.rope import RopeTable, RopeTables
from widemesh.model.step import ReplicaMaps, Rows
from widemesh.serving.decode_state import DecodeState
from widemesh.serving.expert_load import ExpertLoad
from widemesh.serving.expert_models import DRAFT, TARGET
from widemesh.serving.programs import Programs
from widemesh.serving.sampling import SamplingRows, init_tally, mask_words
from widemesh.sharding import named_sharding, whole_parts


@dataclasses.dataclass(frozen=True, kw_only=True)
class AbstractArguments:
    """Arguments of the programs of one mesh. `slots` and `pages` are per rank, `page_size` is in tokens."""

    programs: Programs
    slots: int
    pages: int
    page_size: int
    windows: tuple[int, int] = (0, 0)  # steps of expert load that are kept, of target and draft

    def decode(self, steps: int = 1) -> tuple[Any, ...]:
        """Of `Programs.decode(steps)`."""
        config, ranks = self.programs.config, self._ranks
        slots = ranks * self.slots
        history = config.engram_max_ngram_size - 1
        drafts = config.num_speculative_tokens
        state = jax.eval_shape(functools.partial(_arrays, DecodeState.idle, slots, history, drafts))
        tally = jax.eval_shape(functools.partial(_arrays, init_tally, slots, config.vocab_size))
        sampling = jax.eval_shape(functools.partial(_arrays, SamplingRows.neutral, slots))
        control = jax.ShapeDtypeStruct((slots,), jnp.int32)
        rows = steps * (1 + drafts)
        entries = self.slots * (1 + -(-rows // self.page_size))
        writes = jax.ShapeDtypeStruct((ranks, entries, 3), jnp.int32)
        mask = jax.ShapeDtypeStruct((slots, mask_words(config.vocab_size)), jnp.uint32)
        hash_ = EngramDeviceHash.abstract(config) if config.engram_layer_ids else None
        layouts = self.programs.expert_layouts
        loads = tuple(
            jax.eval_shape(functools.partial(ExpertLoad.zeros, ranks, window, one.num_layers, one.slots_per_rank))
            for one, window in zip(layouts, self.windows, strict=False)
        )
        per_rank = self._placed((self.cache(), state, tally, loads, control, writes, sampling, mask))
        records = (jax.ShapeDtypeStruct((), jnp.int32),) * len(layouts)
        everywhere = self._placed((hash_, records), PartitionSpec())
        replicas = tuple(map(self.replicas, range(len(layouts))))
        return self.parameters(), *per_rank, everywhere[0], self.rope(), replicas, everywhere[1]

    def prefill(self, rows: int) -> tuple[Any, ...]:
        """Of `Programs.prefill(rows)` and of `Programs.encode(rows)`."""
        per_rank = self._placed((self.cache(), self.rows(rows)))
        return self.parameters(), *per_rank, self.rope(), self.replicas()

    def tail(self, rows: int) -> tuple[Any, ...]:
        """Of `Programs.tail`, behind an encode of `rows` rows; traces that encode to know what it hands on."""
        parameters, cache, batch, *tables = self.prefill(rows)
        boundary, _ = self.programs.encode(rows).eval_shape(parameters, cache, batch, *tables)
        return parameters, cache, self._placed(boundary), batch, *tables

    def parameters(self) -> nnx.State[Any, Any]:
        """Every parameter, experts with all physical slots of the mesh."""
        programs, placed = self.programs, []
        abstract = abstract_parameters(programs.config, programs.numerics, programs.expert_layouts)
        for path, variable in nnx.to_flat_state(abstract):
            sharding = named_sharding(programs.mesh, variable.axes)
            value = jax.tree.map(functools.partial(_with_sharding, sharding), variable.get_value())
            placed.append((path, variable.replace(value)))
        return nnx.from_flat_state(placed)

    def cache(self) -> Cache:
        """State of all ranks, without shardings."""
        programs, ranks = self.programs, self._ranks
        layout = page_layout(programs.config, programs.numerics, self.page_size)
        make = functools.partial(
            init_cache, programs.config, layout, slots=ranks * self.slots, pages=ranks * self.pages,
            table_pages=programs.max_len // self.page_size,
        )  # fmt: skip
        return jax.eval_shape(make)

    def rows(self, count: int) -> Rows:
        """A prefill batch: `count` rows of every slot."""
        requests, config = self._ranks * self.slots, self.programs.config

        def ids(*shape: int) -> Any:
            return jax.ShapeDtypeStruct(shape, jnp.int32)

        engram = ids(requests, count, len(config.engram_layer_ids), config.num_engram_columns)
        scalar = ids(requests)
        return Rows(ids(requests, count), scalar, scalar, engram, scalar, scalar)

    def rope(self) -> RopeTables:
        """Rotary tables of every position that a slot has room for, on every rank."""
        shape = (self.programs.max_len, self.programs.config.qk_rope_head_dim // 2)
        table = RopeTable(*[jax.ShapeDtypeStruct(shape, jnp.float32)] * 2)  # type: ignore[arg-type]
        return self._placed(RopeTables(plain=table, compressed=table), PartitionSpec())

    def replicas(self, model: int = TARGET) -> ReplicaMaps:
        """Where the copies of a model's experts lie, on every rank."""
        layout = self.programs.expert_layouts[model]
        copies = (layout.num_layers, layout.num_experts)
        maps = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((*copies, layout.max_copies), copies)]
        placed: ReplicaMaps = self._placed(ReplicaMaps(*maps), PartitionSpec())  # type: ignore[arg-type]
        return placed

    @property
    def _ranks(self) -> int:
        return int(self.programs.mesh.devices.shape[0])

    def _placed(self, tree: Any, spec: PartitionSpec | None = None) -> Any:
        """The tree with one part of every array per rank, or laid out by `spec`."""
        sharding = self.programs.sharding() if spec is None else self.programs.sharding(spec)
        return jax.tree.map(functools.partial(_with_sharding, sharding), tree)


def abstract_parameters(
    config: ModelConfig, numerics: Numerics, layouts: tuple[ExpertLayout, ...]
) -> nnx.State[Any, Any]:
    """Shapes and dtypes of the parameters of a mesh: experts in all slots of their model's layout, whole parts for its
    ranks."""
    _, state = split_model(config, numerics)

    def physical(path: tuple[Any, ...], variable: nnx.Variable[Any]) -> Any:
        def shape(x: jax.ShapeDtypeStruct) -> tuple[int, ...]:
            if is_expert(path):
                return (layouts[DRAFT if is_draft(path) else TARGET].num_slots, *x.shape[1:])
            return whole_parts(x.shape, variable.axes, layouts[TARGET].ranks)

        return variable.replace(
            jax.tree.map(lambda x: jax.ShapeDtypeStruct(shape(x), x.dtype), variable.get_value())
        )

    return nnx.from_flat_state([(path, physical(path, variable)) for path, variable in nnx.to_flat_state(state)])


def _arrays(make: Any, *args: Any) -> Any:
    return jax.tree.map(jnp.asarray, make(*args))


def _with_sharding(sharding: NamedSharding, x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
