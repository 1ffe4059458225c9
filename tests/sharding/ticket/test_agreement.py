"""Ranks that need different things dispatch the same programs in the same order: else a collective hangs."""

from __future__ import annotations

from tests.sharding.ticket import exchange_ranks as ranks
from tests.sharding.ticket.launch import run


def test_ranks_with_different_needs_dispatch_the_same_programs():
    """Requests that are resolved at different steps, a rank without any, and one at its limit that wants no drafts."""
    size, steps = 5, 30
    results = run(ranks.dispatch_by_the_ticket, size, steps=steps, idle=3, full=1, never_ready=2)
    assert len({str(result) for result in results}) == 1
    programs = results[0]["programs"]
    assert sum(program.startswith("decode") for program in programs) == steps  # the idle rank takes part in all
    assert programs.count("draft") == steps / 3
    assert programs.count("load") == sum(any(step % (rank + 2) == 0 for rank in (0, 1, 2, 4)) for step in range(steps))
    assert results[0]["busy"] == [size - 1]


def test_a_rank_that_is_never_ready_is_found_by_all():
    for result in run(ranks.dispatch_by_the_ticket, 4, steps=5, idle=0, full=1, never_ready=2):
        assert "reshuffle" not in result["programs"] and result["not_ready"] == [2]
