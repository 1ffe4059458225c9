"""Logits and tokens on every shape of mesh are those of one device: 1 to 8 ranks of 1 to 4 devices.

A small model with every kind of layer runs in each test run; the default preset, other numerics and engines of all
shapes are slow: `pytest -m slow tests/serving/test_mesh_shapes.py`.
"""

from __future__ import annotations

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
import numpy as np
import pytest
from flax import nnx

from tests.serving import mesh_steps as steps
from tests.serving.mesh_steps import (
    CHUNK,
    SETTINGS,
    Step,
    check_steps,
    prompts,
    reference_draw,
    reference_logits,
    settings,
)  # fmt: skip
from widemesh.model.forward import ForwardModel
from widemesh.model.loading import place_parameters, split_model
from widemesh.model.numerics import NUMERICS
from widemesh.serving import SamplingParams
from widemesh.serving.config import EngineConfig
from widemesh.serving.memory_plan import plan_memory
from widemesh.serving.sampling import SamplingRows
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
slow = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`folder(name)`: a checkpoint of one of the models."""
    return functools.cache(lambda name: models.write_model(tmp_path_factory.mktemp("models") / name, name))


@pytest.fixture(scope="module")
def whole(folder: Callable[[str], Path]) -> Callable[[str, str], ForwardModel]:
    """`whole(name, numerics)`: the model on one device, without a mesh."""
    return functools.cache(lambda name, numerics: ForwardModel.load(folder(name), NUMERICS[numerics]))


def run_on_mesh(folder: Path, numerics: str, ep: int, tp: int, **exchange: Any) -> list[Step]:
    return steps.run_on_mesh(folder, numerics, make_mesh(jax.devices()[: ep * tp], tp), **exchange)


@pytest.mark.parametrize(("ep", "tp"), SHAPES[1:])
def test_logits_and_draws_are_those_of_one_device(folder, whole, ep, tp):
    """Logits to 1e-5 of the largest of a token; draws with settings of each request's own, wherever it lies."""
    check_steps(run_on_mesh(folder("small"), "plain", ep, tp), whole("small", "plain"))


def test_a_ragged_exchange_with_sums_in_order(folder, whole):
    found = run_on_mesh(folder("small"), "plain", 4, 2, exchange="ragged", batch_invariant=True)
    check_steps(found, whole("small", "plain"))


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
    check_steps(run_on_mesh(folder("tiny-mesh"), "plain", ep, tp), whole("tiny-mesh", "plain"))


@slow
@pytest.mark.parametrize("numerics", ["kvq", "w8a8"])
def test_default_preset_with_quantised_values(folder, numerics):
    """Beside the same program on a mesh of one device: the reference adds up in another order, and a sum that differs
    in its last bit may round to another code, of a cached vector or an activation. With these prompts no cut does that.
    """
    one = run_on_mesh(folder("tiny-mesh"), numerics, 1, 1)
    for ep, tp in ((1, 4), (2, 2)):
        for (logits, length, drawn), (wanted, _, own) in zip(
            run_on_mesh(folder("tiny-mesh"), numerics, ep, tp), one, strict=True
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
