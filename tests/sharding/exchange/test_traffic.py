"""Bytes of an exchange: closed forms beside compiled collectives and counted routings, and the choice by them."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import numpy as np
import pytest

from widemesh.pallas_kernels.gpu.hlo import Program
from widemesh.sharding.exchange import (
    BatchInvariantExchange,
    LayerShape,
    LocalExchange,
    RaggedExchange,
    all_gather_traffic,
    choose_form,
    exchange_traffic,
    expected_ranks,
    look_up_traffic,
    make_exchange,
    ragged_traffic,
    routed_ragged_traffic,
)

FLASH = LayerShape(rows=64, per_token=6, hidden=5120, value_bytes=2, ranks=8, slots=384)


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_the_gathering_form_moves_what_its_program_says(moe, batch_invariant: bool) -> None:
    ranks, t, k, slots, d = 4, 3, 2, 8, 8
    shape = LayerShape(rows=t, per_token=k, hidden=d, value_bytes=4, ranks=ranks, slots=slots,
                       batch_invariant=batch_invariant)  # fmt: skip
    layer = moe.compiled("all_gather", ranks, batch_invariant, moe.gated)
    f32, i32 = (lambda *s: jax.ShapeDtypeStruct(s, np.float32)), (lambda *s: jax.ShapeDtypeStruct(s, np.int32))
    rows, matrix = (ranks * t, k), f32(slots, d, d)
    lowered = layer.lower(f32(ranks * t, d), i32(*rows), f32(*rows), i32(*rows), matrix, matrix, matrix)
    # An all-gather's result and a reduce-scatter's operand are all ranks' parts; a rank's own part does not travel.
    found = Program(lowered.compile().as_text()).collectives()
    moved = {one.kind: one.num_bytes * (ranks - 1) // ranks for one in found}
    wanted = all_gather_traffic(shape)
    assert moved == {"all-gather": wanted.dispatch, "reduce-scatter": wanted.combine}


def test_a_routing_counted_by_hand() -> None:
    shape = LayerShape(rows=2, per_token=2, hidden=10, value_bytes=2, ranks=3, slots=6)
    slots = np.array([[[0, 2], [4, 5]], [[2, 3], [-1, -1]], [[0, 1], [0, 3]]])
    row, result, counts = 10 * 2 + 2 * 8, 40, 2 * 2 * 3 * 4
    # 0 sends to 1 and 2, 1 keeps its own, 2 sends to 0 twice and to 1; the results go the other way.
    moved = routed_ragged_traffic(slots, shape)
    np.testing.assert_array_equal(moved.sent - counts, [2 * row + 2 * result, 2 * result, 3 * row + result])
    np.testing.assert_array_equal(moved.received - counts, [2 * row + 2 * result, 2 * row, row + 3 * result])
    # One result per expert: both that 2 finds for row 1 of rank 0, both that 0 finds for row 0 of rank 2.
    each = routed_ragged_traffic(slots, dataclasses.replace(shape, batch_invariant=True))
    np.testing.assert_array_equal(each.sent - moved.sent, [result, 0, result])
    nothing = routed_ragged_traffic(np.full((3, 2, 2), -1), shape)
    assert (nothing.sent == counts).all() and (nothing.received == counts).all()


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_the_ragged_closed_form_is_the_average(batch_invariant: bool) -> None:
    shape = LayerShape(rows=2000, per_token=4, hidden=64, value_bytes=4, ranks=4, slots=16,
                       batch_invariant=batch_invariant)  # fmt: skip
    slots = np.argsort(np.random.default_rng(0).uniform(size=(4, 2000, 16)), axis=2)[..., :4]
    moved = routed_ragged_traffic(slots, shape)
    assert moved.sent.sum() == moved.received.sum()
    assert moved.sent.mean() == pytest.approx(ragged_traffic(shape).total, rel=0.01)
    assert exchange_traffic("ragged", shape) == ragged_traffic(shape)


def test_expected_ranks_by_enumeration() -> None:
    slots, ranks, k = 8, 4, 3
    others = [len({slot // 2 for slot in chosen} - {0}) for chosen in itertools.combinations(range(slots), k)]
    assert expected_ranks(k, slots, ranks) == pytest.approx(np.mean(others))
    assert expected_ranks(k, slots, 1) == 0


def test_bytes_of_the_released_model() -> None:
    """Per rank and layer, 64 rows on 8 ranks."""
    assert all_gather_traffic(FLASH).dispatch == 7 * 64 * (10240 + 48)
    assert all_gather_traffic(FLASH).combine == 7 * 64 * 20480
    assert 3.8 < expected_ranks(6, 384, 8) < 3.9
    in_order = dataclasses.replace(FLASH, batch_invariant=True)
    assert all_gather_traffic(in_order).combine == 6 * all_gather_traffic(FLASH).combine
    assert ragged_traffic(in_order).combine == pytest.approx(64 * 20480 * 5.25)
    assert look_up_traffic(rows=64, columns=24, width=256, value_bytes=2, ranks=8) == 7 * 64 * 24 * (4 + 512)
    assert exchange_traffic("local", FLASH).total == 0


def test_the_choice_by_bytes_and_platform() -> None:
    prefill = dataclasses.replace(FLASH, rows=2048)
    assert choose_form("auto", FLASH, "gpu") == "all_gather"  # 6 MB saved: less than the extra steps cost
    assert choose_form("auto", prefill, "gpu") == "ragged"
    assert choose_form("auto", prefill, "cpu") == "all_gather"
    assert choose_form("auto", dataclasses.replace(FLASH, ranks=32), "gpu") == "ragged"  # 9 of 10 rows spared
    assert choose_form("auto", dataclasses.replace(prefill, ranks=2), "gpu") == "all_gather"  # nearly every row goes
    assert choose_form("ragged", FLASH, "cpu") == "ragged" and choose_form("all_gather", prefill, "gpu") == "all_gather"
    assert choose_form("ragged", dataclasses.replace(FLASH, ranks=1), "gpu") == "local"


def test_the_exchange_of_a_form() -> None:
    assert make_exchange("local", axis="ep", platform="cpu") == LocalExchange()
    assert make_exchange("ragged", axis="ep", platform="gpu") == RaggedExchange(axis="ep", is_native=True)
    in_order = make_exchange("ragged", axis="ep", platform="cpu", batch_invariant=True)
    assert in_order == BatchInvariantExchange(exchange=RaggedExchange(axis="ep", is_native=False))
