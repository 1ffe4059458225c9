"""Migration plans, carried out on slots that hold the number of their expert instead of its weights."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from widemesh.eplb import ExpertLayout, build_maps, check_placement, plan_migration
from widemesh.eplb.migration import count_arrivals

_NOTHING = -7  # what a staging row holds before anything has been received


class Tagged:
    """Live rows and a map for every layer, and one layer's staging rows."""

    def __init__(self, slot_owner: np.ndarray, layout: ExpertLayout):
        self.layout = layout
        self.live, self.map = slot_owner.copy(), slot_owner.copy()
        self.staging = np.full(layout.num_slots, _NOTHING)

    def copy_slice(self, layer: int, part) -> None:
        for source, target in zip(part.source.reshape(-1), part.target.reshape(-1), strict=True):
            if source >= 0:
                self.staging[target] = self.live[layer, source]

    def commit(self, one) -> None:
        shape = (self.layout.ranks, -1)
        both = np.concatenate([self.live[one.layer].reshape(shape), self.staging.reshape(shape)], 1)
        self.live[one.layer] = np.take_along_axis(both, one.commit, 1).reshape(-1)
        self.map[one.layer] = one.slot_owner
        self.staging[:] = _NOTHING

    def check(self) -> None:
        """Every layer is a valid placement, and the weights are where its map says (an empty slot may hold any)."""
        check_placement(self.map, self.layout)
        assert np.array_equal(np.where(self.map < 0, -1, self.live), self.map)
        maps = build_maps(self.map, self.layout.num_experts, self.layout.max_copies)
        for layer, experts in enumerate(maps.expert_slots):
            for expert, slots in enumerate(experts):
                assert (self.live[layer, slots[slots >= 0]] == expert).all()


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_every_state_on_the_way_is_served_right(draws, data):
    layout = draws.layout(data)
    old, wanted = draws.placement(data, layout), draws.placement(data, layout)
    rows, quota = data.draw(st.integers(1, 4)), layout.slots_per_rank
    plan = plan_migration(old, wanted, layout)
    state, moved = Tagged(old, layout), 0
    for one in plan.layers:
        arrived = []
        for part in one.slices(rows):
            assert part.source.shape == part.target.shape == (layout.ranks, rows) and part.num_rows > 0
            valid = part.source >= 0
            assert np.array_equal(valid, part.target >= 0)
            assert (part.target // quota == np.arange(layout.ranks)[:, None])[valid].all()
            assert np.bincount(part.source[valid] // quota).max() <= rows
            state.copy_slice(one.layer, part)
            state.check()
            arrived += part.target[valid].tolist()
        assert sorted(arrived) == sorted(one.transfers[:, 1].tolist())
        moved += len(arrived)
        state.commit(one)
        state.check()
    assert np.array_equal(state.map, wanted)
    assert moved == plan.num_transfers == plan.least_transfers == _missing(old, wanted, layout)
    stays = [one.commit.reshape(-1) == np.tile(np.arange(quota), layout.ranks) for one in plan.layers]
    for one, stay in zip(plan.layers, stays, strict=True):  # nothing is written that was right before
        assert np.array_equal(stay, (old[one.layer] == wanted[one.layer]) | (wanted[one.layer] < 0))


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_giving_up_at_any_layer_leaves_a_valid_placement(draws, data):
    layout = draws.layout(data)
    old, wanted = draws.placement(data, layout), draws.placement(data, layout)
    plan = plan_migration(old, wanted, layout)
    state = Tagged(old, layout)
    done = data.draw(st.integers(0, len(plan.layers)))
    for one in plan.layers[:done]:
        for part in one.slices(2):
            state.copy_slice(one.layer, part)
        state.commit(one)
    for one in plan.layers[done : done + 1]:  # some slices of the next one, whose staging is then dropped
        for part in list(one.slices(1))[:1]:
            state.copy_slice(one.layer, part)
    state.check()
    finished = [one.layer for one in plan.layers[:done]]
    assert all(np.array_equal(state.map[layer], wanted[layer]) for layer in finished)
    rest = plan_migration(state.map, wanted, layout)
    assert [one.layer for one in rest.layers] == [one.layer for one in plan.layers[done:]]


def _missing(old: np.ndarray, wanted: np.ndarray, layout: ExpertLayout) -> int:
    by_rank = [owner.reshape(layout.num_layers, layout.ranks, -1) for owner in (old, wanted)]
    return sum(
        len(set(new.tolist()) - set(now.tolist()) - {-1})
        for was, will in zip(*by_rank, strict=True)
        for now, new in zip(was, will, strict=True)
    )


def test_who_sends_what():
    """Three ranks of two slots. Rank 2 gets both from others, rank 0 swaps its slots, rank 1 copies one."""
    layout = ExpertLayout(num_layers=1, num_experts=3, ranks=3, num_redundant_experts=3)
    old, wanted = np.array([[0, 1, 0, 2, 2, 2]], np.int32), np.array([[1, 0, 2, 2, 0, 1]], np.int32)
    (one,) = plan_migration(old, wanted, layout).layers
    assert one.transfers.tolist() == [[2, 4], [0 + 1, 5]]  # expert 0 from rank 1: rank 0 has to send expert 1 already
    assert one.commit.tolist() == [[1, 0], [1, 1], [2 + 0, 2 + 1]]
    assert [part.num_rows for part in one.slices(1)] == [1, 1] and [part.num_rows for part in one.slices(2)] == [2]


def test_what_a_rank_needs_twice_is_received_once():
    layout = ExpertLayout(num_layers=1, num_experts=2, ranks=2, num_redundant_experts=2)
    old, wanted = np.array([[0, 0, 1, 1]], np.int32), np.array([[1, 1, 0, 1]], np.int32)
    (one,) = plan_migration(old, wanted, layout).layers
    assert one.transfers.tolist() == [[2, 0], [0, 2]]
    assert one.commit.tolist() == [[2, 2], [2, 1]]


def test_senders_share_the_work_and_slices_are_few():
    """Four ranks hold expert 0 and four want it: each sends once, in one slice."""
    layout = ExpertLayout(num_layers=1, num_experts=8, ranks=8, num_redundant_experts=8)
    old = np.array([[0, 1, 0, 2, 0, 3, 0, 4, 1, 5, 2, 6, 3, 7, 4, 5]], np.int32)
    wanted = old.copy()
    wanted[0, [8, 10, 12, 14]] = 0
    (one,) = plan_migration(old, wanted, layout).layers
    assert sorted(one.transfers[:, 0].tolist()) == [0, 2, 4, 6]
    assert len(list(one.slices(1))) == 1


def test_layers_go_in_the_order_that_is_asked_for():
    layout = ExpertLayout(num_layers=3, num_experts=2, ranks=2)
    old = np.array([[0, 1]] * 3, np.int32)
    wanted = np.array([[1, 0], [0, 1], [1, 0]], np.int32)
    plan = plan_migration(old, wanted, layout, np.array([2, 0]))
    assert [one.layer for one in plan.layers] == [2, 0] and plan.num_transfers == 4
    assert count_arrivals(old, wanted, layout) == 4
    with pytest.raises(ValueError, match="must name every layer that differs"):
        plan_migration(old, wanted, layout, np.array([2]))
    with pytest.raises(ValueError, match="layer that differs, and once"):
        plan_migration(old, wanted, layout, np.array([2, 0, 2]))
