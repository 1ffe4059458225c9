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
from widemesh.serving.mesh_state import MeshState
from widemesh.serving.programs import Sampled
from widemesh.serving.sampling import RowLogprobs, SamplingRows, TallyRow, full_mask, init_tally
from widemesh.serving.scheduling import KvLoad, PageWrites
from widemesh.serving.transfer import InProcessTransfer, take_rank
from widemesh.sharding import MeshPair

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

    def is_done(self) -> bool:
        """Whether it has run."""
        return bool(self.done.is_ready())  # type: ignore[attr-defined]

    def wait(self) -> None:
        """Return when it has run."""
        self.done.block_until_ready()

    def scores(self) -> RowLogprobs | None:
        """Its log-probabilities, on the host. Waits for it if there are any."""
        return None if self.scored is None else jax.device_get(self.scored)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeResult:
    """What a decode step says of every slot, on the host."""

    tokens: Int32[np.ndarray, "slots k"]
    count: Int32[np.ndarray, "slots"]  # how many of the tokens count
    end: Int32[np.ndarray, "slots"]  # 0, or a sum of `programs.ENDED` and `programs.NOT_FINITE`
    logprobs: RowLogprobs | None  # [slots, k, ...]; None: no slot asked


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeStep:
    """A decode step under way."""

    sampled: Sampled
    wants_logprobs: bool

    def wait(self) -> DecodeResult:
        """Its result, once it is there."""
        packed = np.asarray(self.sampled.packed)  # on its way since the dispatch
        logprobs = jax.device_get(self.sampled.logprobs) if self.wants_logprobs else None
        return DecodeResult(tokens=packed[:, :-2], count=packed[:, -2], end=packed[:, -1], logprobs=logprobs)


class DeviceEngine:
    """Prefill, hand-over and decode on their meshes. Every call returns once its work is dispatched."""

    mesh_type: Callable[..., MeshState] = MeshState  # what makes a mesh's state and programs

    def __init__(self, config: EngineConfig, checkpoint: Checkpoint, engram_hash: EngramHash, meshes: MeshPair):
        self.config, self.model_config, self.engram_hash = config, checkpoint.config, engram_hash
        sizes, model = config.scheduler, checkpoint.config
        self.prefill = self.mesh_type(checkpoint, config, meshes.prefill, slots=1, pages=sizes.prefill_pages)
        self.decode = self.mesh_type(
            checkpoint, config, meshes.decode, slots=sizes.slots_per_rank, pages=sizes.decode_pages
        )
        self.transfer = InProcessTransfer(meshes.decode)
        self.num_dispatches = 0  # programs started since the start
        self._chunks = sorted({min(_SMALL_CHUNK, config.chunk_rows), config.chunk_rows})
        self._has_tail = config.replay_tail == "bounded"
        programs = self.prefill.programs
        if self._has_tail:
            self._encode = {rows: programs.encode(rows) for rows in self._chunks}
            self._tail = {rows: programs.tail(min(rows, model.sliding_window)) for rows in self._chunks}
        else:
            self._whole = {rows: programs.prefill(rows) for rows in self._chunks}
        self._score = {rows: programs.score(rows) for rows in self._chunks}
        self._export = programs.export()

        slots, programs = config.max_num_seqs, self.decode.programs
        self._import, self._join, self._write_tally = programs.import_state(), programs.join(), programs.write_tally()
        self._decode = programs.decode(config.decode_steps)
        self._state = self.decode.put(DecodeState.idle(slots, engram_hash.history_len))
        self._tally = self.decode.put(init_tally(slots, model.vocab_size))
        self._full_mask = self.decode.put(full_mask(slots, model.vocab_size))
        self._sampling = SamplingRows.neutral(slots)  # as the last step had it, and the same on the devices
        self._placed_sampling = self.decode.put(self._sampling)
        self._hash: EngramDeviceHash | None = None
        if model.engram_layer_ids:
            self._hash = jax.device_put(EngramDeviceHash.build(engram_hash), self.decode.replicated)
        # Table entries that travel with a step: what its slots can grow by.
        self._writes_per_rank = sizes.slots_per_rank * (1 + sizes.pages_of(config.decode_steps))
        self._no_writes = self.decode.packed_writes(PageWrites.join([]), self._writes_per_rank)
        self._wants_logprobs = False

    # --- prefill --------------------------------------------------------------------------------------------------

    def prefill_pages(self, writes: PageWrites) -> None:
        """Set page ids of prefill slots."""
        if len(writes):
            self.num_dispatches += 1
            self.prefill.write_table(writes)

    def prefill_step(self, work: list[PrefillRow | None]) -> PrefillStep:
        """Run the next rows of each prefill rank's request (None = idle rank).

        Rows with targets run in a program of their own, where the other ranks are idle, so that what runs for the
        others does not depend on them.
        """
        scored = [row if row and row.targets is not None else None for row in work]
        plain = [row if row and row.targets is None else None for row in work]
        scores = self._run_scored(scored) if any(scored) else None
        done = self._run_plain(plain) if scores is None or any(plain) else scores.chosen
        return PrefillStep(done=done, scored=scores)

    def _run_plain(self, work: list[PrefillRow | None]) -> jax.Array:
        state, (rows, batch) = self.prefill, self._batch(work)
        self.num_dispatches += 1
        if not self._has_tail:
            done, state.cache = self._whole[rows](state.parameters, state.cache, batch, state.rope)
            return done
        boundary, state.cache = self._encode[rows](state.parameters, state.cache, batch, state.rope)
        if any(row and row.is_last for row in work):
            ends = [len(row.token_ids) if row and row.is_last else 0 for row in work]
            self.num_dispatches += 1
            batch = dataclasses.replace(batch, length=np.array(ends, np.int32))  # type: ignore[arg-type]
            done, state.cache = self._tail[rows](state.parameters, state.cache, boundary, batch, state.rope)
            return done
        return boundary.pre

    def _run_scored(self, work: list[PrefillRow | None]) -> RowLogprobs:
        state, (rows, batch) = self.prefill, self._batch(work)
        targets = np.zeros((len(work), rows), np.int32)
        for rank, row in enumerate(work):
            if row and row.targets is not None:
                targets[rank, : len(row.targets)] = row.targets
        self.num_dispatches += 1
        scores, state.cache = self._score[rows](state.parameters, state.cache, batch, targets, state.rope)
        return scores

    def _batch(self, work: list[PrefillRow | None]) -> tuple[int, Rows]:
        """The size of chunk that they need, and they in arrays of that size."""
        longest = max((len(row.token_ids) for row in work if row), default=0)
        rows = next(size for size in self._chunks if size >= longest)
        ids = np.zeros((len(work), rows), np.int32)
        start, length, first, write_from = (np.zeros(len(work), np.int32) for _ in range(4))
        history = np.full((len(work), self.engram_hash.history_len), -1, np.int32)
        for rank, row in enumerate(work):
            if row:
                ids[rank, : len(row.token_ids)] = row.token_ids
                start[rank], length[rank], history[rank] = row.start, len(row.token_ids), row.history
                first[rank], write_from[rank] = row.first, row.write_from
        engram = self.engram_hash.rows(ids, history)
        return rows, Rows(ids, start, length, engram, first, write_from)  # type: ignore[arg-type]

    def load(self, load: KvLoad[Any]) -> None:
        """Move a prefilled request's state to its decode slot and pages."""
        count = len(load.source_pages)
        size = next(s for s in self.export_sizes() if s >= count)
        source = np.zeros(size, np.int32)  # page 0 fills up
        source[:count] = load.source_pages
        handed = self._export(take_rank(self.prefill.cache, load.prefill_rank), source)
        arrived = self.transfer.send(handed, load.decode_rank, self.decode.sharding)
        target = np.full((self.decode.ranks, size), self.decode.pages_per_rank, np.int32)  # past the end = dropped
        target[load.decode_rank, :count] = load.target_pages
        self.num_dispatches += 2
        self.decode.cache = self._import(self.decode.cache, arrived, self.decode.one_slot(load.decode_slot), target)

    # --- decode ---------------------------------------------------------------------------------------------------

    def decode_pages(self, writes: PageWrites) -> None:
        """Set page ids of decode slots outside of a step."""
        if len(writes):
            self.num_dispatches += 1
            self.decode.write_table(writes)

    def join(self, slot: int, row: JoinRow) -> None:
        """Write the state of a slot whose request decodes from the next step on."""
        packed = np.broadcast_to(row.packed(), (self.decode.ranks, len(row.packed())))
        self.num_dispatches += 1
        self._state = self._join(self._state, self.decode.one_slot(slot), packed)

    def set_tally(self, row: TallyRow) -> None:
        """Write one slot's tally, each rank getting a row and all but one ignoring it."""
        prompt, output = (np.broadcast_to(x, (self.decode.ranks, *x.shape)) for x in (row.prompt, row.output))
        self.num_dispatches += 1
        self._tally = self._write_tally(self._tally, self.decode.one_slot(row.slot), prompt, output)

    def decode_step(
        self,
        rows: Int32[np.ndarray, "slots"],
        pages: PageWrites,
        sampling: SamplingRows,
        mask: UInt32[np.ndarray, "slots W"] | None = None,
    ) -> DecodeStep:
        """Run at most `rows` rows of every slot (0 = it sits out).

        `pages` are new entries of the page tables. The same `sampling` object says that nothing has changed. `mask`
        holds the tokens that constraints allow; None allows everything everywhere.
        """
        state = self.decode
        most = self._writes_per_rank
        if len(pages) > most and state.most_writes(pages) > most:  # requests have come, with all their pages
            self.num_dispatches += 1
            state.write_table(pages)
            pages = PageWrites.join([])
        if sampling is not self._sampling:
            self._sampling, self._placed_sampling = sampling, state.put(sampling)
            self._wants_logprobs = bool((sampling.logprobs >= 0).any())
        writes = state.packed_writes(pages, self._writes_per_rank) if len(pages) else self._no_writes
        placed_mask = self._full_mask if mask is None else mask
        self.num_dispatches += 1
        state.cache, self._state, self._tally, sampled = self._decode(
            state.parameters, state.cache, self._state, self._tally, rows, writes, self._placed_sampling,
            placed_mask, self._hash, state.rope,
        )  # fmt: skip
        sampled.packed.copy_to_host_async()
        return DecodeStep(sampled=sampled, wants_logprobs=self._wants_logprobs)

    # --- start-up -------------------------------------------------------------------------------------------------

    def warm_up(self) -> None:
        """Compile every program by running it on idle rows, and report progress."""
        for name, run in self._warm_up_runs():
            start_s = time.monotonic()
            run()
            jax.block_until_ready((self.prefill.cache, self.decode.cache))
            _log.info("compiled %s in %.1f s", name, time.monotonic() - start_s)
        self.transfer.moved_bytes = self.num_dispatches = 0

    def _warm_up_runs(self) -> Iterator[tuple[str, functools.partial[Any]]]:
        history = np.full(self.engram_hash.history_len, -1, np.int32)
        for rows in self._chunks:
            # Writes no page; what it leaves in the rings is never read.
            idle = PrefillRow(np.zeros(rows, np.int32), 0, history, write_from=rows)
            others: list[PrefillRow | None] = [None] * (self.config.prefill_devices - 1)
            yield f"prefill of {rows} rows", functools.partial(self.prefill_step, [idle, *others])
            scored = dataclasses.replace(idle, targets=idle.token_ids)
            yield f"log-probabilities of {rows} rows", functools.partial(self.prefill_step, [scored, *others])
        for size in self.export_sizes():
            yield f"hand-over of {size} pages", functools.partial(self._warm_up_load, size)
        for state in (self.prefill, self.decode):
            for size in state.write_sizes():
                nothing = np.zeros(min(size, state.slots_per_rank * state.table_pages), np.int32)
                yield f"{size} table entries", functools.partial(
                    state.write_table, PageWrites(nothing, nothing, nothing)
                )
        slots, zeros = self.config.max_num_seqs, np.zeros(0, np.int32)
        yield "penalty counts", functools.partial(
            self.set_tally, TallyRow.of(0, zeros, [], self.model_config.vocab_size)
        )
        idle_slot = JoinRow(token=0, position=0, last=0, tail=history, stop_token_ids=frozenset())
        yield "join", functools.partial(self.join, 0, idle_slot)
        yield f"decode of {slots} slots", functools.partial(
            self.decode_step, np.zeros(slots, np.int32), PageWrites.join([]), self._sampling
        )

    def _warm_up_load(self, size: int) -> None:
        """From every prefill rank: an export is compiled per device."""
        for rank in range(self.config.prefill_devices):
            nowhere = np.zeros(size, np.int32)
            self.load(KvLoad(request=None, prefill_rank=rank, prefill_slot=rank, decode_rank=0, decode_slot=0, tokens=0,
                             source_pages=nowhere, target_pages=nowhere))  # fmt: skip

    def export_sizes(self) -> Iterator[int]:
        """Sizes of hand-overs in pages, ascending."""
        size, largest = 1, self.prefill.table_pages
        while size < largest:
            yield size
            size *= _EXPORT_GROWTH
        yield largest
