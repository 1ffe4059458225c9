"""The device programs of the engine: encode a chunk, run its tail, hand a request over, take it in, decode.

Each is one pure function under one shard_map over its mesh, written per rank, with the state donated. B slots of a
rank, S rows, R ranks, P pages of a table.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Int32, UInt8, UInt32

from widemesh.eplb import EplbConfig, ExpertLayout
from widemesh.model.cache import Cache, LayerCache
from widemesh.model.config import ModelConfig
from widemesh.model.draft import block_rows
from widemesh.model.engram_device_hash import EngramDeviceHash
from widemesh.model.loading import split_model
from widemesh.model.numerics import Numerics
from widemesh.model.rope import RopeTables
from widemesh.model.step import Recorder, ReplicaMaps, Rows, StepContext, StepSettings, selection_form
from widemesh.model.transformer import Boundary, Transformer
from widemesh.pallas_kernels.gpu import Implementation
from widemesh.serving.decode_rows import draw_rows, rows_of
from widemesh.serving.decode_state import DecodeState
from widemesh.serving.expert_load import ExpertLoad, LoadRecorder, LoadSummary
from widemesh.serving.expert_models import DRAFT, TARGET, expert_layouts
from widemesh.serving.sampling import RowLogprobs, SamplingRows, Tally, token_logprobs, write_tally
from widemesh.sharding import EP_AXIS, TP_AXIS, TensorParallel, partition_spec
from widemesh.sharding.exchange import Form, LayerShape, Wish, choose_form, make_exchange
from widemesh.sharding.kept import Kept, once

ENDED = 1  # the slot has drawn a stop token or its last one
NOT_FINITE = 2  # some logits held NaN or infinity, the tokens mean nothing

_PER_RANK = PartitionSpec(EP_AXIS)
_EVERYWHERE = PartitionSpec()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampled:
    """Result of a decode step of k rows of each slot: one after the other, or the newest token and its drafts."""

    # k tokens, how many drafts were tried, how many tokens the slot has drawn, and its end: the sum of `ENDED` and
    # `NOT_FINITE`, or 0 if it goes on. One array, because each that the host reads costs it a transfer of its own.
    packed: Int32[Array, "B k+3"]
    logprobs: RowLogprobs  # [B, k, ...]; of slots that asked for them


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HandOver:
    """What moves from one mesh to the other for one request."""

    pages: UInt8[Array, "n page_bytes"]
    layers: tuple[LayerCache, ...]  # [1, ...] each


@dataclasses.dataclass(frozen=True, kw_only=True)
class Programs:
    """Step functions of one mesh, each a jitted program that stays compiled."""

    config: ModelConfig
    numerics: Numerics
    graph: nnx.GraphDef[Transformer]
    mesh: Mesh
    max_len: int  # tokens a slot has room for
    kernels: Implementation | None = None  # of the ops under packed numerics; None: by the device
    exchange: Wish = "auto"  # how rows reach their experts
    batch_invariant: bool = False  # sum a row's experts in their own order, whatever rank holds them
    eplb: EplbConfig = EplbConfig()  # of which the copies of experts count here
    draft_eplb: EplbConfig = EplbConfig()  # likewise of the draft's experts
    _made: dict[Any, Any] = dataclasses.field(default_factory=dict, init=False, repr=False, compare=False)

    # --- prefill --------------------------------------------------------------------------------------------------

    @once
    def prefill(self, rows: int) -> Kept[tuple[Int32[Array, "R"], Cache]]:
        """(parameters, cache, rows, rope, replicas) -> (length, cache): all layers on all rows.

        No logits: decode samples every token. The returned lengths say, by being there, that the step has run; the
        cache itself may be donated to the next step by then.
        """

        def step(
            parameters: nnx.State[Any, Any], cache: Cache, batch: Rows, rope: RopeTables, replicas: ReplicaMaps
        ) -> tuple[Int32[Array, "1"], Cache]:
            model = nnx.merge(self.graph, parameters)
            _, cache = model(cache, self._context(batch, rope, replicas, rows))
            return batch.length, cache

        return self._jit(step, (_PER_RANK, _PER_RANK, _EVERYWHERE, _EVERYWHERE), (_PER_RANK, _PER_RANK))

    @once
    def encode(self, rows: int) -> Kept[tuple[Boundary, Cache]]:
        """(parameters, cache, rows, rope, replicas) -> (boundary, cache): what later tokens need of a chunk."""

        def step(
            parameters: nnx.State[Any, Any], cache: Cache, batch: Rows, rope: RopeTables, replicas: ReplicaMaps
        ) -> tuple[Boundary, Cache]:
            return nnx.merge(self.graph, parameters).encode(cache, self._context(batch, rope, replicas, rows))

        return self._jit(step, (_PER_RANK, _PER_RANK, _EVERYWHERE, _EVERYWHERE), (_PER_RANK, _PER_RANK))

    @once
    def tail(self, rows: int) -> Kept[tuple[Int32[Array, "R"], Cache]]:
        """(parameters, cache, boundary, rows, rope, replicas) -> (length, cache): later layers, last `tail_rows`.

        `rows` is the chunk, with length 0 where the prompt goes on after it. Lengths as in `prefill`.
        """

        def step(
            parameters: nnx.State[Any, Any], cache: Cache, boundary: Boundary, batch: Rows, rope: RopeTables,
            replicas: ReplicaMaps,
        ) -> tuple[Int32[Array, "1"], Cache]:  # fmt: skip
            model, count = nnx.merge(self.graph, parameters), self.tail_rows(rows)
            boundary, batch = boundary.last_rows(batch, count)
            _, cache = model.tail(boundary, cache, self._context(batch, rope, replicas, count))
            return batch.length, cache

        return self._jit(step, (*[_PER_RANK] * 3, _EVERYWHERE, _EVERYWHERE), (_PER_RANK, _PER_RANK))

    def tail_rows(self, rows: int) -> int:
        """How many rows `tail` runs of a chunk of so many."""
        return min(rows, self.config.sliding_window)

    @once
    def score(self, rows: int) -> Kept[tuple[RowLogprobs, Cache]]:
        """(parameters, cache, rows, next tokens, rope, replicas) -> (log-probabilities [R, S, ...], cache).

        All layers on all rows, and what each row says of the token behind it, `next tokens` [R, S]. The only program
        of prefill that makes logits.
        """

        def step(
            parameters: nnx.State[Any, Any], cache: Cache, batch: Rows, targets: Int32[Array, "1 S"],
            rope: RopeTables, replicas: ReplicaMaps,
        ) -> tuple[RowLogprobs, Cache]:  # fmt: skip
            model, context = nnx.merge(self.graph, parameters), self._context(batch, rope, replicas, rows)
            hidden, cache = model(cache, context)
            scores = token_logprobs(model.logits(hidden[0], context), targets[0])
            return jax.tree.map(lambda x: x[None], scores), cache

        return self._jit(step, (*[_PER_RANK] * 3, _EVERYWHERE, _EVERYWHERE), (_PER_RANK, _PER_RANK))

    # --- decode ---------------------------------------------------------------------------------------------------

    @once
    def decode(self, steps: int) -> Kept[tuple[Cache, DecodeState, Tally, tuple[ExpertLoad, ...], Sampled]]:
        """(parameters, cache, state, tally, loads, control, writes, sampling, mask, hash, rope, replicas, records) ->
        new state and tokens.

        Runs every slot up to `steps` times, one after the other, or once with its drafts (`decode_rows`), and then
        proposes new ones: `control` [B] says how many rows it runs at most, and a slot that ends runs no more.
        `writes` [n, 3] are new entries of the page tables (slot, place, page), a slot of -1 for none. `mask` has a bit
        per token that a slot's constraint allows. `records` say what becomes of the step's expert load
        (`ExpertLoad.after`). Loads, replicas and records are one for each model: the target, then its draft.
        """

        def step(
            parameters: nnx.State[Any, Any], cache: Cache, state: DecodeState, tally: Tally,
            loads: tuple[ExpertLoad, ...], control: Int32[Array, "B"], writes: Int32[Array, "1 n 3"],
            sampling: SamplingRows, mask: UInt32[Array, "B W"], hash_: EngramDeviceHash | None, rope: RopeTables,
            replicas: tuple[ReplicaMaps, ...], records: tuple[Int32[Array, ""], ...],
        ) -> tuple[Cache, DecodeState, Tally, tuple[ExpertLoad, ...], Sampled]:  # fmt: skip
            model = nnx.merge(self.graph, parameters)
            cache = _write_table(cache, writes[0])

            def body(carry: Any, number: Int32[Array, ""]) -> Any:
                cache, state, tally = carry
                tokens, length = rows_of(state, control - number)
                batch, load = _decode_batch(tokens, length, state, hash_), LoadRecorder()
                context = self._context(batch, rope, replicas[0], tokens.shape[1], load)
                hidden, cache = model(cache, context)
                logits = model.logits(hidden, context)
                state, tally, drawn = draw_rows(logits, length, state, tally, sampling, mask)
                tried = jnp.maximum(length - 1, 0)
                return (cache, state, tally), (drawn, tried, load.load())

            carry = (cache, state, tally)
            if steps == 1:
                carry, (drawn, tried, routed) = body(carry, jnp.int32(0))
            else:
                carry, (drawn, tried, routed) = lax.scan(body, carry, jnp.arange(steps, dtype=jnp.int32))
                drawn = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), drawn)
                tried, routed = jnp.sum(tried, axis=0), jnp.sum(routed, axis=0)
            cache, state, tally = carry
            by_slot = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), (drawn.tokens, drawn.logprobs))
            count = jnp.sum(drawn.runs, axis=0, dtype=jnp.int32)
            end = ENDED * (state.is_done & (count > 0)) + NOT_FINITE * ~jnp.all(drawn.finite, axis=0)
            packed = jnp.concatenate(
                [by_slot[0], tried[:, None], count[:, None], end[:, None]], axis=1, dtype=jnp.int32
            )
            routed_by = [routed]
            if self.config.num_speculative_tokens:
                cache, state, routed = self._propose(model, cache, state, count > 0, rope, replicas[1])
                routed_by.append(routed)
            loads = tuple(map(ExpertLoad.after, loads, routed_by, records))
            return cache, state, tally, loads, Sampled(packed, by_slot[1])

        specs = (*[_PER_RANK] * 8, *[_EVERYWHERE] * 4)
        return self._jit(step, specs, (_PER_RANK,) * 5, donated=(1, 2, 3, 4))

    def _propose(
        self, model: Transformer, cache: Cache, state: DecodeState, has_run: Bool[Array, "B"], rope: RopeTables,
        replicas: ReplicaMaps,
    ) -> tuple[Cache, DecodeState, Int32[Array, "L Q"]]:  # fmt: skip
        """New drafts for the slots that have run and are not done, and the load of the draft's experts."""
        runs, tokens = has_run & ~state.is_done, block_rows(state.token, self.config)
        length = jnp.where(runs, tokens.shape[1], 0)
        batch, load = _decode_batch(tokens, length, state, None), LoadRecorder()
        context = self._context(batch, rope, replicas, tokens.shape[1], load, model=DRAFT)
        proposal, cache = model.propose(cache, context)
        return cache, state.with_drafts(proposal.tokens, runs), load.load()

    @once
    def summarise_window(self, model: int = TARGET) -> Kept[LoadSummary]:
        """Of the steps that the ring of a model's load holds, on every rank; one program for each model's shapes."""
        return self._summary(lambda load: LoadSummary.of(load.ring, load.num_rows[0]))

    @once
    def summarise_step(self, model: int = TARGET) -> Kept[LoadSummary]:
        """Of the newest step, on every rank; likewise."""
        return self._summary(lambda load: LoadSummary.of(load.last[:, None], 1))

    @once
    def join(self) -> Kept[DecodeState]:
        """(state, slots [R], rows [R, width]): write one slot per rank of the decode state; of -1, none."""
        return self._map(DecodeState.join, 3, donated=0)

    @once
    def write_tally(self) -> Kept[Tally]:
        """Set one slot per rank of the penalties' counts; a slot of -1 sets none."""
        return self._map(write_tally, 4, donated=0)

    # --- both -----------------------------------------------------------------------------------------------------

    @once
    def write_table(self, entries: int) -> Kept[Cache]:
        """(cache, writes [R, entries, 3]): set entries of page tables: (slot, place, page); a slot of -1 sets none."""
        return self._map(lambda cache, writes: _write_table(cache, writes[0]), 2, donated=0)

    @once
    def export(self, pages: int, rank: int) -> Kept[HandOver]:
        """(cache of that rank, ids of pages) -> what is handed over of its only slot: its rings, and these pages."""
        program = jax.jit(lambda cache, ids: HandOver(cache.pages[ids], cache.layers))
        return Kept(program, has_collectives=False)

    @once
    def import_state(self, pages: int) -> Kept[Cache]:
        """(cache, hand-over, slots [R], ids [R, pages]): write one request per rank into a slot and pages; of -1, none.

        The hand-over is one as `export` makes it, one request per rank. Pages past the end of the pool are dropped.
        """

        def step(cache: Cache, handed: HandOver, slot: Int32[Array, "1"], ids: Int32[Array, "1 n"]) -> Cache:
            place = jnp.where(slot[0] < 0, cache.table.shape[0], slot[0])  # past the end = dropped
            layers = jax.tree.map(
                lambda whole, part: whole.at[place].set(part[0], mode="drop"), cache.layers, handed.layers
            )
            stored = cache.pages.at[ids[0]].set(handed.pages, mode="drop")
            return dataclasses.replace(cache, pages=stored, layers=layers)

        return self._map(step, 4, donated=0)

    def _summary(self, summarise: Callable[[ExpertLoad], LoadSummary]) -> Kept[LoadSummary]:
        program = jax.jit(summarise, out_shardings=self.sharding(_EVERYWHERE))
        return Kept(program, has_collectives=True)

    def _context(
        self, rows: Rows, rope: RopeTables, replicas: ReplicaMaps, count: int, recorder: Recorder | None = None,
        model: int = TARGET,
    ) -> StepContext:  # fmt: skip
        settings = StepSettings(
            numerics=self.numerics,
            selection=selection_form(count, self.numerics),
            start_bound=self.max_len - 1,
            exchange=make_exchange(
                self.exchange_form(rows.tokens.size, model), axis=EP_AXIS, platform=self._platform,
                batch_invariant=self.batch_invariant,
            ),
            tp=TensorParallel(size=self.mesh.shape[TP_AXIS]),
            kernels=self.kernels,
        )
        return StepContext(
            rows, rope, settings, recorder or Recorder(), replicas=replicas,
            first_row=lax.axis_index(EP_AXIS) * rows.tokens.size,
        )  # fmt: skip

    @property
    def expert_layouts(self) -> tuple[ExpertLayout, ...]:
        """How many expert slots there are, and where they lie: of the target, and of its draft if there is one."""
        return expert_layouts(self.config, (self.eplb, self.draft_eplb), self.mesh.shape[EP_AXIS])

    def exchange_shape(self, rows: int, model: int = TARGET) -> LayerShape:
        """A MoE layer of a program with so many rows per rank."""
        config, ranks = (self.config, self.config.of_draft)[model], self.mesh.shape[EP_AXIS]
        return LayerShape(
            rows=rows, per_token=config.num_experts_per_tok, hidden=config.hidden_size,
            value_bytes=jnp.dtype(self.numerics.compute_dtype).itemsize, ranks=ranks,
            slots=self.expert_layouts[model].num_slots, batch_invariant=self.batch_invariant,
        )  # fmt: skip

    def exchange_form(self, rows: int, model: int = TARGET) -> Form:
        """How that layer's rows reach their experts."""
        return choose_form(self.exchange, self.exchange_shape(rows, model), self._platform)

    @property
    def _platform(self) -> str:
        platform: str = self.mesh.devices.flat[0].platform
        return platform

    def _map(self, step: Callable[..., Any], arguments: int, *, donated: int) -> Kept[Any]:
        """A program without parameters whose every argument and result has one part per rank."""
        specs = (_PER_RANK,) * arguments
        mapped = jax.shard_map(step, mesh=self.mesh, in_specs=specs, out_specs=_PER_RANK, check_vma=False)
        program = jax.jit(mapped, donate_argnums=donated, out_shardings=self.sharding())
        return Kept(program, has_collectives=False)

    def _jit(
        self, step: Callable[..., Any], specs: tuple[PartitionSpec, ...], out: Any, donated: tuple[int, ...] = (1,)
    ) -> Kept[Any]:
        _, state = split_model(self.config)  # the axes hold for every array of a packed parameter
        parameters = jax.tree.map(
            lambda variable: variable.replace(partition_spec(variable.axes)),
            state,
            is_leaf=lambda node: isinstance(node, nnx.Variable),
        )
        mapped = jax.shard_map(step, mesh=self.mesh, in_specs=(parameters, *specs), out_specs=out, check_vma=False)
        # Named, because XLA reports arrays without elements as replicated.
        shardings = jax.tree.map(self.sharding, out, is_leaf=lambda x: isinstance(x, PartitionSpec))
        program = jax.jit(mapped, donate_argnums=donated, out_shardings=shardings)
        return Kept(program, has_collectives=True)

    def sharding(self, spec: PartitionSpec = _PER_RANK) -> NamedSharding:
        """Layout of an array with one part per rank (or `spec`)."""
        return NamedSharding(self.mesh, spec)


def _decode_batch(
    tokens: Int32[Array, "B K"], length: Int32[Array, "B"], state: DecodeState, hash_: EngramDeviceHash | None
) -> Rows:
    """Rows of a decode step, which continue no cached prefix."""
    none = jnp.zeros((*tokens.shape, 0, 0), jnp.int32)
    return Rows.of(tokens, state.position, length, none if hash_ is None else hash_.rows(tokens, state.tail))


def _write_table(cache: Cache, writes: Int32[Array, "n 3"]) -> Cache:
    slot = jnp.where(writes[:, 0] < 0, cache.table.shape[0], writes[:, 0])  # past the end = dropped
    return dataclasses.replace(cache, table=cache.table.at[slot, writes[:, 1]].set(writes[:, 2], mode="drop"))
