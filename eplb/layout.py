"""How many expert slots there are and where they lie: the numbers that every placement of a model shares."""

from __future__ import annotations

import dataclasses

from widemesh.model.config import ConfigError

_NAMED = 6  # legal values that a message lists


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertLayout:
    """Experts, slots and ranks of one model (target or draft). Slot s lies on rank s // slots_per_rank.

    Experts and redundant ones together must be a multiple of the ranks: there is a slot for each of them, though a
    placement may leave some empty. Raises ConfigError for numbers that do not fit each other.
    """

    num_layers: int
    num_experts: int
    ranks: int
    num_redundant_experts: int = 0
    max_copies_per_expert: int = 8  # wanted; `max_copies` is what these ranks and slots allow
    num_groups: int = 1  # of experts that a router chooses together
    num_nodes: int = 1  # that groups are spread over, if they divide them; ranks of a node follow each other

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_experts", "ranks", "max_copies_per_expert", "num_groups", "num_nodes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1; use 1 or more")
        for name, divided in (("num_groups", "num_experts"), ("num_nodes", "ranks")):
            if getattr(self, divided) % getattr(self, name):
                legal = [n for n in range(1, getattr(self, divided) + 1) if getattr(self, divided) % n == 0]
                raise ConfigError(f"{name}={getattr(self, name)} must divide {divided}={getattr(self, divided)}; use "
                                  f"one of {_listed(legal)}")  # fmt: skip
        legal = self.legal_redundant_experts()
        if self.num_redundant_experts not in legal:
            remedy = _listed(legal) if legal else f"{_listed(nearest_divisors(self.num_experts, self.ranks))} ranks"
            raise ConfigError(
                f"num_redundant_experts={self.num_redundant_experts} does not suit num_experts={self.num_experts} on "
                f"{self.ranks} {'rank' if self.ranks == 1 else 'ranks'} with at most {self._most_copies} "
                f"{'copy' if self._most_copies == 1 else 'copies'} of each; use {remedy}"
            )

    def legal_redundant_experts(self) -> list[int]:
        """Every number of redundant experts that these experts, ranks and copies allow, in rising order."""
        most = self.num_experts * (self._most_copies - 1)
        return list(range(-self.num_experts % self.ranks, most + 1, self.ranks))

    @property
    def _most_copies(self) -> int:
        """Copies of an expert that can lie on ranks of their own."""
        return min(self.max_copies_per_expert, self.ranks_per_node if self.is_hierarchical else self.ranks)

    @property
    def max_copies(self) -> int:
        """C: the most slots of one expert, and the width of the table that lists them."""
        return min(self.num_redundant_experts + 1, self._most_copies)

    @property
    def is_hierarchical(self) -> bool:
        """Whether each group of experts stays on one node."""
        return self.num_nodes > 1 and self.num_groups % self.num_nodes == 0

    @property
    def slots_per_rank(self) -> int:
        return self.num_slots // self.ranks

    @property
    def num_slots(self) -> int:
        """X: physical slots of a layer on all ranks."""
        return self.num_experts + self.num_redundant_experts

    @property
    def ranks_per_node(self) -> int:
        return self.ranks // self.num_nodes


def nearest_divisors(number: int, wanted: int) -> list[int]:
    """The divisors of a number next to the wanted one, below and above; one of them if that is all there is."""
    divisors = [n for n in range(1, number + 1) if number % n == 0]
    return [*[n for n in divisors if n < wanted][-1:], *[n for n in divisors if n > wanted][:1]]


def _listed(legal: list[int]) -> str:
    if len(legal) <= _NAMED:
        return " or ".join(", ".join(map(str, legal)).rsplit(", ", 1))
    return f"{', '.join(map(str, legal[: _NAMED - 1]))}, ... or {legal[-1]}"
