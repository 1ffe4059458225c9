"""The initial placement of experts."""

from __future__ import annotations

import pytest

from widemesh.eplb import initial_slot_owner


@pytest.mark.parametrize(("experts", "ranks", "owner"), [
    (4, 2, [0, 1, 2, 3]),
    (9, 4, [0, 1, 2, 3, 4, 5, 6, 7, 8, -1, -1, -1]),
    (3, 1, [0, 1, 2]),
])  # fmt: skip
def test_every_expert_once_and_ranks_equal(experts: int, ranks: int, owner: list[int]) -> None:
    assert initial_slot_owner(experts, ranks).tolist() == owner
