"""Loads that `widemesh bench eplb` plans with: how often rows take each expert, and what a placement makes of that."""

from __future__ import annotations

import dataclasses
from typing import Literal

import numpy as np
from jaxtyping import Float64, Int64

from widemesh.eplb import ExpertLayout, balancedness, build_maps, rank_loads


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimulatedModel:
    """A model whose rows are all taken by experts, without the model."""

    name: str
    num_experts: int
    experts_per_token: int
    tokens: int  # of each request in a step


@dataclasses.dataclass(frozen=True)
class Skew:
    """How unequal experts are. Zipf: the n-th takes n^-size; log-normal: e to a normal draw times `size`."""

    kind: Literal["Zipf", "log-normal"]
    size: float

    def __str__(self) -> str:
        return f"{self.kind} {self.size:g}"

    def probabilities(self, model: SimulatedModel, layers: int,
                      rng: np.random.Generator) -> Float64[np.ndarray, "L E"]:  # fmt: skip
        """Probability that a row takes each expert; the hot ones are at other places in each layer.

        They add up to the experts per token, but for what is cut off an expert that would be taken more than always.
        """
        if self.kind == "Zipf":
            falling = np.tile(np.arange(1.0, model.num_experts + 1) ** -self.size, (layers, 1))
            weight = rng.permuted(falling, axis=1)
        else:
            weight = np.exp(rng.normal(0, self.size, (layers, model.num_experts)))
        return np.minimum(model.experts_per_token * weight / weight.sum(1, keepdims=True), 1)


def uniform(model: SimulatedModel, layers: int) -> Float64[np.ndarray, "L E"]:
    """Every expert is taken equally often."""
    return np.full((layers, model.num_experts), model.experts_per_token / model.num_experts)


def draw_window(chance: Float64[np.ndarray, "L E"], rows: int, steps: int,
                rng: np.random.Generator) -> Int64[np.ndarray, "L E"]:  # fmt: skip
    """Load per expert over `steps` steps of `rows` rows. Each row takes an expert once or not, on its own."""
    return rng.binomial(rows * steps, chance)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Measured:
    """What fresh steps showed."""

    balancedness: float
    rank_share: Float64[np.ndarray, "L R"]  # load of each rank over the layer's mean, all steps together


def measure(slot_owner: np.ndarray, chance: Float64[np.ndarray, "L E"], layout: ExpertLayout, rows: int, steps: int,
            rng: np.random.Generator) -> Measured:  # fmt: skip
    """Draw steps afresh. Each row goes to one of its expert's copies, all being equally likely: what the hash does."""
    copies = build_maps(slot_owner, layout.num_experts, layout.max_copies).copies
    owner = np.maximum(slot_owner, 0)
    taken = np.take_along_axis(chance / copies, owner, 1) * (slot_owner >= 0)
    load = rng.binomial(rows, taken, (steps, *slot_owner.shape))
    total = rank_loads(load.sum(0), layout.ranks)
    return Measured(balancedness=balancedness(load, layout.ranks), rank_share=total / total.mean(1, keepdims=True))

