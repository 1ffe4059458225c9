"""Rows of experts after whole migrations on virtual devices, against the table that they come from."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from widemesh.eplb.layout import ExpertLayout
from widemesh.eplb.migration import LayerMigration, plan_migration
from widemesh.pallas_kernels.grouped_moe import PackedMatrix
from widemesh.sharding import make_mesh
from widemesh.sharding.migrate import MigrationPrograms, Staging

IN, OUT = PartitionSpec("ep", "tp", None), PartitionSpec("ep", None, "tp")
WHOLE = PartitionSpec("ep")
WIDTH, HIDDEN = 4, 3

# Rows of an odd number of bytes among the packed ones: their last word is filled up.
FORMS: dict[str, tuple[Any, Any]] = {
    "f32": (
        {"w1": (np.float32, (WIDTH, HIDDEN)), "w3": (np.float32, (WIDTH, HIDDEN)), "w2": (np.float32, (HIDDEN, WIDTH))},
        {"w1": IN, "w3": IN, "w2": OUT},
    ),
    "packed": (
        {"w1": PackedMatrix(codes=(np.uint8, (3, 5)), scales=(np.uint8, (3, 1))),
         "w2": PackedMatrix(codes=(np.uint8, (4, 2)), scales=(np.uint8, (2, 3)))},
        {"w1": PackedMatrix(codes=WHOLE, scales=WHOLE), "w2": PackedMatrix(codes=WHOLE, scales=WHOLE)},
    ),
}  # fmt: skip


class Layer:
    """One layer of a form on a mesh: where its rows come from, and the programs that move them."""

    def __init__(self, ep: int, tp: int, experts: int, redundant: int, form: str = "f32"):
        self.layout = ExpertLayout(num_layers=1, num_experts=experts, ranks=ep, num_redundant_experts=redundant)
        mesh = make_mesh(jax.devices()[: ep * tp], tp)
        shapes, specs = FORMS[form]
        rng = np.random.default_rng(0)

        def rows(entry: tuple[Any, tuple[int, ...]]) -> np.ndarray:
            """Of every expert, any bits at all, NaNs of all kinds among them."""
            dtype, shape = entry
            return rng.integers(0, 256, (experts, *shape, np.dtype(dtype).itemsize), np.uint8).view(dtype)[..., 0]

        self.table = jax.tree.map(rows, shapes, is_leaf=lambda x: isinstance(x, tuple))
        self.shardings = jax.tree.map(functools.partial(NamedSharding, mesh), specs)
        forms = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
                             self.place(self.first_owner()))  # fmt: skip
        self.programs = MigrationPrograms(layer=forms, is_native=False)

    def place(self, owner: np.ndarray) -> Any:
        """The live arrays of a placement [X]."""
        host = jax.tree.map(lambda table: np.where(_wide(owner >= 0, table), table[owner], 0), self.table)
        return jax.device_put(host, self.shardings)

    def first_owner(self) -> np.ndarray:
        """Experts in their order, then none."""
        slots = np.arange(self.layout.num_slots)
        return np.where(slots < self.layout.num_experts, slots, -1).astype(np.int32)

    def any_owner(self, rng: np.random.Generator) -> np.ndarray:
        """Every expert somewhere, other slots empty or a copy of any, on its own rank perhaps."""
        extra = self.layout.num_slots - self.layout.num_experts
        owner = np.concatenate([np.arange(self.layout.num_experts), rng.integers(-1, self.layout.num_experts, extra)])
        return rng.permutation(owner).astype(np.int32)

    def plan(self, old: np.ndarray, wanted: np.ndarray) -> LayerMigration:
        """From one placement to another, which must differ."""
        (found,) = plan_migration(old[None], wanted[None], self.layout).layers
        return found

    def sources(self, plan: LayerMigration) -> np.ndarray:
        """[R, Q]: the slot that each staging row is copied from."""
        source = np.full(self.layout.num_slots, -1, np.int32)
        source[plan.transfers[:, 1]] = plan.transfers[:, 0]
        return source.reshape(self.layout.ranks, -1)

    def staged(self, live: Any, plan: LayerMigration, rows: int, stamp: int = 1, staging: Staging | None = None):
        """The staging area after all slices."""
        staging = staging or self.programs.stage()
        for part in plan.slices(rows):
            staging = self.programs.copy(rows)(live, staging, part.source, part.target, np.int32(stamp))
        return staging

    def bad_rows(self, staging: Staging, plan: LayerMigration, stamp: int = 1) -> int:
        return int(self.programs.verify(staging, self.sources(plan), np.int32(stamp)))

    def check(self, live: Any, owner: np.ndarray) -> None:
        """Every slot holds the row of its expert, bit for bit."""
        filled = owner >= 0

        def same(found: jax.Array, table: np.ndarray) -> None:
            assert np.asarray(found)[filled].tobytes() == table[owner[filled]].tobytes()

        jax.tree.map(same, live, self.table)


def _wide(mask: np.ndarray, like: np.ndarray) -> np.ndarray:
    return mask.reshape(-1, *[1] * (like.ndim - 1))


@functools.cache
def layer(*args: Any) -> Layer:
    """One per shape: its programs are compiled once."""
    return Layer(*args)


SMALL = (4, 1, 6, 6)  # ranks, tp, experts, redundant ones: 3 slots a rank


@pytest.mark.parametrize(("shape", "rows"), [
    ((8, 1, 12, 4), 1), ((8, 1, 16, 0), 5), ((4, 2, 6, 6), 2), ((2, 1, 7, 3), 5), ((8, 1, 12, 12, "packed"), 2),
    ((2, 1, 7, 3, "packed"), 5),
])  # fmt: skip
def test_every_slot_holds_the_row_of_its_expert(shape: tuple[Any, ...], rows: int) -> None:
    on, rng = layer(*shape), np.random.default_rng(rows)
    owner, staging, moved = on.first_owner(), on.programs.stage(), 0
    live = on.place(owner)
    for stamp in range(4):
        wanted = on.any_owner(rng)
        plan = on.plan(owner, wanted)
        staging = on.staged(live, plan, rows, stamp, staging)
        on.check(live, owner)  # slices only read
        assert on.bad_rows(staging, plan, stamp) == 0
        live = on.programs.commit(live, staging, plan.commit)
        on.check(live, wanted)
        owner, moved = wanted, moved + len(plan.transfers)
    assert moved > 4


@pytest.mark.parametrize("shape", [(4, 2, 6, 6), (2, 1, 7, 3, "packed")])
def test_a_changed_row_is_counted(shape: tuple[Any, ...]) -> None:
    on, rng = layer(*shape), np.random.default_rng(3)
    old = on.first_owner()
    plan = on.plan(old, on.any_owner(rng))
    staging = on.staged(on.place(old), plan, 2)
    staged, others = plan.transfers[:, 1], np.setdiff1d(np.arange(on.layout.num_slots), plan.transfers[:, 1])

    def changed(change: Callable[[np.ndarray], None], leaf: int = 0) -> int:
        """Bad rows after a change to the host's copy of one array's words or bytes."""
        leaves, structure = jax.tree.flatten(staging.rows)
        host = np.array(leaves[leaf])
        change(host.view(f"u{host.itemsize}"))
        leaves[leaf] = jax.device_put(host, leaves[leaf].sharding)
        rows = jax.tree.unflatten(structure, leaves)
        return on.bad_rows(Staging(rows=rows, checksums=staging.checksums), plan)

    def flip(row: int, bit: int) -> Callable[[np.ndarray], None]:
        def change(host: np.ndarray) -> None:
            host[row].reshape(-1)[-1] ^= host.dtype.type(1 << bit)

        return change

    def swap_words(host: np.ndarray) -> None:
        row = host[staged[0]].reshape(-1)
        assert row[0] != row[1]
        row[0], row[1] = row[1], row[0]

    def swap_rows(host: np.ndarray) -> None:
        host[staged[:2]] = host[staged[1::-1]]

    for leaf in range(len(jax.tree.leaves(staging.rows))):
        for bit in (0, 7):
            assert changed(flip(staged[-1], bit), leaf) == 1
        assert changed(lambda host: host.__ixor__(host.dtype.type(1)), leaf) == len(staged)
        assert changed(swap_words, leaf) == 1
        assert changed(swap_rows, leaf) == 2
    assert changed(flip(others[0], 0)) == 0  # nobody reads that one


def test_a_row_in_the_wrong_place_or_from_an_earlier_migration_is_counted() -> None:
    on = layer(*SMALL)
    old, wanted = on.first_owner(), np.roll(on.first_owner(), 3)
    plan, live = on.plan(old, wanted), on.place(on.first_owner())
    staging = on.staged(live, plan, 2)
    assert len(plan.transfers) == 6 and on.bad_rows(staging, plan) == 0
    assert on.bad_rows(staging, plan, stamp=2) == 6

    part, *_ = plan.slices(2)
    assert part.num_rows == 4
    missing = on.staged(live, plan, 2, stamp=1)
    again = on.programs.copy(2)(live, missing, part.source, part.target, np.int32(2))
    assert on.bad_rows(again, plan, stamp=2) == 6 - part.num_rows

    elsewhere = on.sources(plan).copy()  # as if two ranks had been told of other sources
    rank, place = np.argwhere(elsewhere >= 0)[0]
    elsewhere[rank, place] += 1
    assert int(on.programs.verify(staging, elsewhere, np.int32(1))) == 1

    def exchanged(array: jax.Array) -> jax.Array:
        """Two staged rows of different ranks in each other's place, each with its own checksum."""
        one, other = plan.transfers[0, 1], plan.transfers[-1, 1]
        host = np.array(array)
        host[[one, other]] = host[[other, one]]
        return jax.device_put(host, array.sharding)

    assert on.bad_rows(jax.tree.map(exchanged, staging), plan) == 2


def test_what_was_dispatched_before_a_commit_reads_the_old_rows() -> None:
    on, rng = layer(*SMALL), np.random.default_rng(5)
    owner = on.first_owner()
    live, staging, earlier = on.place(owner), on.programs.stage(), []
    slow = jax.jit(lambda tree: jax.lax.fori_loop(
        0, 2000, lambda i, x: jax.tree.map(lambda a: jax.numpy.flip(a, 0), x), tree
    ))  # fmt: skip
    jax.block_until_ready(slow(live))
    for stamp in range(3):  # nothing is waited for: the next slices write the staging rows that a commit reads
        earlier.append((owner, slow(live)))
        wanted = on.any_owner(rng)
        plan = on.plan(owner, wanted)
        staging = on.staged(live, plan, 2, stamp, staging)
        live, owner = on.programs.commit(live, staging, plan.commit), wanted
    on.check(live, owner)
    for before, result in earlier:
        on.check(result, before)


def test_idle_arguments_compile_all_and_change_nothing() -> None:
    on = Layer(*SMALL)
    programs, owner, rng = on.programs, on.first_owner(), np.random.default_rng(7)
    live, other = on.place(owner), on.place(owner)
    wanted = on.any_owner(rng)
    ranks, held = on.layout.ranks, on.layout.slots_per_rank
    none, stamp = np.full((ranks, 2), -1, np.int32), np.int32(0)
    staging = programs.copy(2)(live, programs.stage(), none, none, stamp)
    assert int(programs.verify(staging, np.full((ranks, held), -1, np.int32), stamp)) == 0
    own = np.tile(np.arange(held, dtype=np.int32), (ranks, 1))
    on.check(programs.commit(live, staging, own), owner)
    on.check(live, owner)
    assert not np.asarray(staging.checksums).any()
    assert all(not np.asarray(rows).any() for rows in jax.tree.leaves(staging.rows))
    for arrays in (live, other):  # a program that is kept takes no other form than the first
        for back in (on.plan(owner, wanted), on.plan(wanted, owner)):  # the second from what a commit has made
            staging = on.staged(arrays, back, 2, 1, staging)
            assert on.bad_rows(staging, back) == 0
            arrays = programs.commit(arrays, staging, back.commit)
        on.check(arrays, owner)


def test_bytes_are_those_of_the_arrays() -> None:
    whole, cut, odd = layer(*SMALL).programs, layer(4, 2, 6, 6).programs, layer(2, 1, 7, 3, "packed").programs
    row = 3 * WIDTH * HIDDEN * 4
    assert whole.row_bytes == cut.row_bytes == row
    assert whole.staging_bytes == 3 * (row + 4)
    assert cut.staging_bytes == 3 * (row // 2 + 4)
    assert odd.row_bytes == 15 + 3 + 8 + 6 and odd.staging_bytes == 5 * (32 + 4)
