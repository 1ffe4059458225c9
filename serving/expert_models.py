"""The models of an engine that have experts of their own: the target, and its draft if it speculates."""

from __future__ import annotations

from widemesh.eplb import EplbConfig, ExpertLayout
from widemesh.model.config import ConfigError, ModelConfig

TARGET, DRAFT = 0, 1  # places in tuples with one part for each model
MODEL_NAMES = ("target", "draft")


def expert_layouts(config: ModelConfig, eplb: tuple[EplbConfig, EplbConfig], ranks: int) -> tuple[ExpertLayout, ...]:
    """The expert slots of each model over so many ranks. Raises ConfigError if they do not suit."""
    layouts = [
        eplb[TARGET].layout(num_layers=config.num_hidden_layers, num_experts=config.n_routed_experts, ranks=ranks)
    ]
    if config.num_speculative_tokens:
        try:
            layouts.append(eplb[DRAFT].layout(
                num_layers=len(config.draft_roles), num_experts=config.dspark_n_routed_experts, ranks=ranks
            ))  # fmt: skip
        except ConfigError as err:
            raise ConfigError(f"draft_eplb.{err}") from None
    return tuple(layouts)
