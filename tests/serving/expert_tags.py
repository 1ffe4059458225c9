"""Whether the devices follow a placement: the weights of an expert, as they lie in the checkpoint, are its tag."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx

from widemesh.eplb import ExpertLayout, build_maps
from widemesh.model.checkpoint import Checkpoint
from widemesh.model.loading import DRAFT_LAYERS, load_parameters
from widemesh.model.numerics import NUMERICS
from widemesh.serving.expert_models import DRAFT, MODEL_NAMES, TARGET
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
    """Of a checkpoint, at `plain` numerics: of its target and, if `num_speculative_tokens` is above 0, of its draft."""

    def __init__(self, folder: Path | str, num_speculative_tokens: int = 0):
        checkpoint = Checkpoint.open(folder, num_speculative_tokens)
        every = np.arange(checkpoint.config.n_routed_experts)
        loaded = load_parameters(checkpoint.config, NUMERICS["plain"], every, checkpoint.read)
        models = (TARGET, DRAFT) if num_speculative_tokens else (TARGET,)
        self._tags = [[{name: np.asarray(one.get_value()) for name, one in experts.items()}
                       for experts in experts_of(loaded, model)] for model in models]  # fmt: skip

    def problems(self, state: MeshState) -> list[str]:
        """What on the devices is not as the placements say: rows of every layer, and all maps."""
        assert len(state.experts) == len(self._tags)
        return [problem for model, tags in enumerate(self._tags)
                for problem in self.problems_of(state, model, range(len(tags)))]  # fmt: skip

    def problems_of(self, state: MeshState, model: int, layers: Iterable[int]) -> list[str]:
        """Likewise of one model's maps, and of these of its layers."""
        found, placed = [], state.experts[model]
        for layer in layers:
            owner = placed.slot_owner[layer]
            for name, variable in experts_of(state.parameters, model)[layer].items():
                rows, tags = np.asarray(variable.get_value()), self._tags[model][layer][name]
                wrong = np.flatnonzero(
                    [e >= 0 and row.tobytes() != tags[e].tobytes() for row, e in zip(rows, owner, strict=True)]
                )
                if wrong.size:
                    found.append(f"{MODEL_NAMES[model]}, layer {layer}, {name}: slots {wrong} hold other experts than "
                                 f"{owner[wrong]}")  # fmt: skip
        maps = build_maps(placed.slot_owner, placed.layout.num_experts, placed.layout.max_copies)
        for name in ("expert_slots", "copies"):
            if not np.array_equal(getattr(placed.replicas, name), getattr(maps, name)):
                found.append(f"{MODEL_NAMES[model]}: {name} on the devices is not that of the placement")
        return found


def experts_of(parameters: nnx.State[Any, Any], model: int = TARGET) -> list[Any]:
    """The expert matrices of every layer of a model by name."""
    layers = parameters.raw_mapping[{TARGET: "layers", DRAFT: DRAFT_LAYERS}[model]]
    return [layers[layer]["ffn"]["experts"] for layer in range(len(layers))]
