"""Logits and tokens on every shape of mesh are those of one device: 1 to 8 ranks of 1 to 4 devices.

A small model with every kind of layer runs in each test run; the default preset, other numerics and engines of all
shapes are slow: `pytest -m slow tests/serving/test_mesh_shapes.py`.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from widemesh.eplb import build_maps, initial_placement
from widemesh.model.cache import init_cache, page_layout
from widemesh.model.checkpoint import Checkpoint
from widemesh.model.forward import ForwardModel
from widemesh.model.loading import load_parameters, place_parameters, split_model
from widemesh.model.numerics import NUMERICS
from widemesh.model.rope import RopeTables
from widemesh.model.step import ReplicaMaps, Rows
from widemesh.serving import SamplingParams
from widemesh.serving.config import EngineConfig
from widemesh.serving.memory_plan import plan_memory
from widemesh.serving.programs import Programs
from widemesh.serving.sampling import SamplingRows, full_mask, init_tally, sample
from widemesh.sharding import make_mesh

BESIDE = Path(__file__).parent / "mesh_models.py"


def _load_models():
    """The module beside this file; tests are imported without a path of their own."""
    spec = importlib.util.spec_from_file_location("widemesh_test_mesh_models", BESIDE)
    module = sys.modules.setdefault(spec.name, importlib.util.module_from_spec(spec))
    spec.loader.exec_module(module)
    return module


models = _load_models()

SHAPES = ((1, 1), (2, 1), (4, 1), (8, 1), (1, 2), (1, 4), (2, 2), (4, 2))  # (ep, tp)
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

slow = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`folder(name)`: a checkpoint of one of the models."""
    return functools.cache(lambda name: models.write_model(tmp_path_factory.mktemp("models") / name, name))


@pytest.fixture(scope="module")
def whole(folder: Callable[[str], Path]) -> Callable[[str, str], ForwardModel]:
    """`whole(name, numerics)`: the model on one device, without a mesh."""
    return functools.cache(lambda name, numerics: ForwardModel.load(folder(name), NUMERICS[numerics]))


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


SETTINGS = settings(TEMPERATURE, TOP_K, TOP_P, np.zeros(8), 100 + np.arange(8))


def prompts() -> np.ndarray:
    return np.random.default_rng(0).integers(3, 500, (8, 2 * CHUNK)).astype(np.int32)


def run_on_mesh(
    folder: Path, model: ForwardModel, ep: int, tp: int, **exchange: Any
) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Two steps of the eight requests: logits of all rows, lengths, and a draw from each request's last row."""
    config, numerics, mesh = model.config, model.numerics, make_mesh(jax.devices()[: ep * tp], tp)
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
    checkpoint = Checkpoint.open(folder)
    owner = initial_placement(programs.expert_layout)
    parameters = place_parameters(load_parameters(config, numerics, owner, checkpoint.read), mesh)
    maps = build_maps(owner, config.n_routed_experts, programs.expert_layout.max_copies)
    replicas = ReplicaMaps(maps.expert_slots, maps.copies)
    per_rank, width = 8 // ep, LENGTH // 4
    cache = init_cache(config, page_layout(config, numerics, 4), slots=8, pages=ep * (1 + per_rank * width),
                       table_pages=width)  # fmt: skip
    first_page = 1 + np.arange(8) % per_rank * width  # counted on the rank
    table = (first_page[:, None] + np.arange(width)).astype(np.int32)
    cache = jax.device_put(dataclasses.replace(cache, table=table), programs.sharding())
    rope, ids, start, found = RopeTables.build(config, LENGTH), prompts(), np.zeros(8, np.int32), []
    history_len = model.engram_hash.history_len
    for lengths in (FIRST, SECOND):
        length = np.array(lengths, np.int32)
        part = np.stack([np.resize(one[begin : begin + CHUNK], CHUNK) for one, begin in zip(ids, start, strict=True)])
        before = np.stack([np.concatenate([np.full(history_len, -1), one])[begin : begin + history_len]
                           for one, begin in zip(ids, start, strict=True)]).astype(np.int32)  # fmt: skip
        batch = Rows.of(part, start, length, model.engram_hash.rows(part, before))
        logits, drawn, cache = program(parameters, cache, jax.tree.map(np.asarray, batch), SETTINGS, rope, replicas)
        found.append((np.asarray(logits), length, np.asarray(drawn)))
        start = start + length
    return found


def check_logits_and_draws(folder: Path, model: ForwardModel, ep: int, tp: int, **exchange: Any) -> None:
    ids, start, compared = prompts(), np.zeros(8, int), 0
    ends = start + FIRST + np.array(SECOND)
    wanted = [reference_logits(model, one[:end]) if end else None for one, end in zip(ids, ends, strict=True)]
    for logits, length, drawn in run_on_mesh(folder, model, ep, tp, **exchange):
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


@pytest.mark.parametrize(("ep", "tp"), SHAPES[1:])
def test_logits_and_draws_are_those_of_one_device(folder, whole, ep, tp):
    """Logits to 1e-5 of the largest of a token; draws with settings of each request's own, wherever it lies."""
    check_logits_and_draws(folder("small"), whole("small", "plain"), ep, tp)


def test_a_ragged_exchange_with_sums_in_order(folder, whole):
    check_logits_and_draws(folder("small"), whole("small", "plain"), 4, 2, exchange="ragged", batch_invariant=True)


def test_draws_tell_settings_apart(whole):
    """With a neighbour's settings, most requests draw another token: rows that are shifted would be seen."""
    logits = np.stack([reference_logits(whole("small", "plain"), one)[-1] for one in prompts()])
    positions = np.full(8, 2 * CHUNK)
    own = reference_draw(logits, SETTINGS, positions)
    shifted = reference_draw(logits, jax.tree.map(lambda x: np.roll(x, 1, axis=0), SETTINGS), positions)
    assert (own != shifted).sum() >= 5


@slow
@pytest.mark.parametrize(("ep", "tp"), SHAPES)
def test_default_preset(folder, whole, ep, tp):
    check_logits_and_draws(folder("tiny-mesh"), whole("tiny-mesh", "plain"), ep, tp)


@slow
@pytest.mark.parametrize("numerics", ["kvq", "w8a8"])
def test_default_preset_with_quantised_values(folder, whole, numerics):
    """Beside the same program on a mesh of one device: the reference adds up in another order, and a sum that differs
    in its last bit may round to another code, of a cached vector or an activation. With these prompts no cut does that.
    """
    model = whole("tiny-mesh", numerics)
    one = run_on_mesh(folder("tiny-mesh"), model, 1, 1)
    for ep, tp in ((1, 4), (2, 2)):
        for (logits, length, drawn), (wanted, _, own) in zip(
            run_on_mesh(folder("tiny-mesh"), model, ep, tp), one, strict=True
        ):
            valid = np.arange(CHUNK) < length[:, None]
            difference = np.abs(logits - wanted).max(axis=2) / np.abs(wanted).max(axis=2)
            assert difference[valid].max() < 1e-5
            np.testing.assert_array_equal(drawn[length > 0], own[length > 0])


def check_tokens(model: ForwardModel, tokens: list[list[int]]) -> None:
    """Each token is what the whole forward over the list before it, and the request's settings, say."""
    for prompt, sampling, drawn in zip(*models.requests(), tokens, strict=True):
        assert len(drawn) == sampling.max_tokens
        logits = reference_logits(model, np.concatenate([prompt, drawn]).astype(np.int32))
        positions = len(prompt) + np.arange(len(drawn))
        own = reference_draw(logits[positions - 1], _rows_of(sampling, len(drawn)), positions)
        np.testing.assert_array_equal(drawn, own, err_msg=f"{sampling}")


def _rows_of(sampling: SamplingParams, count: int) -> SamplingRows:
    one = (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, sampling.seed or 0)
    return settings(*(np.repeat(value, count) for value in one))


def test_engine_on_two_ranks_of_two_devices(folder, whole):
    """Prefill on one rank of two, in chunks by mask; two rows a dispatch; five requests on four slots."""
    tokens = models.generate(folder("small"), ep=2, tp=2, prefill_devices=2)
    check_tokens(whole("small", "plain"), tokens)


@slow
def test_bounded_replay_on_two_ranks_of_two_devices(folder):
    """Encode and tail instead of all layers on all rows; the same on one device."""
    one, parts = (models.generate(folder("small"), ep=ep, tp=tp, prefill_devices=tp, exact=False)
                  for ep, tp in ((1, 1), (2, 2)))  # fmt: skip
    assert parts == one


@slow
def test_engines_of_every_shape(folder, whole):
    """The default preset, in a process with more devices than a test has: prefill and decode devices are disjoint."""
    shapes = [[ep, tp, tp] for ep, tp in SHAPES]
    flags = [flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag]
    env = os.environ | {"XLA_FLAGS": " ".join([*flags, "--xla_force_host_platform_device_count=10"])}
    done = subprocess.run([sys.executable, str(BESIDE), str(folder("tiny-mesh")), json.dumps(shapes)], env=env,
                          capture_output=True, text=True, timeout=1800, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == len(SHAPES)
    for tokens in found:
        assert tokens == found[0]
    check_tokens(whole("tiny-mesh", "plain"), found[0])


@pytest.mark.parametrize(("ep", "tp"), [(1, 1), (1, 4), (4, 1), (2, 2), (4, 2)])
def test_a_device_holds_its_part_of_the_weights(ep, tp):
    """Attention, embedding and head shrink with tp, experts and tables with both; the plan counts the same bytes."""
    config = models.MODELS["tiny-mesh"]
    _, abstract = split_model(config)
    host = nnx.from_flat_state([(path, p.replace(np.zeros(p.get_value().shape, np.float32)))
                                for path, p in nnx.to_flat_state(abstract)])  # fmt: skip
    placed = nnx.to_flat_state(place_parameters(host, make_mesh(jax.devices()[: ep * tp], tp)))
    on_device = {path: p.get_value().addressable_shards[-1].data.nbytes for path, p in placed}
    in_all = {path: p.get_value().nbytes for path, p in placed}
    parts = {  # by the end of the name: over how many devices it is spread
        ("wq_b", "weight"): tp, ("attn_sink",): tp, ("wo_a", "weight"): tp, ("wo_b", "weight"): tp,
        ("shared_experts", "w1", "weight"): tp, ("shared_experts", "w2", "weight"): tp,
        ("shared_experts", "w3", "weight"): tp, ("engram", "wkv", "weight"): tp,
        ("experts", "w1"): ep * tp, ("experts", "w2"): ep * tp, ("experts", "w3"): ep * tp,
        ("engram", "embed", "weight"): ep * tp,
    }  # fmt: skip
    seen = set()
    for path in on_device:
        name = next((ending for ending in parts if path[-len(ending) :] == ending and "indexer" not in path), None)
        spread = tp if path in (("embed", "weight"), ("head", "weight")) else parts.get(name, 1)
        assert on_device[path] * spread == in_all[path], path
        seen.add(name)
    assert seen == {*parts, None}
    planned = plan_memory(config, EngineConfig(
        numerics="plain", prefill_devices=tp, decode_devices=ep * tp, tensor_parallel_size=tp
    )).decode  # fmt: skip
    kinds = {part.name: part.num_bytes for part in planned.parts}
    assert kinds["parameters"] + kinds["Engram tables"] == sum(on_device.values())
    assert (planned.ranks, planned.devices) == (ep, ep * tp)
