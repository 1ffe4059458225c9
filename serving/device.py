"""The device side of the engine: parameters and state on both meshes, and the programs that change them.

Owned by one thread. Host arrays that are handed to a program are never written again: on a CPU device the host buffer
may be the device buffer.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Bool, Int32

from widemesh.eplb import initial_slot_owner
from widemesh.model.cache import Cache, init_cache
from widemesh.model.checkpoint import Checkpoint
from widemesh.model.engram_hash import EngramHash
from widemesh.model.loading import place_parameters, read_parameters, split_model
from widemesh.model.numerics import numerics_named
from widemesh.model.rope import RopeTables
from widemesh.model.step import Rows
from widemesh.serving.config import EngineConfig
from widemesh.serving.programs import Programs, export_state
from widemesh.serving.sampling import SamplingRows
from widemesh.serving.transfer import InProcessTransfer, take_rank
from widemesh.sharding import MeshPair, named_sharding

_SMALL_CHUNK = 32  # rows of the small prefill program, for short prompts and last chunks
_SMALL_EXPORT = 64  # tokens of the smallest hand-over; each next size is 4 times larger

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class PrefillRow:
    """The next rows of the request on one prefill rank."""

    token_ids: Int32[np.ndarray, "n"]
    start: int
    history: Int32[np.ndarray, "h"]  # ids just before, oldest first, -1 before the start


@dataclasses.dataclass(frozen=True)
class DecodeRows:
    """Control arrays of one decode step, one value per slot of the whole mesh. New arrays for every step."""

    token_ids: Int32[np.ndarray, "slots"]
    positions: Int32[np.ndarray, "slots"]
    is_active: Bool[np.ndarray, "slots"]
    history: Int32[np.ndarray, "slots h"]
    sampling: SamplingRows


class _MeshState:
    """Parameters, cache and tables on one mesh."""

    def __init__(self, checkpoint: Checkpoint, config: EngineConfig, mesh: Mesh, slots: int, max_len: int):
        model = checkpoint.config
        _log.info("reading the weights for %d devices", mesh.devices.size)
        graph, _ = split_model(model)
        owner = initial_slot_owner(model.n_routed_experts, mesh.devices.size)
        self.programs = Programs(
            config=model, numerics=numerics_named(config.numerics), graph=graph, mesh=mesh, max_len=max_len
        )
        host: nnx.State[Any, Any] = read_parameters(model, checkpoint.read, owner)
        self.parameters = place_parameters(host, mesh)
        self.cache: Cache = jax.device_put(init_cache(model, slots, max_len), self.programs.sharding())
        replicated = named_sharding(mesh, ())
        self.rope: RopeTables = jax.device_put(RopeTables.build(model, max_len), replicated)
        self.sharding = self.programs.sharding()


class DeviceEngine:
    """Prefill, hand-over and decode on their meshes. Slot s of the decode mesh lies on rank s // slots_per_rank."""

    def __init__(self, config: EngineConfig, checkpoint: Checkpoint, engram_hash: EngramHash, meshes: MeshPair):
        self.config, self.model_config, self.engram_hash = config, checkpoint.config, engram_hash
        # Room for whole groups of tokens.
        ratio = self.model_config.max_ratio
        self.max_len = -(-config.max_model_len // ratio) * ratio
        self._prefill = _MeshState(checkpoint, config, meshes.prefill, config.prefill_devices, self.max_len)
        self._decode = _MeshState(checkpoint, config, meshes.decode, config.max_num_seqs, self.max_len)
        self.transfer = InProcessTransfer(meshes.decode)
        chunks = sorted({min(_SMALL_CHUNK, config.chunk_rows), config.chunk_rows})
        self._prefill_programs = {rows: self._prefill.programs.prefill(rows) for rows in chunks}
        self._export = jax.jit(functools.partial(export_state, config=self.model_config), static_argnames="tokens")
        self._import = self._decode.programs.import_state()
        self._decode_program = self._decode.programs.decode()

    @property
    def prefill_cache(self) -> Cache:
        """State of the requests being prefilled."""
        return self._prefill.cache

    @property
    def decode_cache(self) -> Cache:
        """State of the requests being decoded."""
        return self._decode.cache

    def prefill_step(self, work: list[PrefillRow | None]) -> None:
        """Run the next rows of each prefill rank's request (None = idle rank). Returns once dispatched."""
        longest = max((len(row.token_ids) for row in work if row), default=0)
        rows = next(size for size in self._prefill_programs if size >= longest)
        ids = np.zeros((len(work), rows), np.int32)
        start, length = np.zeros(len(work), np.int32), np.zeros(len(work), np.int32)
        history = np.full((len(work), self.engram_hash.history_len), -1, np.int32)
        for rank, row in enumerate(work):
            if row:
                ids[rank, : len(row.token_ids)] = row.token_ids
                start[rank], length[rank], history[rank] = row.start, len(row.token_ids), row.history
        batch = self._rows(self._prefill, ids, start, length, history)
        state = self._prefill
        state.cache = self._prefill_programs[rows](state.parameters, state.cache, batch, state.rope)

    def hand_over(self, prefill_rank: int, tokens: int, slot: int) -> None:
        """Move the first `tokens` tokens of state from a prefill rank to a decode slot."""
        size = next(s for s in self.export_sizes() if s >= tokens)
        handed = self._export(take_rank(self._prefill.cache, prefill_rank), size)
        rank, local = divmod(slot, self.config.slots_per_rank)
        arrived = self.transfer.send(handed, rank, self._decode.sharding)
        slots = np.full(self.config.decode_devices, -1, np.int32)
        slots[rank] = local
        placed = jax.device_put(slots, self._decode.sharding)
        self._decode.cache = self._import(self._decode.cache, arrived, placed)

    def decode_step(self, rows: DecodeRows) -> tuple[Int32[np.ndarray, "slots"], Bool[np.ndarray, "slots"]]:
        """Next token of every slot, and whether its logits were finite. Waits for the result."""
        state = self._decode
        ids = rows.token_ids[:, None]
        batch = self._rows(state, ids, rows.positions, rows.is_active.astype(np.int32), rows.history)
        sampling = jax.device_put(rows.sampling, state.sharding)
        state.cache, sampled = self._decode_program(state.parameters, state.cache, batch, sampling, state.rope)
        return np.asarray(sampled.tokens), np.asarray(sampled.is_finite)

    def warm_up(self) -> None:
        """Compile every program by running it on idle rows, and report progress."""
        for name, run in self._warm_up_runs():
            start_s = time.monotonic()
            run()
            jax.block_until_ready((self._prefill.cache, self._decode.cache))
            _log.info("compiled %s in %.1f s", name, time.monotonic() - start_s)
        self.transfer.moved_bytes = 0

    def _warm_up_runs(self) -> Iterator[tuple[str, functools.partial[Any]]]:
        history = np.full(self.engram_hash.history_len, -1, np.int32)
        for rows in self._prefill_programs:
            idle = PrefillRow(np.zeros(rows, np.int32), 0, history)
            yield f"prefill of {rows} rows", functools.partial(
                self.prefill_step, [idle] + [None] * (self.config.prefill_devices - 1)
            )
        for size in self.export_sizes():
            yield f"hand-over of {size} tokens", functools.partial(self._warm_up_hand_over, size)
        slots = self.config.max_num_seqs
        zeros = np.zeros(slots, np.int32)
        sampling = SamplingRows(
            *map(jnp.asarray, (np.zeros(slots, np.float32), zeros, np.ones(slots, np.float32), zeros.astype(np.uint32)))
        )
        idle_rows = DecodeRows(zeros, zeros, np.zeros(slots, bool), np.tile(history, (slots, 1)), sampling)
        yield f"decode of {slots} slots", functools.partial(self.decode_step, idle_rows)

    def _warm_up_hand_over(self, size: int) -> None:
        """From every prefill rank: an export is compiled per device."""
        for rank in range(self.config.prefill_devices):
            self.hand_over(rank, size, 0)

    def export_sizes(self) -> Iterator[int]:
        """Sizes of hand-overs in tokens, ascending; whole groups each."""
        size = _SMALL_EXPORT
        while size < self.max_len:
            yield size
            size *= 4
        yield self.max_len

    def _rows(
        self, state: _MeshState, ids: np.ndarray, start: np.ndarray, length: np.ndarray, history: np.ndarray
    ) -> Rows:
        engram_rows = self.engram_hash.rows(ids, history)
        return jax.device_put(Rows(ids, start, length, engram_rows), state.sharding)  # type: ignore[arg-type]
