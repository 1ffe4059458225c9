"""Abstract arguments: those of the programs that an engine dispatches, and of the released model."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

from widemesh.model.checkpoint import Checkpoint
from widemesh.model.engram_device_hash import EngramDeviceHash
from widemesh.model.forward import load_engram_hash
from widemesh.model.loading import split_model
from widemesh.model.numerics import NUMERICS, numerics_named
from widemesh.model.presets import FLASH, PRESETS
from widemesh.serving.abstract import AbstractArguments
from widemesh.serving.config import EngineConfig
from widemesh.serving.mesh_state import MeshState
from widemesh.serving.programs import Programs
from widemesh.sharding import make_mesh


def programs_of(config, max_len, numerics="serving", ranks=8):
    graph, _ = split_model(config)
    return Programs(config=config, numerics=NUMERICS[numerics], graph=graph, mesh=make_mesh(jax.devices()[:ranks]),
                    max_len=max_len, kernels="reference")  # fmt: skip


def described(tree):
    return jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), tree)


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_arguments_are_those_of_the_engine(checkpoint, platform, monkeypatch):
    """Parameters, state, tables and hash of a real mesh have the shapes, dtypes and shardings that are described."""
    opened = Checkpoint.open(checkpoint)
    # What a GPU would be given, on a CPU.
    monkeypatch.setattr("widemesh.serving.mesh_state.numerics_named", lambda name, _: numerics_named(name, platform))
    config = EngineConfig(numerics="serving", max_model_len=96, page_size=4)
    mesh = make_mesh(jax.devices()[:2])
    state = MeshState(opened, config, mesh, slots=3, pages=10)
    abstract = AbstractArguments(programs=state.programs, slots=3, pages=10, page_size=4)
    parameters, cache, *_, hash_, rope, replicas, _ = abstract.decode()
    assert described(parameters) == described(state.parameters)
    assert described(cache) == described(state.cache)
    assert described(rope) == described(state.rope)
    assert described(replicas) == described((state.target.replicas,))
    own_hash = jax.device_put(EngramDeviceHash.build(load_engram_hash(opened.config, checkpoint)), state.replicated)
    assert described(hash_) == described(own_hash)
    leaves = jax.tree.leaves(parameters)
    assert state.programs.numerics == NUMERICS["kvq" if platform == "cpu" else "serving"]
    assert any(x.dtype == np.uint8 for x in leaves) == (platform == "gpu")


def test_packed_programs_trace_for_a_small_model():
    """Encode, tail behind it, the whole prefill, and decode of two steps."""
    programs = programs_of(PRESETS["tiny-structure"], 64, ranks=2)
    abstract = AbstractArguments(programs=programs, slots=2, pages=20, page_size=4)
    boundary, _ = programs.encode(8).eval_shape(*abstract.prefill(8))
    assert boundary.streams.shape == (4, 8, 2, 64) and boundary.streams.dtype == jax.numpy.bfloat16
    lengths, cache = programs.tail(8).eval_shape(*abstract.tail(8))
    assert lengths.shape == (4,)
    assert jax.tree.map(lambda x: x.shape, cache) == jax.tree.map(lambda x: x.shape, abstract.cache())
    *_, sampled = programs.decode(2).eval_shape(*abstract.decode(2))
    assert sampled.packed.shape[0] == 4


def test_decode_step_of_the_released_model_traces():
    """40 layers, 8 ranks, 64 slots each: results have the shapes of what was donated."""
    programs = programs_of(FLASH, 1024)
    arguments = AbstractArguments(programs=programs, slots=64, pages=100, page_size=64).decode()
    *donated, sampled = programs.decode(1).eval_shape(*arguments)
    shapes = functools.partial(jax.tree.map, lambda x: (x.shape, x.dtype))
    assert shapes(tuple(donated)) == shapes(arguments[1:5])
    assert sampled.packed.shape == (512, 4)
