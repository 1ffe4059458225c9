"""The exchange: all-gather and reduce-scatter equal one rank that holds every expert."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from widemesh.pallas_kernels.grouped_moe import ExpertMath, grouped_moe
from widemesh.sharding import AllGatherExchange, LocalExchange, make_mesh

MATH = ExpertMath(limit=2.0)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("pattern", ["spread", "one expert", "idle rank"])
def test_all_gather_equals_local(ranks: int, pattern: str) -> None:
    rng = np.random.default_rng(0)
    t, k, experts, d, f = 3 * ranks, 2, 8, 16, 12
    x, weights = rng.normal(size=(t, d)).astype(np.float32), rng.uniform(size=(t, k)).astype(np.float32)
    slots = np.argsort(rng.uniform(size=(t, experts)), axis=1)[:, :k].astype(np.int32)
    if pattern == "one expert":
        slots[:] = [experts - 1, 0]
    elif pattern == "idle rank":
        slots[:3] = -1
    w1, w3 = (rng.normal(size=(experts, f, d)).astype(np.float32) for _ in range(2))
    w2 = rng.normal(size=(experts, d, f)).astype(np.float32)

    def moe(exchange, x, slots, weights, w1, w3, w2):
        sent, local, sent_weights = exchange.dispatch(x, slots, weights, w1.shape[0])
        return exchange.combine(grouped_moe(sent, local, sent_weights, w1, w3, w2, MATH))

    wanted = moe(LocalExchange(), x, slots, weights, w1, w3, w2)
    spec = PartitionSpec("ep")
    spread = jax.shard_map(
        lambda *a: moe(AllGatherExchange(), *a), mesh=make_mesh(jax.devices()[:ranks]), in_specs=(spec,) * 6,
        out_specs=spec, check_vma=False,
    )  # fmt: skip
    np.testing.assert_allclose(jax.jit(spread)(x, slots, weights, w1, w3, w2), wanted, rtol=1e-5, atol=1e-5)
    assert pattern != "idle rank" or not np.asarray(wanted)[:3].any()


@pytest.mark.parametrize("ranks", [2, 4])
def test_rows_of_a_table_in_parts_are_those_of_the_whole(ranks: int) -> None:
    rng = np.random.default_rng(1)
    table = rng.normal(size=(3 * ranks, 5)).astype(np.float32)
    ids = rng.integers(0, len(table), (2 * ranks, 7)).astype(np.int32)
    ids[0] = len(table) - 1  # many of one rank
    spec = PartitionSpec("ep")
    spread = jax.shard_map(
        lambda part, ids: AllGatherExchange().look_up(ids, part.shape[0], lambda place: part[place]),
        mesh=make_mesh(jax.devices()[:ranks]), in_specs=(spec, spec), out_specs=spec, check_vma=False,
    )  # fmt: skip
    np.testing.assert_array_equal(jax.jit(spread)(table, ids), table[ids])
    np.testing.assert_array_equal(LocalExchange().look_up(ids, len(table), lambda place: table[place]), table[ids])
