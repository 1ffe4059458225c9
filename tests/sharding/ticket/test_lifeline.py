"""A rank that is gone, stuck or has failed is known to all in time, whatever their engines do."""

from __future__ import annotations

import queue
import socket

import pytest

from tests.sharding.ticket import lifeline_ranks as ranks
from tests.sharding.ticket.launch import run
from widemesh.sharding.ticket import Field, Lifeline, LocalTicket, TicketSchema

TIMEOUT_S = 3.0  # of silence; a rank that only waits for its turn on a busy machine must not seem stuck


def watch(size: int, culprit: int, act: str, engine: str = "rests", watch_s: float = TIMEOUT_S + 4.0):
    """What the others, by rank, and the culprit heard and raised."""
    timeout_s = TIMEOUT_S if act.startswith("stop") else 4 * TIMEOUT_S
    options = {"culprit": culprit, "act": act, "engine": engine, "watch_s": watch_s, "timeout_s": timeout_s}
    results = run(ranks.watch, size, **options)
    return {rank: result for rank, result in enumerate(results) if rank != culprit}, results[culprit]


@pytest.mark.parametrize("culprit", [0, 2])
def test_a_killed_rank_is_known_to_all_at_once_at_rest(culprit):
    others, _ = watch(4, culprit, "die")
    for rank, result in others.items():
        if rank % 2:  # in the ticket's sleep, which hears it on its own connections
            error, gone, after_s = result["raised"]
            assert (error, gone) == ("TicketLost", culprit) and after_s < 2
        else:
            ((gone, reason, after_s),) = result["heard"]
            assert gone == culprit and reason == f"rank {culprit} is gone: its connection was closed" and after_s < 2


@pytest.mark.parametrize("culprit", [0, 2])
def test_a_killed_rank_is_known_to_all_at_once_in_an_exchange(culprit):
    for result in watch(4, culprit, "die", "waits")[0].values():
        error, gone, after_s = result["raised"]
        assert (error, gone) == ("TicketLost", culprit) and after_s < 2


@pytest.mark.parametrize("engine", ["rests", "waits"])
@pytest.mark.parametrize("culprit", [0, 3])
def test_a_stuck_rank_is_known_to_all_within_the_timeout(culprit, engine):
    others, _ = watch(4, culprit, "stop", engine)
    for rank, result in others.items():
        ((stuck, reason, after_s),) = result["heard"]
        assert stuck == culprit and reason == f"rank {culprit} gave no sign of life for {TIMEOUT_S:g} s"
        assert 0.2 < after_s < TIMEOUT_S + 1.5
        if engine == "waits" or rank % 2:
            error, stuck, after_s = result["raised"]
            assert (error, stuck) == ("TicketLost", culprit) and after_s < TIMEOUT_S + 1.5


def test_a_rank_given_up_hears_so_when_it_goes_on():
    others, culprit = watch(3, 1, "stop and go on")
    for result in [*others.values(), culprit]:
        assert [of[:2] for of in result["heard"]] == [[1, f"rank 1 gave no sign of life for {TIMEOUT_S:g} s"]]


@pytest.mark.parametrize("culprit", [0, 2])
def test_a_failure_is_told_to_all_with_its_reason(culprit):
    others, itself = watch(4, culprit, "fail", watch_s=1.5)
    assert itself["heard"] == []
    for rank, result in others.items():
        ((failed, reason, after_s),) = result["heard"]
        assert (failed, reason) == (culprit, "out of memory on GPU 3") and after_s < 2
        if rank % 2:
            assert result["raised"][:2] == ["TicketLost", culprit]


def test_a_rank_that_fails_for_another_names_the_other():
    others, itself = watch(4, 1, "blame", watch_s=1.5)
    assert itself["heard"] == []
    for result in others.values():
        assert [of[:2] for of in result["heard"]] == [[3, "rank 3 did not send its part"]]


@pytest.mark.parametrize("culprit", [0, 2])
def test_a_rank_that_ends_without_consent_is_no_failure_either(culprit):
    """All are told so, once, though its connections are closed right after."""
    others, itself = watch(4, culprit, "end", watch_s=1.5)
    assert itself["heard"] == []
    for result in others.values():
        assert [of[:2] for of in result["heard"]] == [[culprit, "stop: told to"]]


@pytest.mark.parametrize("culprit", [0, 2])
def test_to_leave_is_no_failure(culprit):
    others, itself = watch(4, culprit, "leave", watch_s=1.6)
    assert {str(result) for result in [*others.values(), itself]} == {str({"heard": [], "raised": None})}


def test_one_rank_alone_has_nobody_to_watch():
    lifeline = Lifeline(LocalTicket(TicketSchema((Field("a", "max"),))), lambda *_: pytest.fail("called"))
    lifeline.fail("no peers")
    lifeline.close()


class StarTicket(LocalTicket):
    """Rank 0 of two, whose other rank says nothing."""

    def __init__(self, sock: socket.socket):
        super().__init__(TicketSchema((Field("a", "max"),)))
        self.sock = sock

    def take_star(self):
        return {1: self.sock}


def test_a_shorter_limit_counts_from_when_it_is_set():
    heard: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
    near, far = socket.socketpair()
    with far:
        lifeline = Lifeline(StarTicket(near), lambda *news: heard.put(news), timeout_s=60, interval_s=0.05)
        with pytest.raises(queue.Empty):
            heard.get(timeout=0.8)
        lifeline.set_limit(0.4, "; wait longer")
        with pytest.raises(queue.Empty):
            heard.get(timeout=0.15)
        assert heard.get(timeout=5) == (1, "rank 1 gave no sign of life for 0.4 s; wait longer")
        lifeline.close()
