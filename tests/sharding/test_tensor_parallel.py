"""The collectives over `tp`: sums, joins and lookups of parts are those of the whole; one part does nothing."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from widemesh.sharding import TensorParallel, make_mesh

RNG = np.random.default_rng(0)
ROWS = PartitionSpec("ep")


def in_parts(ep: int, tp: int, run, *args, specs, out=ROWS):
    """`run(parts, *args)` on each device of a mesh, the arguments laid out by `specs`."""
    mapped = jax.shard_map(
        lambda *held: run(TensorParallel(size=tp), *held), mesh=make_mesh(jax.devices()[: ep * tp], tp),
        in_specs=specs, out_specs=out, check_vma=False,
    )  # fmt: skip
    return jax.jit(mapped)(*args)


@pytest.mark.parametrize(("ep", "tp"), [(1, 2), (2, 2), (2, 4)])
def test_cut_outputs_then_cut_inputs_make_the_whole_product(ep, tp):
    """Rows stay on their rank: only the devices of one rank add up."""
    x, up, down = (RNG.normal(size=shape).astype(np.float32) for shape in ((2 * ep, 6), (8, 6), (5, 8)))
    summed = in_parts(ep, tp, lambda parts, x, up, down: parts.sum((x @ up.T) @ down.T), x, up, down,
                      specs=(ROWS, PartitionSpec("tp"), PartitionSpec(None, "tp")))  # fmt: skip
    np.testing.assert_allclose(summed, x @ up.T @ down.T, rtol=1e-5, atol=1e-5)
    joined = in_parts(ep, tp, lambda parts, x, up: parts.join(x @ up.T), x, up, specs=(ROWS, PartitionSpec("tp")))
    np.testing.assert_allclose(joined, x @ up.T, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("ep", "tp"), [(1, 4), (2, 2)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_of_a_cut_table_are_those_of_the_whole(ep, tp, dtype):
    table = jnp.asarray(RNG.normal(size=(4 * tp, 3)), dtype)
    ids = RNG.integers(0, len(table), (2 * ep, 5)).astype(np.int32)
    ids[0] = len(table) - 1  # all of the last part
    found = in_parts(ep, tp, lambda parts, table, ids: parts.look_up(ids, len(table), lambda place: table[place]),
                     table, ids, specs=(PartitionSpec("tp"), ROWS))  # fmt: skip
    assert found.dtype == table.dtype
    np.testing.assert_array_equal(np.asarray(found, np.float32), np.asarray(table[ids], np.float32))


def test_all_devices_of_a_rank_hold_the_same_bits():
    """Sums of values that round: what later layers choose from must not differ between the devices of a rank."""
    x = (RNG.normal(size=(8, 64)) * 10.0 ** RNG.integers(-4, 4, (8, 64))).astype(np.float32)
    each = PartitionSpec(("ep", "tp"))
    found = np.asarray(in_parts(2, 4, lambda parts, x: parts.sum(x), x, specs=(each,), out=each)).reshape(2, 4, 64)
    assert (found == found[:, :1]).all() and not (found[0] == found[1]).all()


def test_one_part_does_nothing():
    """And needs no mesh."""
    x, parts = np.ones((2, 3), np.float32), TensorParallel()
    assert parts.sum(x) is x and parts.join(x) is x
    assert parts.look_up(x, 2, lambda ids: ids) is x
