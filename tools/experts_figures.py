"""What `widemesh experts show` says, as numbers: of each layer, of all together, and as one JSON object."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from jaxtyping import Float, Num

from widemesh.eplb import balancedness, fold_slots, hash_text, rank_loads
from widemesh.eplb.balance import count_copies
from widemesh.serving.expert_control import ExpertStatus


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerFigures:
    """One layer. Where no load is known, balancedness is 0 and there is no hottest rank or expert."""

    layer: int
    balancedness: float  # mean rank load / maximum rank load
    hottest_rank: int | None
    hottest_rank_share: float  # its load / mean rank load
    hottest_expert: int | None
    hottest_expert_share: float  # of the layer's load
    hottest_expert_copies: int
    empty_slots: int


def layer_figures(status: ExpertStatus) -> list[LayerFigures]:
    """Every layer's, in order."""
    layout, owner = status.layout, status.slot_owner
    ranks = rank_loads(status.load, layout.ranks)
    experts = fold_slots(status.load, owner, layout.num_experts)
    copies = count_copies(owner, layout.num_experts)
    found = []
    for layer in range(layout.num_layers):
        rank, expert, total = int(ranks[layer].argmax()), int(experts[layer].argmax()), int(ranks[layer].sum())
        found.append(LayerFigures(
            layer=layer, balancedness=balancedness(status.load[layer : layer + 1], layout.ranks),
            hottest_rank=rank if total else None,
            hottest_rank_share=float(ranks[layer, rank] * layout.ranks / total) if total else 0.0,
            hottest_expert=expert if total else None,
            hottest_expert_share=float(experts[layer, expert] / total) if total else 0.0,
            hottest_expert_copies=int(copies[layer, expert]) if total else 0,
            empty_slots=int((owner[layer] < 0).sum()),
        ))  # fmt: skip
    return found


def rank_shares(load: Num[np.ndarray, "L X"], ranks: int) -> Float[np.ndarray, "L R"]:
    """Load of each rank / mean rank load of its layer; 0 where a layer has none."""
    by_rank = rank_loads(load, ranks).astype(float)
    mean = by_rank.mean(1, keepdims=True)
    return np.divide(by_rank, mean, out=np.zeros_like(by_rank), where=mean > 0)


def as_json(address: str, status: ExpertStatus) -> dict[str, Any]:
    """Everything but the placement itself, which `widemesh experts export` writes."""
    layout = status.layout
    sizes = ("num_layers", "num_experts", "ranks", "num_redundant_experts", "num_slots", "max_copies")
    plain = ("phase", "layers_done", "layers_total", "is_paused", "is_disabled", "steps_to_trigger",
             "balancedness", "feasible", "load_steps", "last_failure", "moved_bytes", "moved_rows",
             "least_rows")  # fmt: skip
    return {
        "address": address, "model": status.model, **{name: getattr(layout, name) for name in sizes},
        "placement_hash": hash_text(status.placement_hash),
        "imported_hash": hash_text(status.imported_hash) if status.imported_hash else "",
        **{name: getattr(status, name) for name in plain}, "rebalances": dict(status.rebalances),
        "layers": [dataclasses.asdict(one) for one in layer_figures(status)],
        "rank_load": rank_loads(status.load, layout.ranks).tolist(),
    }  # fmt: skip
