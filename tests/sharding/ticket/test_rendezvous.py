"""How ranks meet, and what they say when they cannot."""

from __future__ import annotations

import time

import pytest

from tests.sharding.ticket import exchange_ranks as ranks
from tests.sharding.ticket.launch import free_port, run
from widemesh.sharding.ticket import Field, NetTicket, TicketError, TicketSchema

SCHEMA = TicketSchema((Field("step", "equal"),))


def meet(*said: dict, delays_s: list[float] | None = None):
    """What joining raised on each process, which says `said`."""
    return run(ranks.join, len(said), said=list(said), delays_s=delays_s or [0.0] * len(said))


@pytest.mark.parametrize("delays_s", [[0.5, 0.0, 0.0], [0.0, 0.0, 0.5]])
def test_ranks_come_in_any_order(delays_s):
    assert meet({}, {}, {}, delays_s=delays_s) == [{"error": None}] * 3


def test_strangers_are_no_ranks():
    assert run(ranks.join_among_strangers, 4) == [{"error": None}] * 4


def test_strangers_at_a_rank_s_own_port_hold_nobody_up():
    results = run(ranks.join_with_strangers_at_the_door, 4)
    assert [result["error"] for result in results] == [None] * 4 and max(result["s"] for result in results) < 10


def test_a_rank_that_is_started_again_finds_its_place():
    assert run(ranks.join_again, 3, comes_back=True) == [{"error": None}] * 3


def test_a_rank_that_has_gone_is_missing():
    first, _, third = run(ranks.join_again, 3, comes_back=False)
    for result in (first, third):
        assert (result["error"], result["rank"]) == ("TicketTimeout", 1)
        assert "ranks [1] of 3 did not come to 127.0.0.1:" in result["message"]


def test_other_digests_are_refused_by_all_with_the_values_side_by_side():
    same, other = {"model": "3fa1", "settings": "77"}, {"model": "9c0d", "settings": "77"}
    for result in meet({"digests": same}, {"digests": same}, {"digests": other}, {"digests": other}):
        assert (result["error"], result["rank"]) == ("TicketMismatch", 2)
        assert result["message"].startswith("model=3fa1 on ranks 0, 1 but model=9c0d on ranks 2, 3; start all ranks")


def test_a_digest_that_only_some_have_is_refused():
    for result in meet({"digests": {"a": "1"}}, {}):
        assert result["error"] == "TicketMismatch" and "a=1 on rank 0 but a=(nothing) on rank 1" in result["message"]


def test_another_size_is_refused_on_all_sides():
    results = meet({}, {"size": 4}, {}, delays_s=[0.0, 0.0, 0.4])
    assert {result["error"] for result in results} == {"TicketError"} and max(r["s"] for r in results) < 2
    assert {result["message"] for result in results} == {
        "size=4 on rank 1 but size=3 on rank 0; give all the number of processes"
    }


def test_a_rank_given_twice_is_refused_on_all_sides():
    results = meet({}, {"rank": 1}, {"rank": 1}, delays_s=[0.0, 0.0, 0.3])
    assert {result["error"] for result in results} == {"TicketError"} and {result["rank"] for result in results} == {1}
    assert all("rank=1 was given to two processes, " in result["message"] for result in results)


def test_rank_0_given_twice_is_refused_by_the_second():
    results = meet({"join_timeout_s": 1.0}, {"rank": 0, "join_timeout_s": 1.0}, delays_s=[0.0, 0.3])
    assert "cannot listen at" in results[1]["message"] and "rank=0 to one process only" in results[1]["message"]
    assert "ranks [1] of 2 did not come" in results[0]["message"]


def test_missing_ranks_are_named_to_all_who_came():
    results = run(ranks.join, 2, said=[{"size": 4, "join_timeout_s": 0.8}, {"size": 4}], delays_s=[0.0, 0.0])
    for result in results:
        assert (result["error"], result["rank"]) == ("TicketTimeout", 2) and result["s"] < 1.5
        assert "ranks [2, 3] of 4 did not come to 127.0.0.1:" in result["message"]


def test_an_unreachable_rank_0_is_one_error_in_time():
    start_s, port = time.monotonic(), free_port()
    with pytest.raises(TicketError, match=f"rank 0 cannot be reached at 127.0.0.1:{port} within 0.4 s .*refused"):
        NetTicket.join(SCHEMA, rank=1, size=2, address=f"127.0.0.1:{port}", join_timeout_s=0.4)
    assert 0.3 < time.monotonic() - start_s < 1


@pytest.mark.parametrize(
    ("named", "words"),
    [
        ({"rank": 3}, "rank=3 must be from 0 to size - 1 with size=3"),
        ({"rank": -1}, "rank=-1 must be"),
        ({"size": 0}, "with size=0"),
        ({"address": "somewhere"}, "address='somewhere' must be host:port; use for example 10.0.0.1:8476"),
        ({"address": "a:99999"}, "must be host:port"),
    ],
)
def test_wrong_arguments(named, words):
    with pytest.raises(TicketError, match=words):
        NetTicket.join(SCHEMA, **{"rank": 1, "size": 3, "address": "127.0.0.1:9", **named})
