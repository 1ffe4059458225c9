"""Sums in order of the logical expert: the same bits for every number of ranks, placement and choice of copies."""

from __future__ import annotations

import numpy as np
import pytest

ROWS, K, E, X, D = 16, 4, 12, 16, 8  # of all ranks together; four experts have a second slot


def placements(rng: np.random.Generator) -> list[np.ndarray]:
    """Which expert each slot holds: in order, in any order, and with both copies of an expert on one rank of two."""
    plain = np.concatenate([np.arange(E), np.arange(X - E)])
    side_by_side = np.sort(plain)
    return [plain, rng.permutation(plain), side_by_side]


def choose_copies(experts: np.ndarray, owner: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A slot of each row's experts, any of those that hold it."""
    slots = np.full(experts.shape, -1, np.int32)
    for place, expert in np.ndenumerate(experts):
        if expert >= 0:
            slots[place] = rng.choice(np.flatnonzero(owner == expert))
    return slots


@pytest.mark.parametrize("run", ["term_by_term", "grouped"])
def test_same_bits_for_all_ranks_and_placements(moe, run: str) -> None:
    rng = np.random.default_rng(7)
    run = getattr(moe, run)
    x, weights = rng.normal(size=(ROWS, D)).astype(np.float32), rng.uniform(size=(ROWS, K)).astype(np.float32)
    matrices = [rng.normal(size=(E, D, D)).astype(np.float32) for _ in range(3)]
    experts = np.argsort(rng.uniform(size=(ROWS, E)), axis=1)[:, :K].astype(np.int32)
    experts[3] = experts[8:10] = -1  # padding; on 8 ranks one has nothing else
    owners = placements(rng)

    def result(form: str, ranks: int, owner: np.ndarray, batch_invariant: bool = True) -> np.ndarray:
        slots = choose_copies(experts, owner, rng)
        placed = [w[owner] for w in matrices]
        return moe(form, ranks, x, slots, weights, experts, placed, batch_invariant=batch_invariant, run=run)

    wanted = result("local", 1, owners[0])
    is_whole = run is moe.term_by_term
    for ranks in (2, 4, 8) if is_whole else (4,):
        for form in ("all_gather", "ragged") if is_whole else ("ragged",):
            for number, owner in enumerate(owners):
                found = result(form, ranks, owner)
                np.testing.assert_array_equal(found, wanted, err_msg=f"{form}, ranks={ranks}, placement {number}")
    if not is_whole:
        return
    in_rank_order = result("all_gather", 4, owners[1], batch_invariant=False)
    np.testing.assert_allclose(in_rank_order, wanted, rtol=1e-5, atol=1e-5)
    assert (in_rank_order != wanted).any()  # so the setting does something
    np.testing.assert_allclose(wanted, _sum_in_order(x, experts, weights, matrices[0]), rtol=1e-5, atol=1e-6)


def _sum_in_order(x: np.ndarray, experts: np.ndarray, weights: np.ndarray, matrices: np.ndarray) -> np.ndarray:
    total = np.zeros_like(x)
    for row, of_row in enumerate(experts):
        for k in np.argsort(of_row):
            if of_row[k] >= 0:
                total[row] += weights[row, k] * (matrices[of_row[k]] @ x[row])
    return total
