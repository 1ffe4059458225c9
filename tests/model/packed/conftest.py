"""Small models under packed numerics, run by the reference ops on a CPU, and the f32 models of the same weights."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from widemesh.model.checkpoint import tensor_table
from widemesh.model.checkpoint.storage import decode
from widemesh.model.config import ModelConfig
from widemesh.model.engram_hash import EngramHash
from widemesh.model.forward import ForwardModel
from widemesh.model.loading import load_parameters, quantising
from widemesh.model.numerics import NUMERICS, Numerics
from widemesh.model.presets import PRESETS
from widemesh.model.random_weights import random_tensors
from widemesh.model.tiny_tokenizer import tiny_tokenizer
from widemesh.model.token_map import build_token_map

# Without FP8 activations bfloat16 is all that separates a packed model from `kvq`; with them, a value that falls to
# the other side of an E4M3 boundary moves by 6%.
UNQUANTISED = dataclasses.replace(NUMERICS["serving"], act_quant=False)


@dataclasses.dataclass(frozen=True)
class Weights:
    """Random weights of a preset, rounded once to the released formats: as bytes and as values."""

    name: str
    num_speculative_tokens: int = 0

    @functools.cached_property
    def config(self) -> ModelConfig:
        """The preset, with its draft if asked for."""
        return PRESETS[self.name].with_draft(self.num_speculative_tokens)

    @functools.cached_property
    def stored(self) -> Callable[[str], tuple[np.ndarray, np.ndarray | None]]:
        """Weight and scales by released name."""
        tensors = dict(random_tensors(self.config, 0))
        return functools.cache(quantising(self.config, tensors.__getitem__))

    def read(self, name: str) -> np.ndarray:
        """The values of these bytes."""
        return decode(tensor_table(self.config)[name].kind, *self.stored(name))

    @functools.cache  # noqa: B019 - one object per preset and process
    def parameters(self, numerics: Numerics) -> nnx.State[Any, Any]:
        """On the device, in the form of the numerics."""
        config = self.config
        owner = np.arange(config.n_routed_experts)
        state: nnx.State[Any, Any] = jax.tree.map(
            jnp.asarray, load_parameters(config, numerics, owner, self.read, self.stored)
        )
        return state

    @functools.cached_property
    def hash(self) -> EngramHash:
        """Of the preset's own tokenizer."""
        config = self.config
        return EngramHash.build(config, build_token_map(tiny_tokenizer(config)[0]))

    @functools.cache  # noqa: B019
    def model(self, numerics: Numerics) -> ForwardModel:
        """A model that keeps its programs."""
        return ForwardModel(self.config, self.parameters(numerics), self.hash, numerics, page_size=4)


@functools.cache
def weights_of(name: str, num_speculative_tokens: int = 0) -> Weights:
    """Once per process."""
    return Weights(name, num_speculative_tokens)


@pytest.fixture(scope="session")
def weights() -> Callable[..., Weights]:
    """`weights(preset, num_speculative_tokens=0)`."""
    return weights_of


@pytest.fixture(scope="session")
def unquantised() -> Numerics:
    """`serving` without FP8 activations."""
    return UNQUANTISED
