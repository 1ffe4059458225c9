"""From named tensors to the parameter state of a model on a mesh, as f32 values or as the bytes of the release."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import ml_dtypes
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from widemesh.model.checkpoint import tensor_table
from widemesh.model.checkpoint.storage import quantise
from widemesh.model.config import ModelConfig
from widemesh.model.numerics import NUMERICS, Numerics
from widemesh.model.params import BlockScaled, Stored, packed
from widemesh.model.transformer import Transformer
from widemesh.pallas_kernels.grouped_moe import PackedMatrix
from widemesh.sharding import named_sharding, whole_parts

_EXPERT_MATRICES = ("w1", "w3", "w2")
DRAFT_LAYERS = "mtp"  # first part of the path of the draft's parameters

StoredTensor = tuple[np.ndarray, np.ndarray | None]  # weight and scales of the quantised form, of the stored dtypes


def split_model(
    config: ModelConfig, numerics: Numerics = NUMERICS["plain"]
) -> tuple[nnx.GraphDef[Transformer], nnx.State[Any, Any]]:
    """Graph and abstract state of a model: the state is what a step takes as its parameters.

    The graph is the same for all numerics. Under packed weights a quantised parameter is a tree of byte arrays.
    """
    graph, state = nnx.split(Transformer(config))
    if not numerics.packed_weights:
        return graph, state
    return graph, nnx.from_flat_state(
        [(path, p.replace(packed(p.get_value(), p.stored))) for path, p in nnx.to_flat_state(state)]
    )


def load_parameters(
    config: ModelConfig, numerics: Numerics, slot_owner: np.ndarray, read: Callable[[str], np.ndarray],
    stored: Callable[[str], StoredTensor] | None = None, *, draft_owner: np.ndarray | None = None,
) -> nnx.State[Any, Any]:  # fmt: skip
    """Host arrays of every parameter in the form that `numerics` take, in the state's structure.

    `slot_owner` [L, X], or [X] for all layers alike, names the expert that each physical slot holds; slots with owner
    -1 are zero and are never routed to. `draft_owner` is that of the draft's layers; None: slot e holds expert e.
    Packed weights are the bytes that `stored` gives; without it, the values that `read` gives are quantised.
    """
    if not numerics.packed_weights:
        return read_parameters(config, read, slot_owner, draft_owner)
    return read_packed_parameters(config, stored or quantising(config, read), slot_owner, draft_owner)


def read_parameters(
    config: ModelConfig, read: Callable[[str], np.ndarray], slot_owner: np.ndarray,
    draft_owner: np.ndarray | None = None,
) -> nnx.State[Any, Any]:  # fmt: skip
    """Host arrays (f32) of every parameter, in the state's structure.

    `read` gives a tensor by its released name. `slot_owner` and `draft_owner` as in `load_parameters`.
    """
    _, state = split_model(config)
    draft_owner = np.arange(config.dspark_n_routed_experts) if draft_owner is None else draft_owner
    filled = []
    for path, variable in nnx.to_flat_state(state):
        if is_expert(path):
            shape, owner = variable.get_value().shape[1:], _owner(draft_owner if is_draft(path) else slot_owner, path)
            array = np.zeros((len(owner), *shape), np.float32)
            for slot, expert in enumerate(owner):
                if expert >= 0:
                    array[slot] = read(_expert_name(path, expert))
        else:
            array = np.asarray(read(_name(path)), np.float32)
        filled.append((path, variable.replace(array)))
    return nnx.from_flat_state(filled)


def read_packed_parameters(
    config: ModelConfig, stored: Callable[[str], StoredTensor], slot_owner: np.ndarray,
    draft_owner: np.ndarray | None = None,
) -> nnx.State[Any, Any]:  # fmt: skip
    """Host arrays of every parameter under packed weights: the bytes that `stored` gives, as they are.

    `stored` is `Checkpoint.stored`, or `quantising` around values. Otherwise as `read_parameters`.
    """
    _, state = split_model(config, NUMERICS["serving"])
    draft_owner = np.arange(config.dspark_n_routed_experts) if draft_owner is None else draft_owner
    filled = []
    for path, variable in nnx.to_flat_state(state):
        if is_expert(path):
            abstract, owner = variable.get_value(), _owner(draft_owner if is_draft(path) else slot_owner, path)
            codes, scales = (np.zeros((len(owner), *part.shape[1:]), np.uint8) for part in
                             (abstract.codes, abstract.scales))  # fmt: skip
            for slot, expert in enumerate(owner):
                if expert >= 0:
                    codes[slot], scales[slot] = map(_bytes, stored(_expert_name(path, expert)))
            value: Any = PackedMatrix(codes=codes, scales=scales)  # type: ignore[arg-type]
        else:
            value = _packed_value(variable.stored, *stored(_name(path)))
        filled.append((path, variable.replace(value)))
    return nnx.from_flat_state(filled)


def quantising(config: ModelConfig, read: Callable[[str], np.ndarray]) -> Callable[[str], StoredTensor]:
    """`stored` of `read_packed_parameters` from values: each tensor is quantised as a checkpoint would be written.

    Values that came from a quantised checkpoint are the same afterwards.
    """
    table = tensor_table(config)
    return lambda name: quantise(table[name], read(name))


def place_parameters(state: nnx.State[Any, Any], mesh: Mesh) -> nnx.State[Any, Any]:
    """The same state as device arrays on a mesh, each laid out by its logical axes.

    What does not divide into parts for all ranks is filled up with zeros.
    """

    def place(variable: nnx.Variable[Any]) -> Any:
        sharding = named_sharding(mesh, variable.axes)

        def one(host: np.ndarray) -> jax.Array:
            shape = whole_parts(host.shape, variable.axes, mesh.devices.shape[0])
            if shape == host.shape and sharding.is_fully_addressable:
                return jax.device_put(host, sharding)
            # Part by part: only the last one is copied, of a table that may be half of the host's memory.
            return jax.make_array_from_callback(shape, sharding, lambda index: _filled_up(host, index or (), shape))

        return variable.replace(jax.tree.map(one, variable.get_value()))

    return nnx.from_flat_state([(path, place(variable)) for path, variable in nnx.to_flat_state(state)])


def _filled_up(host: np.ndarray, index: tuple[slice, ...], shape: tuple[int, ...]) -> np.ndarray:
    """The part at `index` of `host` filled up with zeros to `shape`."""
    part = host[index]
    wanted = [len(range(*i.indices(size))) for i, size in zip(index, shape, strict=True)]
    if list(part.shape) == wanted:
        return part
    return np.pad(part, [(0, more - had) for more, had in zip(wanted, part.shape, strict=True)])


def _packed_value(form: Stored, weight: np.ndarray, scales: np.ndarray | None) -> Any:
    if form == "fp8":
        return BlockScaled(_bytes(weight), _bytes(scales))  # type: ignore[arg-type]
    if form == "fp8_rows":
        return np.concatenate([_bytes(weight), _bytes(scales)], axis=1)
    return np.asarray(weight, ml_dtypes.bfloat16 if form == "bf16" else np.float32)


def _bytes(array: np.ndarray | None) -> np.ndarray:
    assert array is not None, "quantised tensors have scales"
    return array.view(np.uint8)


def is_expert(path: tuple[Any, ...]) -> bool:
    """Whether the parameter at this path of the state lies in physical expert slots."""
    return path[-2:-1] == ("experts",) and path[-1] in _EXPERT_MATRICES


def is_draft(path: tuple[Any, ...]) -> bool:
    """Whether the parameter at this path of the state belongs to the draft."""
    return bool(path[0] == DRAFT_LAYERS)


def _owner(slot_owner: np.ndarray, path: tuple[Any, ...]) -> np.ndarray:
    """Of the layer (of the backbone or the draft) that the parameter at this path belongs to."""
    return slot_owner if slot_owner.ndim == 1 else slot_owner[path[1]]


def _name(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, path))


def _expert_name(path: tuple[Any, ...], expert: int) -> str:
    return _name(path).replace(".experts.", f".experts.{expert}.") + ".weight"
