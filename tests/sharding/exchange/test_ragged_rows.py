"""Packing and the stand-in for the ragged all-to-all, against lists in Python."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from widemesh.sharding import make_mesh
from widemesh.sharding.exchange.packing import distinct_ranks, from_words, pack, to_words
from widemesh.sharding.exchange.ragged_rows import send_rows

RANKS, ROOM = 4, 24
COUNTS = {
    "spread": [[1, 2, 0, 3], [0, 0, 0, 0], [2, 2, 2, 0], [5, 0, 0, 1]],
    "nothing": np.zeros((RANKS, RANKS)),
    "all to one": [[0, 6, 0, 0]] * RANKS,
    "all from one": [[0] * 4, [1, 2, 3, 0], [0] * 4, [0] * 4],
}


def test_rows_arrive_in_order_of_their_rank() -> None:
    spec = PartitionSpec("ep")
    run = jax.jit(jax.shard_map(
        lambda rows, counts: send_rows(rows, counts, axis="ep", room=ROOM, is_native=False),
        mesh=make_mesh(jax.devices()[:RANKS]), in_specs=(spec, PartitionSpec()), out_specs=spec, check_vma=False,
    ))  # fmt: skip
    rows = np.arange(RANKS * 6 * 2, dtype=np.float32).reshape(RANKS, 6, 2) + 1
    for name, counts in COUNTS.items():
        counts = np.array(counts, np.int32)
        found = np.asarray(run(rows.reshape(-1, 2), counts)).reshape(RANKS, ROOM, 2)
        wanted = np.zeros_like(found)
        filled = [0] * RANKS
        for source in range(RANKS):
            taken = 0
            for target in range(RANKS):
                n = counts[source, target]
                wanted[target, filled[target] : filled[target] + n] = rows[source, taken : taken + n]
                taken, filled[target] = taken + n, filled[target] + n
        np.testing.assert_array_equal(found, wanted, err_msg=name)


def test_places_are_in_order_of_destination_then_row() -> None:
    to = jnp.array([[2, 0], [-1, 2], [0, -1], [-1, -1]], jnp.int32)
    packing = pack(to, 3)
    np.testing.assert_array_equal(packing.counts, [2, 0, 2])
    np.testing.assert_array_equal(packing.place, [[2, 0], [8, 3], [1, 8], [8, 8]])
    np.testing.assert_array_equal(packing.entries, [1, 4, 0, 3, 0, 0, 0, 0])


@pytest.mark.parametrize(("held", "ranks", "wanted"), [
    (2, 4, [[0, 3, -1], [1, -1, -1], [-1, -1, -1], [0, 1, 2]]),
    (4, 2, [[0, 1], [0, -1], [-1, -1], [0, 1]]),  # no row has more destinations than there are ranks
])  # fmt: skip
def test_a_rank_is_named_once(held: int, ranks: int, wanted: list) -> None:
    slots = jnp.array([[7, 0, 6], [2, 3, -1], [-1, -1, -1], [5, 1, 2]], jnp.int32)
    np.testing.assert_array_equal(distinct_ranks(slots, held, ranks), wanted)


@pytest.mark.parametrize(("dtype", "hidden"), [(jnp.float32, 3), (jnp.bfloat16, 4), (jnp.bfloat16, 5)])
def test_words_keep_every_bit(dtype: jnp.dtype, hidden: int) -> None:
    rng, bits = np.random.default_rng(0), np.uint32 if dtype == jnp.float32 else np.uint16
    x = rng.integers(0, np.iinfo(bits).max, (5, hidden), dtype=bits).view(dtype)  # NaN of every kind among them
    slots, weights = rng.integers(-1, 9, (5, 2), dtype=np.int32), rng.normal(size=(5, 2)).astype(np.float32)
    words = to_words(jnp.asarray(x), jnp.asarray(slots), jnp.asarray(weights))
    assert words.shape == (5, -(-hidden * x.itemsize // 4) + 4)
    found = from_words(words, hidden=hidden, per_token=2, dtype=dtype)
    for part, wanted in zip(found, (x, slots, weights), strict=True):
        assert np.asarray(part).tobytes() == wanted.tobytes()
