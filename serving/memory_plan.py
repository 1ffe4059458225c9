"""How much memory an engine will need, before any of it is allocated.

Parameters and state are counted from the shapes that the engine itself makes them with, so the plan cannot drift from
them. What a step needs in between is counted for the reference ops, array by array, largest ones only.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from widemesh.eplb import EplbConfig, ExpertLayout
from widemesh.model.cache import Cache, init_cache, page_layout
from widemesh.model.config import ModelConfig
from widemesh.model.loading import is_draft, is_expert, split_model
from widemesh.model.numerics import Numerics, numerics_named
from widemesh.model.params import is_engram_table
from widemesh.model.step import selection_form
from widemesh.serving.abstract import abstract_parameters
from widemesh.serving.config import EngineConfig
from widemesh.serving.expert_load import ExpertLoad
from widemesh.serving.expert_models import DRAFT, expert_layouts
from widemesh.serving.sampling import init_tally
from widemesh.serving.scheduling.config import SchedulerConfig
from widemesh.serving.tensor_split import refuse_packed
from widemesh.sharding import EP_AXIS, TP_AXIS, partition_spec

Kind = Literal["parameters", "state", "step"]

_F32, _I32, _U32, _BF16 = 4, 4, 4, 2  # bytes
_BLOCK_ROWS = 64  # rows whose scores of every head the reference ops hold at once


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """One kind of array on one device."""

    name: str
    kind: Kind
    num_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshMemory:
    """What each device of a mesh holds. A rank is one device, or `tensor_parallel_size` that share its matrices."""

    name: Literal["prefill", "decode"]
    ranks: int
    tensor_parallel_size: int = 1
    parts: tuple[Part, ...]

    @property
    def devices(self) -> int:
        """All of them."""
        return self.ranks * self.tensor_parallel_size

    @property
    def rank_bytes(self) -> int:
        """Bytes of one device (of a rank)."""
        return sum(part.num_bytes for part in self.parts)

    @property
    def total_bytes(self) -> int:
        """Bytes of all its devices."""
        return self.devices * self.rank_bytes

    def kind_bytes(self, kind: Kind) -> int:
        """Bytes of one device that are of this kind."""
        return sum(part.num_bytes for part in self.parts if part.kind == kind)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes of both meshes, and of the units in which state grows."""

    config: EngineConfig
    bytes_per_token: float  # of compressed KV and index keys, in the pages of all layers
    page_bytes: int
    window_bytes_per_slot: int  # rings of all layers
    window_bytes_needed: int  # the part of them that the model reads at a time
    prefill: MeshMemory
    decode: MeshMemory

    @property
    def meshes(self) -> tuple[MeshMemory, MeshMemory]:
        """Both, prefill first."""
        return self.prefill, self.decode

    @property
    def total_bytes(self) -> int:
        """Bytes of all devices of both meshes."""
        return sum(mesh.total_bytes for mesh in self.meshes)

    def to_json(self) -> dict[str, Any]:
        """Plain values; `per_rank` names every part, on one device of a rank; `totals` are over all devices."""
        tokens = self.bytes_per_token
        return {
            "bytes_per_token": int(tokens) if tokens == int(tokens) else tokens,
            "page_bytes": self.page_bytes,
            "window_bytes_per_slot": self.window_bytes_per_slot,
            "window_bytes_needed": self.window_bytes_needed,
            "ranks": {mesh.name: mesh.ranks for mesh in self.meshes},
            "devices": {mesh.name: mesh.devices for mesh in self.meshes},
            "per_rank": {mesh.name: {part.name: part.num_bytes for part in mesh.parts} for mesh in self.meshes},
            "totals": {mesh.name: mesh.total_bytes for mesh in self.meshes} | {"all": self.total_bytes},
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Split:
    """Ranks of a mesh and devices of each: into how many parts an array is cut along the axes of the mesh."""

    ranks: int
    tp: int

    def device_size(self, size: int, axis: Any) -> int:
        """Of a dimension that lies on this mesh axis, or on none."""
        return size // {EP_AXIS: self.ranks, TP_AXIS: self.tp}.get(axis, 1)


def plan_memory(model: ModelConfig, config: EngineConfig, platform: str | None = None) -> MemoryPlan:
    """The plan of an engine that serves `model` under `config`. Allocates nothing.

    `platform` ("cpu" or "gpu"; None: the one that JAX runs on) says what the numerics `serving` stand for.
    Raises ConfigError for settings that the model cannot be served with.
    """
    config.check_model(model)
    model = model.with_draft(config.num_speculative_tokens)
    sizes, numerics = config.scheduler, numerics_named(config.numerics, platform)
    if numerics.packed_weights:
        refuse_packed(config.tensor_parallel_size)
    tp = config.tensor_parallel_size
    of_prefill, of_decode = _Split(ranks=sizes.prefill_ranks, tp=tp), _Split(ranks=sizes.decode_ranks, tp=tp)
    prefill_cache, decode_cache = (
        rank_cache(model, config, slots=slots, pages=pages, platform=platform)
        for slots, pages in ((sizes.prefill_slots_per_rank, sizes.prefill_pages),
                             (sizes.slots_per_rank, sizes.decode_pages))
    )  # fmt: skip
    decode_layouts = config.expert_layouts(model)
    prefill_layouts = expert_layouts(model, (EplbConfig(), EplbConfig()), sizes.prefill_ranks)
    loads = [
        jax.eval_shape(functools.partial(ExpertLoad.zeros, 1, window, layout.num_layers, layout.slots_per_rank))
        for layout, window in zip(decode_layouts, config.load_windows, strict=False)
    ]
    is_cpu = (platform or jax.default_backend()) == "cpu"
    moving = [_moving_parts(model, config, numerics, of_decode, place, is_cpu)
              for place in range(len(decode_layouts)) if config.enable_eplb]  # fmt: skip
    tally = jax.eval_shape(functools.partial(init_tally, sizes.slots_per_rank, model.vocab_size, jnp.zeros))
    prefill = MeshMemory(
        name="prefill",
        ranks=sizes.prefill_ranks,
        tensor_parallel_size=tp,
        parts=(
            *_fixed_parts(model, numerics, of_prefill, prefill_cache, prefill_layouts),
            *_step_parts(model, numerics, prefill_cache, sizes.rows_per_rank, of_prefill),
        ),
    )
    decode = MeshMemory(
        name="decode",
        ranks=sizes.decode_ranks,
        tensor_parallel_size=tp,
        parts=(
            *_fixed_parts(model, numerics, of_decode, decode_cache, decode_layouts),
            Part(name="penalty tallies", kind="state", num_bytes=_nbytes(tally)),
            Part(name="expert load", kind="state", num_bytes=_nbytes(loads)),
            *_step_parts(model, numerics, decode_cache, sizes.decode_rows, of_decode),
            *(part for parts in moving for part in parts),
        ),
    )
    page_bytes = _nbytes(decode_cache.pages) // decode_cache.pages.shape[0]
    windows = [layer.window for layer in decode_cache.layers]
    return MemoryPlan(
        config=config,
        bytes_per_token=page_bytes / config.page_size,
        page_bytes=page_bytes,
        window_bytes_per_slot=sum(_nbytes(ring) // ring.shape[0] for ring in windows),
        window_bytes_needed=sum(model.sliding_window * ring.shape[2] * ring.dtype.itemsize for ring in windows),
        prefill=prefill,
        decode=decode,
    )


def _moving_parts(
    model: ModelConfig, config: EngineConfig, numerics: Numerics, split: _Split, place: int, is_cpu: bool
) -> list[Part]:
    """What moving the experts of one model (by its place) takes of a device."""
    layouts, name = config.expert_layouts(model), ("expert", "draft expert")[place]
    layout, rows = layouts[place], _moving_bytes(model, numerics, split, layouts, place)
    checksums = layout.slots_per_rank * _U32
    in_slice = config.eplb_of(place).slice_rows * (rows + checksums) // layout.slots_per_rank
    # Rows sent and rows that arrive; on a CPU, which has no collective for that, rows sent and those of all ranks.
    slices = 1 + layout.ranks if is_cpu else 2
    return [
        Part(name=f"{name} staging", kind="state", num_bytes=rows + checksums),
        Part(name=f"{name} slice", kind="step", num_bytes=slices * in_slice),
        # The rows that a commit makes, while older steps read the old ones.
        Part(name=f"{name} commit", kind="step", num_bytes=rows),
    ]


def rank_cache(
    model: ModelConfig, config: EngineConfig, *, slots: int, pages: int, platform: str | None = None
) -> Cache:
    """Shapes and dtypes of the state of one rank: `init_cache` without its arrays."""
    sizes: SchedulerConfig = config.scheduler
    layout = page_layout(model, numerics_named(config.numerics, platform), config.page_size)
    make: Callable[[], Cache] = functools.partial(
        init_cache, model, layout, slots=slots, pages=pages, table_pages=sizes.pages_per_slot
    )
    return jax.eval_shape(make)


def format_bytes(num_bytes: int) -> str:
    """In the largest binary unit that leaves a number of at least 1."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if round(size, 1) < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{num_bytes} B" if unit == "B" else f"{size:.1f} {unit}"


def _fixed_parts(
    model: ModelConfig, numerics: Numerics, split: _Split, cache: Cache, layouts: tuple[ExpertLayout, ...]
) -> list[Part]:
    """What a device holds from start-up on: parameters, rotary tables and state."""
    tables, rest = _parameter_bytes(model, numerics, split, layouts)
    positions = cache.table.shape[1] * cache.layout.page_size
    return [
        Part(name="parameters", kind="parameters", num_bytes=rest),
        Part(name="Engram tables", kind="parameters", num_bytes=tables),
        # cos and sin of every pair, for window-only and for compressed layers
        Part(name="rotary tables", kind="parameters", num_bytes=4 * positions * (model.qk_rope_head_dim // 2) * _F32),
        Part(name="expert maps", kind="parameters",
             num_bytes=sum(x.num_layers * x.num_experts * (x.max_copies + 1) * _I32 for x in layouts)),
        Part(name="page pool", kind="state", num_bytes=_nbytes(cache.pages)),
        Part(name="window rings", kind="state", num_bytes=_nbytes([layer.window for layer in cache.layers])),
        Part(name="compressor rings", kind="state", num_bytes=_nbytes([layer.open_group for layer in cache.layers])),
        Part(name="page tables", kind="state", num_bytes=_nbytes(cache.table)),
    ]


def _parameter_bytes(
    model: ModelConfig, numerics: Numerics, split: _Split, layouts: tuple[ExpertLayout, ...]
) -> tuple[int, int]:
    """Bytes on one device of the Engram tables, and of everything else."""
    tables = rest = 0
    for path, variable in nnx.to_flat_state(abstract_parameters(model, numerics, layouts)):
        num_bytes = _device_bytes(variable, split)
        if is_engram_table(path):
            tables += num_bytes
        else:
            rest += num_bytes
    return tables, rest


def _moving_bytes(
    model: ModelConfig, numerics: Numerics, split: _Split, layouts: tuple[ExpertLayout, ...], place: int
) -> int:
    """Bytes on one device of the experts of one layer of a model (by its place), all of whose layers have as many."""
    state = nnx.to_flat_state(abstract_parameters(model, numerics, layouts))
    mine = (variable for path, variable in state if is_expert(path) and is_draft(path) == (place == DRAFT))
    return sum(_device_bytes(variable, split) for variable in mine) // layouts[place].num_layers


def _device_bytes(variable: nnx.Variable[Any], split: _Split) -> int:
    """Bytes of a parameter that lie on one device."""
    spec = partition_spec(variable.axes)
    return sum(
        array.dtype.itemsize * math.prod(map(split.device_size, array.shape, spec))
        for array in jax.tree.leaves(variable.get_value())
    )  # fmt: skip


def _step_parts(model: ModelConfig, numerics: Numerics, cache: Cache, rows: int, split: _Split) -> list[Part]:
    """What a step holds in between, of `rows` rows per slot.

    Layers run one after the other, so each part counts once, as the layer that needs most of it does.
    """
    count = _packed_step if numerics.packed_weights else _decoded_step
    parts = count(model, numerics, cache, rows, split)
    return [Part(name=name, kind="step", num_bytes=num_bytes) for name, num_bytes in parts.items()]


def _packed_step(model: ModelConfig, numerics: Numerics, cache: Cache, rows: int, split: _Split) -> dict[str, int]:
    """For ops that read packed bytes: no key and no score of all entries is ever held for every row and head."""
    num_rows = cache.table.shape[0] * rows
    return {
        "selected entries": num_rows * (model.index_topk + model.candidate_topk_blocks) * _I32,
        "row activations": num_rows * _activations(model, split) * jnp.dtype(numerics.compute_dtype).itemsize,
        "matrix in bfloat16": _largest_dense(model) * _BF16,  # decoded from FP8 for its product, one at a time
        "logits": num_rows * model.vocab_size * _F32,
    }


def _largest_dense(model: ModelConfig) -> int:
    """Values of the largest matrix that is stored in FP8."""
    _, state = split_model(model)
    return max(math.prod(p.get_value().shape) for _, p in nnx.to_flat_state(state) if p.stored == "fp8")


def _decoded_step(model: ModelConfig, numerics: Numerics, cache: Cache, rows: int, split: _Split) -> dict[str, int]:
    """For the reference ops. XLA's own count of the temporaries of small models (prefill of 64 and 256 rows, decode of
    8 slots, up to 4000 tokens) is 0.55 to 1.2 times the sum.
    """
    slots, pages = cache.table.shape
    heads, dim, window = model.num_attention_heads // split.tp, model.head_dim, model.sliding_window
    block = min(rows, _BLOCK_ROWS)
    longest = pages * max((source.rows for source in cache.layout.sources), default=0)  # entries
    if selection_form(rows, numerics) == "mask":
        keys = longest * dim  # every entry in view, which all rows share
        per_head = block * heads * (window - 1 + block + longest)
        num_masks = 3  # visible, candidates, selected
    else:
        keys = rows * (window + min(model.index_topk, longest)) * dim  # gathered for each row
        per_head = rows * heads * (window + min(model.index_topk, longest))
        num_masks = 2  # visible, candidates
    index_per_head = block * model.index_n_heads * longest
    return {
        "keys in view": slots * (keys + longest * model.index_head_dim) * _F32,
        "index scores": slots * rows * longest * _F32,
        "index selection": 2 * slots * rows * longest * _F32,  # the scores again, masked and as ordered integers
        "candidate masks": num_masks * slots * rows * longest,
        # Products and what is made of them; of attention or of the index, never of both at a time.
        "scores per head": 2 * slots * max(per_head, index_per_head) * _F32,
        "row activations": slots * rows * _activations(model, split) * _F32,
        "logits": slots * rows * model.vocab_size * _F32,
    }


def _activations(model: ModelConfig, split: _Split) -> int:
    """Values per row in the widest places: streams before and after, queries and outputs of attention, experts.

    Each rank's experts are sent the rows of all ranks.
    """
    streams = 2 * model.hc_mult * model.hidden_size
    attention = 3 * model.num_attention_heads // split.tp * model.head_dim
    experts = model.num_experts_per_tok * (model.hidden_size + 3 * model.moe_intermediate_size // split.tp)
    return streams + attention + split.ranks * experts


def _nbytes(tree: Any) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
