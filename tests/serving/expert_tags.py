"""Whether the devices follow a placement: the weights of an expert, as they lie in the checkpoint, are its tag."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx

from widemesh.eplb import ExpertLayout, build_maps
from widemesh.model.checkpoint import Checkpoint
from widemesh.model.loading import load_parameters
from widemesh.model.numerics import NUMERICS
from widemesh.serving.mesh_state import MeshState


def any_placement(layout: ExpertLayout, current: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Some layers are others than in `current`; every expert has a slot, other slots a copy or nothing."""
    owner = current.copy()
    for layer in rng.choice(layout.num_layers, rng.integers(1, layout.num_layers + 1), replace=False):
        slots = np.full(layout.num_slots, -1, np.int32)
        order = rng.permutation(layout.num_slots)
        slots[order[: layout.num_experts]] = np.arange(layout.num_experts)
        for slot in order[layout.num_experts :]:
            expert = rng.integers(layout.num_experts)
            if rng.random() < 0.9 and (slots == expert).sum() < layout.max_copies:  # a rank may have it twice
                slots[slot] = expert
        owner[layer] = slots
    return owner


class Tags:
    """Of a checkpoint, at `plain` numerics."""

    def __init__(self, folder: Path | str):
        checkpoint = Checkpoint.open(folder)
        self.num_layers = checkpoint.config.num_hidden_layers
        every = np.arange(checkpoint.config.n_routed_experts)
        loaded = load_parameters(checkpoint.config, NUMERICS["plain"], every, checkpoint.read)
        self._tags = [{name: np.asarray(one.get_value()) for name, one in experts.items()}
                      for experts in experts_of(loaded)]  # fmt: skip

    def problems(self, state: MeshState, layers: Iterable[int] | None = None) -> list[str]:
        """What on the devices is not as `slot_owner` says: rows of these layers (None: of all), and all maps."""
        found = []
        for layer in range(self.num_layers) if layers is None else layers:
            owner = state.slot_owner[layer]
            for name, variable in experts_of(state.parameters)[layer].items():
                rows, tags = np.asarray(variable.get_value()), self._tags[layer][name]
                wrong = np.flatnonzero(
                    [e >= 0 and row.tobytes() != tags[e].tobytes() for row, e in zip(rows, owner, strict=True)]
                )
                if wrong.size:
                    found.append(f"layer {layer}, {name}: slots {wrong} hold other experts than {owner[wrong]}")
        maps = build_maps(state.slot_owner, state.layout.num_experts, state.layout.max_copies)
        for name in ("expert_slots", "copies"):
            if not np.array_equal(getattr(state.replicas, name), getattr(maps, name)):
                found.append(f"{name} on the devices is not that of the placement")
        return found


def experts_of(parameters: nnx.State[Any, Any]) -> list[Any]:
    """The expert matrices of every layer by name."""
    layers = parameters.raw_mapping["layers"]
    return [layers[layer]["ffn"]["experts"] for layer in range(len(layers))]
