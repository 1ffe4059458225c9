"""The device side of the engine: what both meshes hold, and the programs that change it, in the order of the calls.

Owned by one thread. Host arrays are handed to a program as they are: the call places them in a tenth of the time that
`device_put` takes. They are never written again: on a CPU device the host buffer may be the device buffer.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jaxtyping import Int32, UInt32

from widemesh.model.checkpoint import Checkpoint
from widemesh.model.engram_device_hash import EngramDeviceHash
from widemesh.model.engram_hash import EngramHash
from widemesh.model.step import Rows
from widemesh.serving.config import EngineConfig
from widemesh.serving.decode_state import DecodeState, JoinRow
from widemesh.serving.expert_load import NOT_RECORDED, ExpertLoad
from widemesh.serving.mesh_state import MeshState
from widemesh.serving.programs import HandOver, Sampled
from widemesh.serving.sampling import RowLogprobs, SamplingRows, TallyRow, full_mask, init_tally
from widemesh.serving.scheduling import NO_WRITES, KvLoad, PageWrites
from widemesh.serving.step_needs import PrefillSize
from widemesh.serving.transfer import InProcessTransfer, take_rank
from widemesh.sharding import MeshPair
from widemesh.sharding.own_ranks import OwnRanks, place_everywhere

_SMALL_CHUNK = 32  # rows of the small prefill program, for short prompts and last chunks
_EXPORT_GROWTH = 4  # from one size of a hand-over to the next, from a single page on

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class PrefillRow:
    """The next rows of the request on one prefill rank."""

    token_ids: Int32[np.ndarray, "n"]
    start: int
    history: Int32[np.ndarray, "h"]  # ids just before, oldest first, -1 before the start
    first: int = 0  # where its run began
    write_from: int = 0  # tokens below are cached already
    is_last: bool = True  # the prompt ends with these rows
    targets: Int32[np.ndarray, "n"] | None = None  # the token behind each row, if its log-probability is wanted


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefillStep:
    """A prefill step under way."""

    done: jax.Array  # comes when all of it has run
    scored: RowLogprobs | None  # [ranks, rows, ...], of rows with targets; None: there are none
    own: OwnRanks

    def is_done(self) -> bool:
        """Whether it has run."""
        return bool(self.done.is_ready())  # type: ignore[attr-defined]

    def wait(self) -> None:
        """Return when it has run."""
        self.done.block_until_ready()

    def scores(self) -> RowLogprobs | None:
        """Its log-probabilities, on the host. Waits for it if there are any."""
        return None if self.scored is None else jax.tree.map(self.own.read, self.scored)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeResult:
    """What a decode step says of every slot, on the host."""

    tokens: Int32[np.ndarray, "slots k"]
    tried: Int32[np.ndarray, "slots"]  # drafts that were run
    count: Int32[np.ndarray, "slots"]  # how many of the tokens count
    end: Int32[np.ndarray, "slots"]  # 0, or a sum of `programs.ENDED` and `programs.NOT_FINITE`
    logprobs: RowLogprobs | None  # [slots, k, ...]; None: no slot asked


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeStep:
    """A decode step under way."""

    sampled: Sampled
    wants_logprobs: bool
    own: OwnRanks
    dispatched_s: float = dataclasses.field(default_factory=time.monotonic)

    def wait(self) -> DecodeResult:
        """Its result, once it is there."""
        packed = self.own.read(self.sampled.packed)  # on its way since the dispatch
        logprobs = jax.tree.map(self.own.read, self.sampled.logprobs) if self.wants_logprobs else None
        return DecodeResult(
            tokens=packed[:, :-3], tried=packed[:, -3], count=packed[:, -2], end=packed[:, -1], logprobs=logprobs
        )


class DeviceEngine:
    """Prefill, hand-over and decode on their meshes. Every call returns once its work is dispatched.

    Slots, ranks and pages are those of this process, and `config` is its share. With several processes, all of them
    must make the same calls in the same order, with the same sizes (`StepNeeds`); what one has no work for it calls
    with nothing (None, no rows).
    """

    mesh_type: Callable[..., MeshState] = MeshState  # what makes a mesh's state and programs

    def __init__(self, config: EngineConfig, checkpoint: Checkpoint, engram_hash: EngramHash, meshes: MeshPair):
        self.config, self.model_config, self.engram_hash = config, checkpoint.config, engram_hash
        sizes, model, slots = config.scheduler, checkpoint.config, config.max_num_seqs
        self.prefill = self.mesh_type(checkpoint, config, meshes.prefill, slots=1, pages=sizes.prefill_pages)
        self.decode = self.mesh_type(
            checkpoint, config, meshes.decode, slots=sizes.slots_per_rank, pages=sizes.decode_pages, eplb=config.eplb,
            draft_eplb=config.draft_eplb, has_placement=True,
        )  # fmt: skip
        self.transfer = InProcessTransfer(meshes.decode, self.decode.own)
        self._idle_loads: dict[int, HandOver] = {}  # by pages: the part in a load of a process that has none
        self.num_dispatches = 0  # programs started since the start
        self._chunks = sorted({min(_SMALL_CHUNK, config.chunk_rows), config.chunk_rows})
        self._has_tail = config.replay_tail == "bounded"
        programs = self.prefill.programs
        if self._has_tail:
            self._encode = {rows: programs.encode(rows) for rows in self._chunks}
            self._tail = {rows: programs.tail(rows) for rows in self._chunks}
        else:
            self._whole = {rows: programs.prefill(rows) for rows in self._chunks}
        self._score = {rows: programs.score(rows) for rows in self._chunks}

        programs = self.decode.programs
        self._join, self._write_tally = programs.join(), programs.write_tally()
        self._decode = programs.decode(config.decode_steps)
        self._state = self.decode.put(DecodeState.idle(slots, engram_hash.history_len, model.num_speculative_tokens))
        self._tally = self.decode.put(init_tally(slots, model.vocab_size))
        self.expert_loads = tuple(map(self._no_load, range(len(self.decode.experts))))
        self._records = tuple(place_everywhere(np.int32(code), self.decode.replicated) for code in range(3))
        self._none_recorded = (self._records[NOT_RECORDED],) * len(self.decode.experts)
        self._no_rows = np.zeros(slots, np.int32)
        self._rows: tuple[Int32[np.ndarray, "slots"], Any] = self._no_rows, self.decode.hand(self._no_rows)
        self._full_mask = self.decode.put(full_mask(slots, model.vocab_size))
        self._sampling = SamplingRows.neutral(slots)  # as the last step had it, and the same on the devices
        self._placed_sampling = self.decode.put(self._sampling)
        self._hash: EngramDeviceHash | None = None
        if model.engram_layer_ids:
            self._hash = place_everywhere(EngramDeviceHash.build(engram_hash), self.decode.replicated)
        # Table entries that travel with a step: what its slots can grow by.
        self._writes_per_rank = sizes.slots_per_rank * (1 + sizes.pages_of(sizes.decode_rows))
        self._no_writes = self.decode.hand(self.decode.packed_writes(NO_WRITES, self._writes_per_rank))
        self._wants_logprobs = False
        history = np.full(engram_hash.history_len, -1, np.int32)
        self._idle_slot = JoinRow(token=0, position=0, last=0, tail=history, stop_token_ids=frozenset())
        self._idle_tally = TallyRow.of(-1, np.zeros(0, np.int32), [], model.vocab_size)
        # Rows of the last step, and the bytes that its exchanges sent: most steps are given the same object.
        self._counted: tuple[Int32[np.ndarray, "slots"] | None, int] = (None, 0)

    # --- prefill --------------------------------------------------------------------------------------------------

    def prefill_pages(self, writes: PageWrites, most: int) -> None:
        """Set page ids of prefill slots, `most` of them on one rank."""
        self.num_dispatches += 1
        self.prefill.write_table(writes, most)

    def prefill_size(self, work: list[PrefillRow | None]) -> PrefillSize:
        """The programs that rows of each prefill rank need."""
        plain = [row for row in work if row and row.targets is None]
        scored = [row for row in work if row and row.targets is not None]
        return PrefillSize(
            rows=self._chunk_of(plain), has_tail=self._has_tail and any(row.is_last for row in plain),
            scored_rows=self._chunk_of(scored),
        )  # fmt: skip

    def prefill_step(self, work: list[PrefillRow | None], size: PrefillSize | None = None) -> PrefillStep:
        """Run the next rows of each prefill rank's request (None = idle rank).

        Rows with targets run in a program of their own, where the other ranks are idle, so that what runs for the
        others does not depend on them. `size` is `prefill_size` or larger.
        """
        size = size or self.prefill_size(work)
        scores, done = None, None
        if size.scored_rows:
            scores = self._run_scored([row if row and row.targets is not None else None for row in work], size)
            done = scores.chosen
        if size.rows:
            done = self._run_plain([row if row and row.targets is None else None for row in work], size)
        assert done is not None, "a prefill step without rows"
        return PrefillStep(done=done, scored=scores, own=self.prefill.own)

    def _chunk_of(self, work: list[PrefillRow]) -> int:
        """The size of chunk that they need, 0 for none."""
        longest = max((len(row.token_ids) for row in work), default=0)
        return next(size for size in self._chunks if size >= longest) if longest else 0

    def _run_plain(self, work: list[PrefillRow | None], size: PrefillSize) -> jax.Array:
        state, rows, batch = self.prefill, size.rows, self._batch(work, size.rows)
        tables = state.rope, state.target.replicas
        valid, given = int(batch.length.sum()), self.prefill.hand(batch)
        self.num_dispatches += 1
        if not self._has_tail:
            done, state.cache = self._whole[rows](state.parameters, state.cache, given, *tables)
            state.traffic.add("prefill", rows, valid)
            return done
        boundary, state.cache = self._encode[rows](state.parameters, state.cache, given, *tables)
        state.traffic.add("encode", rows, valid)
        if size.has_tail:
            ends = np.array([len(row.token_ids) if row and row.is_last else 0 for row in work], np.int32)
            self.num_dispatches += 1
            given = dataclasses.replace(given, length=state.hand(ends))
            done, state.cache = self._tail[rows](state.parameters, state.cache, boundary, given, *tables)
            count = state.programs.tail_rows(rows)
            state.traffic.add("tail", count, int(np.minimum(ends, count).sum()))
            return done
        return boundary.pre

    def _run_scored(self, work: list[PrefillRow | None], size: PrefillSize) -> RowLogprobs:
        state, rows, batch = self.prefill, size.scored_rows, self._batch(work, size.scored_rows)
        targets = np.zeros((len(work), rows), np.int32)
        for rank, row in enumerate(work):
            if row and row.targets is not None:
                targets[rank, : len(row.targets)] = row.targets
        self.num_dispatches += 1
        given, wanted = state.hand(batch), state.hand(targets)
        scores, state.cache = self._score[rows](
            state.parameters, state.cache, given, wanted, state.rope, state.target.replicas
        )
        state.traffic.add("logits", rows, int(batch.length.sum()))
        return scores

    def _batch(self, work: list[PrefillRow | None], rows: int) -> Rows:
        """Rows of each rank, in arrays of so many."""
        ids = np.zeros((len(work), rows), np.int32)
        start, length, first, write_from = (np.zeros(len(work), np.int32) for _ in range(4))
        history = np.full((len(work), self.engram_hash.history_len), -1, np.int32)
        for rank, row in enumerate(work):
            if row:
                ids[rank, : len(row.token_ids)] = row.token_ids
                start[rank], length[rank], history[rank] = row.start, len(row.token_ids), row.history
                first[rank], write_from[rank] = row.first, row.write_from
        engram = self.engram_hash.rows(ids, history)
        return Rows(ids, start, length, engram, first, write_from)  # type: ignore[arg-type]

    def load_size(self, load: KvLoad[Any]) -> int:
        """Pages of the program that moves it."""
        return next(size for size in self.export_sizes() if size >= len(load.source_pages))

    def load(self, load: KvLoad[Any] | None, size: int) -> None:
        """Move a prefilled request's state to its decode slot and pages. `size` is `load_size` or larger."""
        target = np.full((self.decode.ranks, size), self.decode.pages_per_rank, np.int32)  # past the end = dropped
        if load is None:
            arrived, slots = self._idle_loads[size], np.full(self.decode.ranks, -1, np.int32)
        else:
            count = len(load.source_pages)
            source = np.zeros(size, np.int32)  # page 0 fills up
            source[:count] = load.source_pages
            handed = self._export(load.prefill_rank, source)
            self.num_dispatches += 1
            arrived = self.transfer.send(handed, load.decode_rank, self.decode.sharding)
            slots = self.decode.one_slot(load.decode_slot)
            target[load.decode_rank, :count] = load.target_pages
        self.num_dispatches += 1
        given = self.decode.hand((slots, target))
        self.decode.cache = self.decode.programs.import_state(size)(self.decode.cache, arrived, *given)

    def _export(self, rank: int, pages: Int32[np.ndarray, "n"]) -> HandOver:
        """What is handed over of the request on this prefill rank."""
        rank += self.prefill.own.first
        handed = self.prefill.programs.export(len(pages), rank)(take_rank(self.prefill.cache, rank), pages)
        return handed

    # --- decode ---------------------------------------------------------------------------------------------------

    def separate_writes(self, writes: PageWrites, *, is_decoding: bool) -> int:
        """Of the rank that has most, the entries that do not travel with a step: they are for `decode_pages`."""
        most = self._writes_per_rank
        if is_decoding and (len(writes) <= most or self.decode.most_writes(writes) <= most):
            return 0
        return self.decode.most_writes(writes)

    def decode_pages(self, writes: PageWrites, most: int) -> None:
        """Set page ids of decode slots outside of a step, `most` of them on one rank."""
        self.num_dispatches += 1
        self.decode.write_table(writes, most)

    def join(self, slot: int, row: JoinRow | None) -> None:
        """Write the state of a slot whose request decodes from the next step on; of slot -1, none."""
        packed = (row or self._idle_slot).packed()
        rows = np.broadcast_to(packed, (self.decode.ranks, len(packed)))
        given = self.decode.hand((self.decode.one_slot(slot), rows))
        self.num_dispatches += 1
        self._state = self._join(self._state, *given)

    def set_tally(self, row: TallyRow | None) -> None:
        """Write one slot's tally, each rank getting a row and all but one ignoring it."""
        row = row or self._idle_tally
        prompt, output = (np.broadcast_to(x, (self.decode.ranks, *x.shape)) for x in (row.prompt, row.output))
        given = self.decode.hand((self.decode.one_slot(row.slot), prompt, output))
        self.num_dispatches += 1
        self._tally = self._write_tally(self._tally, *given)

    def decode_step(
        self,
        rows: Int32[np.ndarray, "slots"] | None,
        pages: PageWrites,
        sampling: SamplingRows,
        mask: UInt32[np.ndarray, "slots W"] | None = None,
        records: tuple[int, ...] = (),
    ) -> DecodeStep:
        """Run at most `rows` rows of every slot (0 = it sits out; None = all do).

        `pages` are new entries of the page tables, those that `separate_writes` leaves to the step. The same `rows` or
        `sampling` object says that nothing has changed. `mask` holds the tokens that constraints allow; None allows
        everything everywhere. `records`: what becomes of the step's expert load (`ExpertLoad.after`), model by model;
        none is recorded without.
        """
        state = self.decode
        rows = self._no_rows if rows is None else rows
        if rows is not self._rows[0]:
            self._rows = rows, state.hand(rows)
        if sampling is not self._sampling:
            self._sampling, self._placed_sampling = sampling, state.put(sampling)
            self._wants_logprobs = bool((sampling.logprobs >= 0).any())
        writes = state.hand(state.packed_writes(pages, self._writes_per_rank)) if len(pages) else self._no_writes
        placed_mask = self._full_mask if mask is None else state.hand(mask)
        self.num_dispatches += 1
        replicas = tuple(placed.replicas for placed in state.experts)
        placed_records = tuple(self._records[record] for record in records) or self._none_recorded
        state.cache, self._state, self._tally, self.expert_loads, sampled = self._decode(
            state.parameters, state.cache, self._state, self._tally, self.expert_loads, self._rows[1], writes,
            self._placed_sampling, placed_mask, self._hash, state.rope, replicas, placed_records,
        )  # fmt: skip
        sampled.packed.copy_to_host_async()
        if rows is not self._counted[0]:
            self._counted = rows, self._decode_traffic(rows)
        state.traffic.total += self._counted[1]
        return DecodeStep(sampled=sampled, wants_logprobs=self._wants_logprobs, own=state.own)

    def _decode_traffic(self, rows: Int32[np.ndarray, "slots"]) -> int:
        """Bytes that the exchanges of a step send, if every slot runs the rows that it may."""
        traffic, slots, drafts = self.decode.traffic, self.config.slots_per_rank, self.config.num_speculative_tokens
        sent = traffic.step("logits", slots * (1 + drafts), int(rows.sum()), self.config.decode_steps)
        return sent + traffic.step("draft", slots * drafts, drafts * int((rows > 0).sum())) if drafts else sent

    def _no_load(self, model: int) -> ExpertLoad:
        layout, window = self.decode.experts[model].layout, self.config.load_windows[model]
        make = functools.partial(ExpertLoad.zeros, layout.ranks, window, layout.num_layers, layout.slots_per_rank)
        load: ExpertLoad = jax.jit(make, out_shardings=self.decode.sharding)()
        return load

    # --- start-up -------------------------------------------------------------------------------------------------

    def warm_up(self) -> None:
        """Compile every program by running it on idle rows, and report progress."""
        for name, run in self._warm_up_runs():
            start_s = time.monotonic()
            run()
            jax.block_until_ready((self.prefill.cache, self.decode.cache))
            _log.info("compiled %s in %.1f s", name, time.monotonic() - start_s)
        self.transfer.moved_bytes = self.num_dispatches = 0
        self.prefill.traffic.total = self.decode.traffic.total = 0

    def _warm_up_runs(self) -> Iterator[tuple[str, functools.partial[Any]]]:
        history = np.full(self.engram_hash.history_len, -1, np.int32)
        for rows in self._chunks:
            # Writes no page; what it leaves in the rings is never read.
            idle = PrefillRow(np.zeros(rows, np.int32), 0, history, write_from=rows)
            others: list[PrefillRow | None] = [None] * (self.config.prefill_ranks - 1)
            yield f"prefill of {rows} rows", functools.partial(self.prefill_step, [idle, *others])
            scored = dataclasses.replace(idle, targets=idle.token_ids)
            yield f"log-probabilities of {rows} rows", functools.partial(self.prefill_step, [scored, *others])
        for size in self.export_sizes():
            yield f"hand-over of {size} pages", functools.partial(self._warm_up_load, size)
        for state in (self.prefill, self.decode):
            for size in state.write_sizes():
                yield f"{size} table entries", functools.partial(state.write_table, NO_WRITES, size)
        yield "penalty counts", functools.partial(self.set_tally, None)
        yield "join", functools.partial(self.join, -1, None)
        yield f"decode of {self.config.max_num_seqs} slots", functools.partial(
            self.decode_step, None, NO_WRITES, self._sampling
        )

    def _warm_up_load(self, size: int) -> None:
        """From every prefill rank: an export is compiled per device."""
        for rank in range(self.config.prefill_ranks):
            nowhere = np.zeros(size, np.int32)
            load: KvLoad[Any] = KvLoad(
                request=None, prefill_rank=rank, prefill_slot=rank, decode_rank=0, decode_slot=0, tokens=0,
                source_pages=nowhere, target_pages=nowhere,
            )  # fmt: skip
            self.load(load, size)
        if not self.decode.own.is_whole:
            handed = self._export(0, np.zeros(size, np.int32))
            self._idle_loads[size] = self.transfer.send(handed, -1, self.decode.sharding)
            self.load(None, size)

    def export_sizes(self) -> Iterator[int]:
        """Sizes of hand-overs in pages, ascending."""
        size, largest = 1, self.prefill.table_pages
        while size < largest:
            yield size
            size *= _EXPORT_GROWTH
        yield largest
