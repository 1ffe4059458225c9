"""From named tensors to the parameter state of a model on a mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from widemesh.model.config import ModelConfig
from widemesh.model.transformer import Transformer
from widemesh.sharding import named_sharding

_EXPERT_MATRICES = ("w1", "w3", "w2")


def split_model(config: ModelConfig) -> tuple[nnx.GraphDef[Transformer], nnx.State[Any, Any]]:
    """Graph and abstract state of a model: the state is what a step takes as its parameters."""
    graph, state = nnx.split(Transformer(config))
    return graph, state


def read_parameters(
    config: ModelConfig, read: Callable[[str], np.ndarray], slot_owner: np.ndarray
) -> nnx.State[Any, Any]:
    """Host arrays (f32) of every parameter, in the state's structure.

    `read` gives a tensor by its released name. `slot_owner` [X] names the expert that each physical slot holds; slots
    with owner -1 are zero and are never routed to.
    """
    _, state = split_model(config)
    filled = []
    for path, variable in nnx.to_flat_state(state):
        name = ".".join(str(part) for part in path)
        if path[-2:-1] == ("experts",) and path[-1] in _EXPERT_MATRICES:
            shape = variable.get_value().shape[1:]
            array = np.zeros((len(slot_owner), *shape), np.float32)
            for slot, expert in enumerate(slot_owner):
                if expert >= 0:
                    array[slot] = read(name.replace(".experts.", f".experts.{expert}.") + ".weight")
        else:
            array = np.asarray(read(name), np.float32)
        filled.append((path, variable.replace(array)))
    return nnx.from_flat_state(filled)


def place_parameters(state: nnx.State[Any, Any], mesh: Mesh) -> nnx.State[Any, Any]:
    """The same state as device arrays on a mesh, each laid out by its logical axes."""
    placed = [
        (path, variable.replace(jax.device_put(variable.get_value(), named_sharding(mesh, variable.axes))))
        for path, variable in nnx.to_flat_state(state)
    ]
    return nnx.from_flat_state(placed)
