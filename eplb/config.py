"""Settings of expert rebalancing. Fields that vLLM's EPLB has carry its names; target and draft have one each."""

from __future__ import annotations

import dataclasses
import math

from widemesh.eplb.layout import ExpertLayout
from widemesh.model.config import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class EplbConfig:
    """When expert load is recorded, when experts move, and how many copies there are. Raises ConfigError."""

    num_redundant_experts: int = 0  # expert slots beyond one per expert; with the experts a multiple of the ranks
    window_size: int = 1000  # recorded steps, the last ones before a trigger, that a plan is made from
    step_interval: int = 3000  # steps from one trigger to the next; the first comes after a quarter of it
    log_balancedness: bool = False  # also log mean / maximum rank load, which is measured in any case
    log_balancedness_interval: int = 100  # steps from one measurement to the next
    max_copies_per_expert: int = 8  # most slots that one expert may take; never more than there are ranks
    min_gain: float = 0.05  # share of the busiest rank's load that a plan, and each layer in it, must save
    max_swaps: int = 64  # of slots per layer, to even out what packing leaves; 0: the published policy alone
    num_expert_groups: int = 1  # groups of experts that are routed to together; 1: none
    num_nodes: int = 1  # machines to spread groups over, if they divide them; 1: all ranks alike
    max_retries: int = 3  # abandoned migrations in a row, each waited for twice as long, before giving up
    # expert rows that a rank sends, and receives, between two steps: 0.3 ms x link bytes per second / bytes of a row
    # keeps a step's delay under 0.3 ms; the least, 1, is what 19 MB rows and links of 60 GB/s need
    slice_rows: int = 1
    layer_deadline_s: float = 5.0  # seconds of stepping for a layer to be copied and checked; then it is given up

    def __post_init__(self) -> None:
        for name, least in (("num_redundant_experts", 0), ("window_size", 1), ("step_interval", 1), ("max_retries", 0),
                            ("max_swaps", 0), ("slice_rows", 1),
                            ("log_balancedness_interval", 1), ("max_copies_per_expert", 1), ("num_expert_groups", 1),
                            ("num_nodes", 1)):  # fmt: skip
            if getattr(self, name) < least:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least {least}; use {least} or more")
        if self.window_size > self.step_interval:
            raise ConfigError(f"window_size={self.window_size} must be at most step_interval={self.step_interval}; use "
                              f"1 to {self.step_interval}")  # fmt: skip
        if not 0 < self.layer_deadline_s < math.inf:
            raise ConfigError(f"layer_deadline_s={self.layer_deadline_s:g} must be above 0 and finite; use 5")
        if not 0 <= self.min_gain < 1:
            raise ConfigError(f"min_gain={self.min_gain:g} must be at least 0 and below 1; use 0.05")

    def layout(self, *, num_layers: int, num_experts: int, ranks: int) -> ExpertLayout:
        """The slots of a model with these experts. Raises ConfigError, with legal numbers, if they do not divide."""
        return ExpertLayout(
            num_layers=num_layers, num_experts=num_experts, ranks=ranks, num_groups=self.num_expert_groups,
            num_redundant_experts=self.num_redundant_experts, max_copies_per_expert=self.max_copies_per_expert,
            num_nodes=self.num_nodes,
        )  # fmt: skip
