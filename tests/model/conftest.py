"""Small random models, without a checkpoint folder."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest

from widemesh.model.engram_hash import EngramHash
from widemesh.model.forward import ForwardModel
from widemesh.model.loading import load_parameters
from widemesh.model.numerics import NUMERICS, Numerics
from widemesh.model.presets import PRESETS
from widemesh.model.random_weights import random_tensors
from widemesh.model.rope import RopeTables
from widemesh.model.step import DictRecorder, Rows, StepContext, StepSettings
from widemesh.model.tiny_tokenizer import tiny_tokenizer
from widemesh.model.token_map import build_token_map


@functools.cache
def load_preset(name: str, numerics: str | Numerics = "plain", num_speculative_tokens: int = 0) -> ForwardModel:
    """A preset with random weights, once per process; it keeps its programs."""
    config = PRESETS[name].with_draft(num_speculative_tokens)
    tensors = dict(random_tensors(config, 0))
    numerics = NUMERICS[numerics] if isinstance(numerics, str) else numerics
    parameters = load_parameters(config, numerics, np.arange(config.n_routed_experts), tensors.__getitem__)
    hash_ = EngramHash.build(config, build_token_map(tiny_tokenizer(config)[0]))
    return ForwardModel(config, parameters, hash_, numerics)


@pytest.fixture(scope="session")
def preset() -> Callable[..., ForwardModel]:
    """`preset(name, numerics="plain", num_speculative_tokens=0)`: a loaded model."""
    return load_preset


@pytest.fixture(scope="session")
def context() -> Callable[..., StepContext]:
    """`context(config, tokens, ...)`: what layers need, for rows of any start and length, with a recorder."""

    def make(config, tokens, *, start=0, length=None, numerics="plain", selection="indices", start_bound=0, max_len=64):
        tokens = np.asarray(tokens, np.int32)
        batch, rows = tokens.shape
        start = np.broadcast_to(np.asarray(start, np.int32), batch)
        length = np.broadcast_to(np.asarray(rows if length is None else length, np.int32), batch)
        columns = len(config.engram_layer_ids), config.num_engram_columns
        engram = np.zeros((batch, rows, *columns), np.int32)
        step_rows = Rows.of(*map(jax.numpy.asarray, (tokens, start, length, engram)))
        settings = StepSettings(numerics=NUMERICS[numerics], selection=selection, start_bound=start_bound)
        rope = jax.tree.map(jax.numpy.asarray, RopeTables.build(config, max_len))
        return StepContext(step_rows, rope, settings, DictRecorder())

    return make


@pytest.fixture(scope="session")
def golden_folder() -> Path:
    """Folder of the golden checkpoints A and B."""
    return Path(__file__).parents[1] / "golden"
