"""Two steps of eight requests on a mesh of any shape, and what one device makes of the same rows.

As a program, for one of several processes that make up the mesh,

    python -m tests.serving.mesh_steps FOLDER COORDINATOR SIZE RANK FILE

joins the others, runs its own ranks' part on all devices of all of them, and writes what it has found to FILE.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from widemesh.eplb import build_maps, initial_placement
from widemesh.model.cache import init_cache, page_layout
from widemesh.model.checkpoint import Checkpoint
from widemesh.model.forward import ForwardModel, load_engram_hash
from widemesh.model.loading import load_parameters, place_parameters, split_model
from widemesh.model.numerics import NUMERICS
from widemesh.model.rope import RopeTables
from widemesh.model.step import ReplicaMaps, Rows
from widemesh.serving.programs import Programs
from widemesh.serving.sampling import SamplingRows, full_mask, init_tally, sample
from widemesh.sharding import make_mesh
from widemesh.sharding.own_ranks import OwnRanks, place_everywhere
from widemesh.sharding.processes import leave_coordinator, start_processes

SLOTS = 8
LENGTH = 32  # of every list that the reference runs, so that it is one program
CHUNK = 8
# Rows of eight requests in two steps. However they are spread, some ranks have more than others, and some have none:
# on 8 ranks those of requests 4 and 5 never, that of 1 at first; on 4 the third.
FIRST, SECOND = (8, 0, 1, 5, 0, 0, 3, 8), (2, 4, 0, 8, 0, 0, 0, 1)
# Of each request: greedy, or a temperature of its own with filters of its own.
TEMPERATURE = (0.0, 1.0, 0.5, 1.5, 1.0, 1.0, 0.0, 2.0)
TOP_K = (0, 0, 5, 20, 0, 0, 0, 2)
TOP_P = (1.0, 0.5, 1.0, 0.9, 1.0, 1.0, 1.0, 1.0)

Step = tuple[np.ndarray, np.ndarray, np.ndarray]  # logits [slots, CHUNK, V], lengths [slots], tokens drawn [slots]


def reference_logits(model: ForwardModel, ids: np.ndarray) -> np.ndarray:
    """Of every position; what follows a token does not change its logits."""
    return model.logits(np.concatenate([ids, np.zeros(LENGTH - len(ids), np.int32)]))[: len(ids)]


def draw(logits, rows, positions, is_active):
    """Tokens, where no slot has a constraint or a penalty."""
    mask, tally = full_mask(*logits.shape), jax.tree.map(jnp.asarray, init_tally(*logits.shape))
    return sample(logits, rows, mask, tally, positions, is_active)[0].tokens


_jitted_draw = jax.jit(draw)


def reference_draw(logits, rows, positions) -> np.ndarray:
    """Of rows that are all active. They are filled up, so that it is one program for any number of them."""
    count, room = len(logits), SLOTS + 1
    filled = jax.tree.map(lambda x: np.resize(x, (room, *x.shape[1:])), (logits, rows, positions.astype(np.int32)))
    return np.asarray(_jitted_draw(*filled, np.ones(room, bool)))[:count]


def settings(temperature, top_k, top_p, min_p, seed) -> SamplingRows:
    given = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "seed": seed}
    neutral = SamplingRows.neutral(len(temperature))
    return dataclasses.replace(
        neutral, **{name: np.asarray(value, getattr(neutral, name).dtype) for name, value in given.items()}
    )


SETTINGS = settings(TEMPERATURE, TOP_K, TOP_P, np.zeros(SLOTS), 100 + np.arange(SLOTS))


def prompts() -> np.ndarray:
    return np.random.default_rng(0).integers(3, 500, (SLOTS, 2 * CHUNK)).astype(np.int32)


def run_on_mesh(folder: Path, numerics_name: str, mesh: Mesh, **exchange: Any) -> list[Step]:
    """Two steps of the eight requests: logits of all rows, lengths, and a draw from each request's last row.

    With several processes, of the requests that lie on this one's ranks; all call it together.
    """
    checkpoint, numerics, own = Checkpoint.open(folder), NUMERICS[numerics_name], OwnRanks.of(mesh)
    config, hash_ = checkpoint.config, load_engram_hash(checkpoint.config, folder)
    programs = Programs(config=config, numerics=numerics, graph=split_model(config)[0], mesh=mesh, max_len=LENGTH,
                        **exchange)  # fmt: skip
    spec, everywhere = PartitionSpec("ep"), PartitionSpec()

    def step(parameters, cache, batch, sampling, rope, replicas):
        merged, context = nnx.merge(programs.graph, parameters), programs._context(batch, rope, replicas, CHUNK)
        hidden, cache = merged(cache, context)
        logits = merged.logits(hidden, context)
        last = jnp.maximum(batch.length - 1, 0)
        newest = jnp.take_along_axis(logits, last[:, None, None], axis=1)[:, 0]
        return logits, draw(newest, sampling, batch.start + batch.length, batch.length > 0), cache

    program = programs._jit(step, (spec, spec, spec, everywhere, everywhere), (spec, spec, spec))
    owner = initial_placement(programs.expert_layouts[0])
    parameters = place_parameters(load_parameters(config, numerics, owner, checkpoint.read), mesh)
    maps = build_maps(owner, config.n_routed_experts, programs.expert_layouts[0].max_copies)
    replicas, rope = place_everywhere(
        (ReplicaMaps(maps.expert_slots, maps.copies), RopeTables.build(config, LENGTH)), programs.sharding(everywhere)
    )
    per_rank, width = SLOTS // own.total, LENGTH // 4
    first, count = own.first * per_rank, own.count * per_rank
    cache = init_cache(config, page_layout(config, numerics, 4), slots=count,
                       pages=own.count * (1 + per_rank * width), table_pages=width)  # fmt: skip
    first_page = 1 + np.arange(count) % per_rank * width  # counted on the rank
    table = (first_page[:, None] + np.arange(width)).astype(np.int32)
    cache = own.place(dataclasses.replace(cache, table=table), programs.sharding())

    def mine(tree: Any) -> Any:
        return jax.tree.map(lambda array: np.asarray(array)[first : first + count], tree)

    sampling = own.hand(mine(SETTINGS), programs.sharding())
    ids, start, found = prompts(), np.zeros(SLOTS, np.int32), []
    for lengths in (FIRST, SECOND):
        length = np.array(lengths, np.int32)
        part = np.stack([np.resize(one[begin : begin + CHUNK], CHUNK) for one, begin in zip(ids, start, strict=True)])
        before = np.stack([np.concatenate([np.full(hash_.history_len, -1), one])[begin : begin + hash_.history_len]
                           for one, begin in zip(ids, start, strict=True)]).astype(np.int32)  # fmt: skip
        batch = own.hand(mine(Rows.of(part, start, length, hash_.rows(part, before))), programs.sharding())
        logits, drawn, cache = program(parameters, cache, batch, sampling, rope, replicas)
        found.append((own.read(logits), mine(length), own.read(drawn)))
        start = start + length
    return found


def check_steps(steps: list[Step], model: ForwardModel) -> None:
    """Logits to 1e-5 of the largest of a token, and the same draws, as of one device; of all eight requests."""
    ids, start, compared = prompts(), np.zeros(SLOTS, int), 0
    ends = start + FIRST + np.array(SECOND)
    wanted = [reference_logits(model, one[:end]) if end else None for one, end in zip(ids, ends, strict=True)]
    for logits, length, drawn in steps:
        active = np.flatnonzero(length)
        for slot in active:
            one = wanted[slot][start[slot] : start[slot] + length[slot]]
            difference = np.abs(logits[slot, : length[slot]] - one).max(axis=1) / np.abs(one).max(axis=1)
            assert difference.max() < 1e-5, (slot, difference)
            compared += len(one)
        newest = np.stack([wanted[slot][start[slot] + length[slot] - 1] for slot in active])
        rows = jax.tree.map(lambda x, active=active: x[active], SETTINGS)
        own = reference_draw(newest, rows, (start + length)[active])
        np.testing.assert_array_equal(drawn[active], own)
        start = start + length
    assert compared == sum(FIRST) + sum(SECOND)


def read_steps(files: Sequence[Path]) -> list[Step]:
    """Those of all processes together, from the file of each in the order of their ranks."""
    parts = [np.load(file) for file in files]
    found = [[np.concatenate([part[f"{i}.{kind}"] for part in parts]) for kind in range(3)] for i in range(2)]
    return [(logits, length, drawn) for logits, length, drawn in found]


if __name__ == "__main__":
    folder, coordinator, size, rank, file = sys.argv[1:]
    start_processes(coordinator, rank=int(rank), size=int(size))
    steps = run_on_mesh(Path(folder), "plain", make_mesh(jax.devices()))
    leave_coordinator()
    np.savez(file, **{f"{i}.{kind}": array for i, step in enumerate(steps) for kind, array in enumerate(step)})
