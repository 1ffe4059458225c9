"""Every form of the exchange equals one rank that holds every expert, however rows and experts fall on ranks."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from widemesh.sharding import make_mesh
from widemesh.sharding.exchange import LocalExchange, RaggedExchange, make_exchange

T, K, E, D, F = 3, 3, 16, 10, 6  # rows of each rank, of an odd number of words
FORMS = ("all_gather", "ragged")


def routing(pattern: str, ranks: int, rng: np.random.Generator) -> np.ndarray:
    """Experts of all ranks' rows; -1 for rows that are none."""
    experts = np.argsort(rng.uniform(size=(ranks * T, E)), axis=1)[:, :K].astype(np.int32)
    held = E // ranks
    if pattern == "one set of experts":
        experts[:] = [E - 1, 0, E // 2]
    elif pattern == "all on the last rank":
        experts[:] = [E - 1, E - 2, E - 3] if held >= 3 else [E - 1, E - 2, E - 1 - held]
    elif pattern == "several on one rank":
        experts[:, 0] = experts[:, 1] // held * held + (experts[:, 1] + 1) % held
    elif pattern == "an idle rank":
        experts[T : 2 * T] = -1
    elif pattern == "one row":
        experts[1:] = -1
    elif pattern == "uneven ranks":
        experts[[row for row in range(ranks * T) if row % T > row // T]] = -1
    elif pattern == "none":
        experts[:] = -1
    return experts


PATTERNS = ("spread", "one set of experts", "all on the last rank", "several on one rank", "an idle rank", "one row",
            "uneven ranks", "none")  # fmt: skip


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("form", FORMS)
def test_equals_one_rank(moe, form: str, ranks: int) -> None:
    rng = np.random.default_rng(ranks)
    w1, w3 = (rng.normal(size=(E, F, D)).astype(np.float32) for _ in range(2))
    matrices = (w1, w3, rng.normal(size=(E, D, F)).astype(np.float32))
    weights = rng.uniform(size=(ranks * T, K)).astype(np.float32)
    for pattern in PATTERNS:
        x, slots = rng.normal(size=(ranks * T, D)).astype(np.float32), routing(pattern, ranks, rng)
        x[slots[:, 0] < 0] = np.nan  # padding holds anything, and reaches nobody
        wanted = moe("local", 1, x, slots, weights, slots, matrices)
        found = moe(form, ranks, x, slots, weights, slots, matrices)
        valid = slots[:, 0] >= 0
        np.testing.assert_allclose(found[valid], wanted[valid], rtol=1e-5, atol=1e-5, err_msg=pattern)
        if form == "ragged":
            assert not found[~valid].any(), pattern


@pytest.mark.parametrize("form", FORMS)
def test_other_rows_change_no_bit_of_a_row(moe, form: str) -> None:
    ranks, rng = 4, np.random.default_rng(5)
    matrices = [rng.normal(size=(E, D, D)).astype(np.float32)] * 3
    x, weights = rng.normal(size=(ranks * T, D)).astype(np.float32), rng.uniform(size=(ranks * T, K)).astype(np.float32)
    slots = routing("spread", ranks, rng)
    first = moe(form, ranks, x, slots, weights, slots, matrices, run=moe.term_by_term)
    for pattern in ("one row", "one set of experts", "all on the last rank"):
        mates, others = routing(pattern, ranks, rng), rng.normal(size=x.shape).astype(np.float32)
        mates[0], others[0] = slots[0], x[0]
        again = moe(form, ranks, others, mates, weights, mates, matrices, run=moe.term_by_term)
        np.testing.assert_array_equal(again[0], first[0], err_msg=pattern)


def test_a_row_goes_once_to_each_rank_of_its_experts() -> None:
    ranks, rng = 4, np.random.default_rng(6)
    held = E // ranks
    exchange = RaggedExchange(is_native=False)
    spec = PartitionSpec("ep")

    def dispatch(x, slots, weights):
        sent = exchange.dispatch(x, slots, weights, held, slots)
        return sent.x, sent.slots, sent.weights

    run = jax.jit(
        jax.shard_map(dispatch, mesh=make_mesh(jax.devices()[:ranks]), in_specs=spec, out_specs=spec, check_vma=False)
    )
    x, weights = rng.normal(size=(ranks * T, D)).astype(jnp.bfloat16), rng.uniform(size=(ranks * T, K))
    for pattern in PATTERNS:
        slots = routing(pattern, ranks, rng)
        found_x, found_slots, found_weights = (
            np.asarray(part).reshape(ranks, ranks * T, -1) for part in run(x, slots, weights.astype(np.float32))
        )
        for rank in range(ranks):
            (rows,) = np.nonzero(((slots >= 0) & (slots // held == rank)).any(axis=1))
            n = len(rows)
            np.testing.assert_array_equal(found_x[rank, :n], x[rows], err_msg=pattern)
            np.testing.assert_array_equal(found_slots[rank, :n], slots[rows] - rank * held)
            np.testing.assert_array_equal(found_weights[rank, :n], weights[rows].astype(np.float32))
            assert (found_slots[rank, n:] == -1).all() and not found_x[rank, n:].any()


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_rows_of_a_table_in_parts_are_those_of_the_whole(form: str, batch_invariant: bool) -> None:
    ranks, rng = 4, np.random.default_rng(1)
    table = rng.normal(size=(3 * ranks, 5)).astype(np.float32)
    ids = rng.integers(0, len(table), (2 * ranks, 7)).astype(np.int32)
    ids[0] = len(table) - 1  # many of one rank
    exchange = make_exchange(form, axis="ep", platform="cpu", batch_invariant=batch_invariant)
    spec = PartitionSpec("ep")
    spread = jax.shard_map(
        lambda part, ids: exchange.look_up(ids, part.shape[0], lambda place: part[place]),
        mesh=make_mesh(jax.devices()[:ranks]), in_specs=(spec, spec), out_specs=spec, check_vma=False,
    )  # fmt: skip
    np.testing.assert_array_equal(jax.jit(spread)(table, ids), table[ids])
    np.testing.assert_array_equal(LocalExchange().look_up(ids, len(table), lambda place: table[place]), table[ids])
