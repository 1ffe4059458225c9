"""Waves: all ranks step together or rest together, no wake-up is lost, and nobody spins."""

from __future__ import annotations

import threading
import time

import pytest

from tests.sharding.ticket import wave_ranks as ranks
from tests.sharding.ticket.launch import run
from widemesh.sharding.ticket import LocalTicket, TicketLost


@pytest.mark.parametrize(("size", "requests"), [(8, 1000), (5, 300), (1, 300)])
def test_random_arrivals(size, requests):
    results = run(ranks.fuzz, size, requests=requests, seed=size)
    assert all(result["is_done"] for result in results)
    assert [result["served"] for result in results] == [result["mine"] for result in results]
    assert sum(result["served"] for result in results) == requests
    assert len({(result["steps"], result["waves"]) for result in results}) == 1  # the same on all
    assert results[0]["waves"] > 20  # they did rest in between
    for result in results:
        messages, rests, cpu_s = result["quiet"]
        assert messages == 0 and rests <= 3 and cpu_s < 0.05


@pytest.mark.parametrize(("size", "slow", "quick"), [(3, 0, 1), (4, 0, 1), (4, 3, 0), (5, 2, 4)])
def test_work_that_comes_while_ranks_leave(size, slow, quick):
    requests = 20
    results = run(ranks.work_while_leaving, size, requests=requests, slow=slow, quick=quick)
    assert all(result["is_done"] for result in results)
    assert [result["served"] for result in results] == [requests * (rank == quick) for rank in range(size)]
    assert len({(result["steps"], result["waves"]) for result in results}) == 1


def test_pause_and_resume():
    moments = list(zip(*run(ranks.pause_and_resume, 3), strict=True))
    for moment in moments:
        assert len({str(of_rank[:4]) for of_rank in moment}) == 1  # the same on all, but for what each has served
    seen = {moment[0][0]: (*moment[0][1:4], [of_rank[4] for of_rank in moment]) for moment in moments}
    assert seen == {  # whether it is a pause, the wave to come, steps so far, requests served by each rank
        "at rest": (False, 1, 0, [0, 0, 0]),
        "one vote": (False, 2, 1, [0, 0, 0]),  # told in one step
        "work is done although one votes": (False, 3, 3, [0, 0, 1]),
        "two votes": (False, 4, 4, [0, 0, 1]),
        "all vote": (True, 5, 5, [0, 0, 1]),
        "work waits": (True, 5, 5, [0, 0, 1]),  # and begins no wave
        "one takes its vote back": (True, 6, 6, [0, 0, 1]),
        "two take theirs back": (True, 7, 7, [0, 0, 1]),
        "all go on": (False, 8, 9, [1, 0, 1]),
        "nothing came of it": (False, 8, 9, [1, 0, 1]),
    }


def test_calls_for_a_wave_that_is_over_are_ignored():
    results = run(ranks.stale_calls, 4)
    assert len({str(said) for said in results}) == 1
    rested, called, paused, called_in_pause = results[0]
    assert rested == [2, 2, False] and called == rested  # wave, steps, whether it is a pause
    assert paused[2] and called_in_pause == paused


def test_one_rank_alone_rests_and_wakes():
    loop = ranks.Loop(LocalTicket(ranks.SCHEMA))
    start_s = time.monotonic()
    loop.turn(0.05)
    assert 0.04 < time.monotonic() - start_s < 2 and not loop.waves.is_running
    threading.Timer(0.1, loop.submit).start()
    loop.turn(10)
    assert loop.waves.is_running and time.monotonic() - start_s < 5
    loop.turn()
    loop.turn()
    assert (loop.num_served, loop.waves.is_running, loop.waves.wave) == (1, False, 2)


def test_an_abort_ends_a_rest():
    loop = ranks.Loop(LocalTicket(ranks.SCHEMA))
    threading.Timer(0.05, loop.ticket.abort, ("rank 3 is gone", 3)).start()
    with pytest.raises(TicketLost, match="rank 3 is gone"):
        loop.turn(10)
    with pytest.raises(TicketLost, match="rank 3 is gone"):
        loop.ticket.post({"step": 0, "wave": 1, **loop.waves.values(True)})
