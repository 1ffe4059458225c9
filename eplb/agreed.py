"""What a process says of its rebalancing before a step, and what all processes know after it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Self

TRIGGER, PAUSE, RESUME = 1, 2, 3  # commands; of several in one step the largest is obeyed, the others in later ones


def trigger_after(steps: int) -> int:
    """The command to trigger after so many recorded steps; TRIGGER alone: after 32. Raises ValueError below 1."""
    if steps < 1:
        raise ValueError(f"steps={steps} must be at least 1; use 1 or more")
    return RESUME + steps


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """Of one process, for one model. Numbers are int32."""

    planned: bool = False  # this process holds the next placement (planned or imported), `plan_hash` is its hash
    plan_hash: int = 0  # placement_hash of that placement, 0 if none
    staged: bool = False  # every row of the layer in flight is staged here and its checksum is right
    fails: bool = False  # this process wants the migration given up
    command: int = 0  # 0 none, or one of the commands above
    placement: int = 0  # placement_hash of the placement that serves; processes in which it differs cannot go on


@dataclasses.dataclass(frozen=True, kw_only=True)
class Agreed:
    """The reports of all processes for one step, merged. Every process has the same."""

    planned: bool = False  # all of them are
    staged: bool = False  # all of them are
    fails: bool = False  # at least one does
    failing_rank: int = -1  # the first that does, -1: none
    plan_hashes: tuple[int, ...] = (0,)  # by process
    command: int = 0  # the largest

    @classmethod
    def of(cls, reports: Sequence[Report]) -> Self:
        """Merge the reports of processes 0, 1, ... of which there must be at least one."""
        return cls(
            planned=all(one.planned for one in reports),
            staged=all(one.staged for one in reports),
            fails=any(one.fails for one in reports),
            failing_rank=next((rank for rank, one in enumerate(reports) if one.fails), -1),
            plan_hashes=tuple(one.plan_hash for one in reports),
            command=max(one.command for one in reports),
        )
