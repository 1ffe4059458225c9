"""How close a model came to choosing otherwise: the margins of its experts, index entries and greedy tokens.

The same rows in a step of another shape are summed in another order, which moves values by about 1e-6. Where two
candidates of a choice are nearer than that, either choice is right and what follows may differ. `closest_choice`
finds such a place, so that a comparison of tokens can tell it from a wrong token: over the choices of one list of 25
tokens in a tiny model, a margin below 1e-5 is there by chance in about one list of a hundred.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from widemesh.model.forward import ForwardModel
from widemesh.model.step import StepSettings


@dataclasses.dataclass(frozen=True)
class Choice:
    """One choice of a forward run, and the distance between the last candidate taken and the first left."""

    name: str
    row: int
    margin: float


def closest_choice(model: ForwardModel, token_ids: np.ndarray) -> Choice:
    """The choice with the least margin in a full forward over `token_ids`, the token after the last one included."""
    settings = StepSettings(numerics=model.numerics, selection="mask", start_bound=0)
    values = model.intermediates(np.asarray(token_ids, np.int32)[None], settings)
    return min(_choices(model, values), key=lambda choice: choice.margin)


def _choices(model: ForwardModel, values: dict[str, np.ndarray]) -> list[Choice]:
    logits = np.sort(values["logits"][0, -1])
    found = [Choice("greedy token", len(values["logits"][0]) - 1, float(logits[-1] - logits[-2]))]
    for name, value in values.items():
        layer = name.removesuffix(name.split(".", 2)[-1])
        if name.endswith("ffn.router_logits"):
            bias = np.asarray(_parameter(model.parameters, f"{layer}ffn.gate.bias"))
            scores = np.sqrt(np.logaddexp(value, 0)) + bias
            taken = np.zeros(scores.shape, bool)
            np.put_along_axis(taken, values[f"{layer}ffn.topk_ids"], True, axis=-1)
            found += _margins(name, scores, taken)
        elif name.endswith("attn.indexer_scores"):
            mask = values[f"{layer}attn.topk_mask"][0]
            found += _margins(name, np.where(_candidates(values, layer), value[0], -np.inf), mask)
    return found


def _candidates(values: dict[str, np.ndarray], layer: str) -> np.ndarray | bool:
    """Entries that a layer may take: of the candidate blocks, from the layer after their source on."""
    for name, value in values.items():
        if name.endswith("attn.candidates") and int(name.split(".")[1]) < int(layer.split(".")[1]):
            return value[0]
    return True


def _margins(name: str, scores: np.ndarray, taken: np.ndarray) -> list[Choice]:
    last = np.min(np.where(taken, scores, np.inf), axis=-1)
    first = np.max(np.where(taken, -np.inf, scores), axis=-1)
    is_choice = np.isfinite(last) & np.isfinite(first) & ~((last == 0) & (first == 0))  # zeros: every head below 0
    return [Choice(name, int(row), float(last[row] - first[row])) for row in np.flatnonzero(is_choice)]


def _parameter(parameters: Any, path: str) -> Any:
    for part in path.split("."):
        parameters = parameters[int(part) if part.isdigit() else part]
    return parameters[...]
