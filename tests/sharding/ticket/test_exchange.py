"""Exchanges between real processes: right, the same everywhere, in as many rounds as needed; and how they fail."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest

from tests.sharding.ticket import exchange_ranks as ranks
from tests.sharding.ticket.launch import free_port, run


def test_the_ticket_imports_no_jax():
    program = "import sys, widemesh.sharding.ticket; assert 'jax' not in sys.modules, 'jax is there'"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_size_from_1_to_33():
    sizes, steps = range(1, 34), 3
    ports: set[int] = set()
    while len(ports) < len(sizes):
        ports.add(free_port())
    results = run(ranks.every_size, max(sizes), ports=list(ports), steps=steps)
    for i, size in enumerate(sizes):
        rounds = math.ceil(math.log2(size))
        assert [of_rank[i] for of_rank in results] == [
            [True, rounds, rounds * steps] if rank < size else None for rank in range(max(sizes))
        ]


@pytest.mark.parametrize(("size", "tcp"), [(3, False), (4, True), (7, False), (7, True)])
def test_parts_that_come_before_they_are_wanted(size, tcp):
    assert run(ranks.at_random_times, size, steps=60, tcp=tcp) == [[True] * 60] * size


@pytest.mark.parametrize(("size", "late"), [(5, 3), (8, 0)])
def test_all_know_who_came_last(size, late):
    for rank, (last, wait_s) in enumerate(run(ranks.with_a_late_rank, size, late=late)):
        assert last == late
        assert wait_s < 0.15 if rank == late else 0.1 < wait_s < 4


def fails(size: int, culprit: int, act: str, timeout_s: float = 1.0, tcp: bool = False):
    """What each rank but the culprit raised."""
    results = run(ranks.until_it_fails, size, culprit=culprit, act=act, timeout_s=timeout_s, tcp=tcp)
    assert all(result["again"] for result in results if result and result["error"])
    return [result for rank, result in enumerate(results) if rank != culprit], results[culprit]


@pytest.mark.parametrize(("size", "culprit", "tcp"), [(2, 0, True), (5, 2, True), (8, 0, False), (8, 5, False)])
def test_a_killed_rank_is_named_by_all_at_once(size, culprit, tcp):
    others, dead = fails(size, culprit, "die", timeout_s=4.0, tcp=tcp)
    assert dead is None
    for result in others:
        assert (result["error"], result["rank"]) == ("TicketLost", culprit) and result["s"] < 2


@pytest.mark.parametrize(("size", "culprit", "act"), [(5, 3, "stop"), (8, 0, "stop"), (6, 0, "stall")])
def test_a_stuck_rank_is_named_by_all_within_the_timeout(size, culprit, act):
    others, _ = fails(size, culprit, act)
    for result in others:
        assert (result["error"], result["rank"]) == ("TicketTimeout", culprit)
        assert f"rank {culprit} did not send its part" in result["message"] and 0.8 < result["s"] < 3


def test_a_rank_that_has_left_is_named():
    others, left = fails(5, 1, "leave", timeout_s=4.0, tcp=True)
    assert left["error"] is None
    assert {(result["error"], result["rank"]) for result in others} == {("TicketLeft", 1)}
    assert max(result["s"] for result in others) < 2


def test_a_rank_that_gives_up_takes_the_others_with_it():
    others, culprit = fails(6, 4, "abort", timeout_s=4.0)
    assert (culprit["error"], culprit["message"], culprit["rank"]) == ("TicketLost", "no more devices", 4)
    assert {(result["error"], result["rank"]) for result in others} == {("TicketLost", 4)}
    assert max(result["s"] for result in others) < 2


def test_ranks_at_different_steps_are_refused_by_all_with_both_values():
    others, culprit = fails(5, 2, "skip a step")
    for result in [*others, culprit]:
        assert (result["error"], result["rank"]) == ("TicketMismatch", 2)
        assert "step=3 on rank 0 but step=4 on rank 2; all ranks must" in result["message"]


def test_ranks_in_different_waves_are_refused_by_all():
    others, culprit = fails(4, 2, "skip a wave", timeout_s=4.0)
    for result in [*others, culprit]:
        assert result["error"] == "TicketMismatch" and result["s"] < 2
    assert any("exchange=3, wave=1 on rank" in result["message"] for result in others)
    assert any("exchange=3, wave=2 on rank 2" in result["message"] for result in others)
