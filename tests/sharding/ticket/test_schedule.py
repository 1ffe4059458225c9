"""Rounds of the all-gather: for every size as many as needed, and every row arrives once."""

from __future__ import annotations

import math

import pytest

from widemesh.sharding.ticket.schedule import make_schedule


@pytest.mark.parametrize("size", [*range(1, 34), 64, 100, 256])
def test_every_rank_ends_with_every_row(size):
    schedules = [make_schedule(rank, size) for rank in range(size)]
    assert {len(schedule.rounds) for schedule in schedules} == {math.ceil(math.log2(size))}
    held = [[rank] for rank in range(size)]
    for turns in zip(*(schedule.rounds for schedule in schedules), strict=True):
        sent = {(rank, turn.to): held[rank][: turn.rows] for rank, turn in enumerate(turns)}
        assert len({turn.to for turn in turns}) == size  # one send and one receive for each
        for rank, turn in enumerate(turns):
            assert len(held[rank]) == turn.start
            held[rank] = held[rank] + sent[turn.source, rank]
    for schedule, rows in zip(schedules, held, strict=True):
        assert [rows[place] for place in schedule.position] == list(range(size)) and len(rows) == size


@pytest.mark.parametrize("size", [2, 8, 32])
def test_powers_of_two_swap_with_one_partner_each_round(size):
    assert all(turn.to == turn.source for rank in range(size) for turn in make_schedule(rank, size).rounds)


@pytest.mark.parametrize("size", range(2, 34))
def test_a_peer_sends_parts_of_one_round_only(size):
    for rank in range(size):
        sources = [turn.source for turn in make_schedule(rank, size).rounds]
        assert len(set(sources)) == len(sources) and rank not in sources
