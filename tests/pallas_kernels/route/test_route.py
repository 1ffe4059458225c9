"""The slots that serve rows, by a hash, and the count of rows per slot."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from widemesh.eplb import build_maps, choose_slot
from widemesh.pallas_kernels.route import choose_slots, count_rows

# Layer of 4 experts in 8 slots: expert 0 has three copies, expert 2 two, expert 3 two.
OWNER = np.array([[0, 1, 2, 3, 0, 2, 0, 3]], np.int32)
MAPS = build_maps(OWNER, 4, 3)
SLOTS, COPIES = MAPS.expert_slots[0], MAPS.copies[0]


@pytest.mark.parametrize("first", [0, 12345, 2**31 - 300])
def test_devices_and_the_host_choose_alike(first):
    """Every copy of every expert is met; padding, expert -1, is sent nowhere."""
    rng = np.random.default_rng(first)
    experts = rng.integers(-1, 4, (256, 3)).astype(np.int32)
    rows = (first + np.arange(256)).astype(np.int32)
    positions = rng.integers(0, 2**20, 256).astype(np.int32)
    found = np.asarray(jax.jit(choose_slots)(experts, rows, positions, SLOTS, COPIES))
    for k in range(3):
        assert (found[:, k] == choose_slot(rows, positions, experts[:, k], SLOTS, COPIES)).all()
    assert (found[experts < 0] == -1).all() and set(found[experts >= 0]) == set(range(8))
    assert (OWNER[0, found[experts >= 0]] == experts[experts >= 0]).all()


def test_without_copies_a_slot_follows_from_its_expert():
    slots = np.array([[2], [0], [3], [1]], np.int32)
    experts = np.array([[0, 3], [-1, 1], [2, -1]], np.int32)
    found = choose_slots(experts, *[jnp.arange(3, dtype=jnp.int32)] * 2, slots, np.ones(4, np.int32))
    assert np.asarray(found).tolist() == [[2, 1], [-1, 0], [3, -1]]


@pytest.mark.parametrize(("rows", "per_row", "held"), [(1, 1, 1), (7, 2, 5), (300, 6, 48), (0, 3, 4)])
def test_counts_are_numpys(rows, per_row, held):
    """Slots of other ranks, below 0 or from `held` on, count for nothing."""
    slots = np.random.default_rng(rows).integers(-3, held + 3, (rows, per_row)).astype(np.int32)
    found = np.asarray(jax.jit(count_rows, static_argnums=1)(slots, held))
    assert found.dtype == np.int32
    assert found.tolist() == np.bincount(slots[(slots >= 0) & (slots < held)], minlength=held).tolist()
