"""The rows of a decode step: how many a slot runs, and which of their tokens count."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from widemesh.serving.decode_rows import DrawnRows, draw_rows, rows_of
from widemesh.serving.decode_state import DecodeState, JoinRow
from widemesh.serving.sampling import SamplingRows, Tally, full_mask, init_tally

V, K, SLOTS = 16, 4, 5
draw = jax.jit(draw_rows)


def ints(*values: Any) -> np.ndarray:
    return np.array(values, np.int32)


def state(drafts: list[list[int]], **changes: Any) -> DecodeState:
    """Slots whose newest token, 1, stands at position 10 of at most 100; no stop ids."""
    slots = len(drafts)
    idle = DecodeState.idle(slots, 3, len(drafts[0]))
    return dataclasses.replace(
        idle, token=np.full(slots, 1, np.int32), position=np.full(slots, 10, np.int32),
        last=np.full(slots, 100, np.int32), is_done=np.zeros(slots, bool),
        drafts=np.array(drafts, np.int32).reshape(slots, -1), **changes,
    )  # fmt: skip


def logits(drawn: list[list[int]]) -> jax.Array:
    """Of rows that draw these tokens, if nothing but the logits counts."""
    return jnp.asarray(10.0 * np.eye(V, dtype=np.float32)[np.array(drawn)])


def run(
    before: DecodeState, values: jax.Array, limit: int = K, sampling: SamplingRows | None = None,
    tally: Tally | None = None,
) -> tuple[DecodeState, Tally, DrawnRows, np.ndarray]:  # fmt: skip
    """`draw_rows` of what `rows_of` runs, and how many tokens count. Idle slots fill up to one size: one program."""
    slots, rows = values.shape[:2]
    given = before, tally or init_tally(slots, V), sampling or SamplingRows.neutral(slots)
    idle = DecodeState.idle(SLOTS, 3, rows - 1), init_tally(SLOTS, V), SamplingRows.neutral(SLOTS)
    before, tally, sampling = jax.tree.map(lambda some, all_: np.concatenate([some, all_[slots:]]), given, idle)
    values = jnp.concatenate([values, jnp.zeros((SLOTS - slots, rows, V))])
    _, length = rows_of(before, np.full(SLOTS, limit, np.int32))
    after, counted, drawn = draw(values, length, before, tally, sampling, full_mask(SLOTS, V))
    assert not np.asarray(drawn.runs)[:, slots:].any()
    after, counted = jax.tree.map(lambda x: x[:slots], (after, counted))
    drawn = jax.tree.map(lambda x: x[:, :slots], drawn)
    return after, counted, drawn, np.asarray(drawn.runs).sum(axis=0)


def test_rows_of_a_slot() -> None:
    """The newest token and the drafts in front of the first -1; at most `limit`, and none past the last position."""
    one = state([[5, 6, 7], [5, -1, -1], [-1, -1, -1], [5, 6, 7], [5, 6, 7], [5, 6, 7], [5, 6, 7]])
    one = dataclasses.replace(
        one, is_done=np.array([0, 0, 0, 0, 1, 0, 0], bool), last=ints(100, 100, 100, 12, 100, 10, 9)
    )
    tokens, length = rows_of(one, ints(4, 4, 4, 4, 4, 4, 4))
    assert tokens[:3].tolist() == [[1, 5, 6, 7], [1, 5, 0, 0], [1, 0, 0, 0]]
    assert length.tolist() == [4, 2, 1, 2, 0, 0, 0]
    assert rows_of(one, ints(0, 1, 2, 1, 3, 4, 4))[1].tolist() == [0, 1, 1, 1, 0, 0, 0]
    assert rows_of(one, ints(-1, -2, 1, 1, 1, 1, 1))[1].tolist() == [0, 0, 1, 1, 0, 0, 0]


def test_without_drafts_a_slot_runs_one_row() -> None:
    one = state([[], []])
    tokens, length = rows_of(one, ints(1, 0))
    assert tokens.tolist() == [[1], [1]] and length.tolist() == [1, 0]
    after, _, drawn, counts = run(one, logits([[7], [8]]), limit=1)
    assert drawn.tokens.shape == (1, 2) and counts.tolist() == [1, 1]
    assert after.token.tolist() == [7, 8] and after.position.tolist() == [11, 11]


def test_a_slot_that_joins_has_no_drafts() -> None:
    row = JoinRow(token=3, position=4, last=9, tail=ints(0, 1, 2), stop_token_ids=frozenset())
    after = jax.tree.map(jnp.asarray, state([[5, 6, 7], [5, 6, 7]])).join(jnp.array([1]), jnp.array(row.packed())[None])
    assert after.drafts.tolist() == [[5, 6, 7], [-1, -1, -1]]
    _, length = rows_of(after, ints(4, 4))
    assert length.tolist() == [4, 1]


def test_new_drafts_only_where_there_are_some() -> None:
    after = state([[5, 6, 7], [5, 6, 7]]).with_drafts(jnp.array([[1, 2, 3], [1, 2, 3]]), jnp.array([True, False]))
    assert after.drafts.tolist() == [[1, 2, 3], [5, 6, 7]]


def test_a_row_counts_if_the_one_before_has_drawn_its_token() -> None:
    """All, some, none; one that would fit behind a wrong one does not count; no draft, no row."""
    one = state([[5, 6, 7], [5, 9, 7], [9, 6, 7], [5, -1, -1], [-1, -1, -1]])
    after, tally, drawn, counts = run(one, logits([[5, 6, 7, 8]] * 5))
    assert counts.tolist() == [4, 2, 1, 2, 1]
    assert drawn.tokens.T.tolist() == [[5, 6, 7, 8]] * 5
    assert after.token.tolist() == [8, 6, 5, 6, 5]
    assert after.position.tolist() == [14, 12, 11, 12, 11]
    assert after.tail.tolist() == [[5, 6, 7], [-1, 1, 5], [-1, -1, 1], [-1, 1, 5], [-1, -1, 1]]
    wanted = [{5, 6, 7, 8}, {5, 6}, {5}, {5, 6}, {5}]
    assert [set(np.flatnonzero(row).tolist()) for row in np.asarray(tally.output)] == wanted
    assert not np.asarray(after.is_done).any()


def test_a_token_of_zero_is_no_missing_draft() -> None:
    """Behind a -1 there is none, though the rows of missing drafts run token 0."""
    one = state([[0, -1, -1], [-1, -1, -1]])
    assert run(one, logits([[0, 0, 0, 0]] * 2))[3].tolist() == [2, 1]


def test_a_stop_id_ends_the_slot_where_it_is_drawn() -> None:
    one = state([[5, 6, 7]] * 3)
    stops = np.array(one.stops)
    stops[0, 0], stops[1, 1], stops[2, 0] = 5, 6, 8
    after, _, _, counts = run(dataclasses.replace(one, stops=stops), logits([[5, 6, 7, 8]] * 3))
    assert counts.tolist() == [1, 2, 4] and after.is_done.tolist() == [True] * 3
    assert after.token.tolist() == [5, 6, 8]


def test_the_last_position_ends_the_slot() -> None:
    one = dataclasses.replace(state([[5, 6, 7]] * 4), last=ints(10, 11, 13, 14))
    after, _, _, counts = run(one, logits([[5, 6, 7, 8]] * 4))
    assert counts.tolist() == [0, 1, 3, 4]
    assert after.position.tolist() == [10, 11, 13, 14]
    assert after.is_done.tolist() == [False, True, True, True]  # the first has run nothing


@pytest.mark.parametrize("limit", [0, 1, 2])
def test_a_slot_that_may_run_fewer_rows(limit: int) -> None:
    """One that sits out is as it was, its drafts included."""
    before = state([[5, 6, 7]])
    after, tally, _, counts = run(before, logits([[5, 6, 7, 8]]), limit=limit)
    assert counts.tolist() == [limit] and int(np.asarray(tally.output).sum()) == limit
    if limit == 0:
        jax.tree.map(np.testing.assert_array_equal, after, before)


def test_logits_that_are_not_finite_matter_where_they_count() -> None:
    values = np.array(logits([[5, 6, 7, 8]] * 3))
    values[0, 2, 3], values[1, 1, 3], values[2, 3, 3] = np.nan, np.inf, np.nan
    _, _, drawn, counts = run(state([[9, 6, 7], [5, 9, 7], [5, 6, 7]]), jnp.asarray(values))
    assert np.asarray(drawn.finite).T.tolist()[0] == [True] * 4  # behind a wrong draft
    assert np.asarray(drawn.finite).T.tolist()[1] == [True, False, True, True]
    assert np.asarray(drawn.finite).T.tolist()[2] == [True, True, True, False]
    assert counts[0] == 1 and counts[2] == 4


def test_penalties_of_a_row_know_the_drafts_before_it() -> None:
    """Two tokens take turns, where each use takes off more than lies between them; rejected ones were never used."""
    neutral = SamplingRows.neutral(3)
    for changes in (
        {"frequency_penalty": np.full(3, 1.0, np.float32)},
        {"frequency_penalty": np.full(3, 0.5, np.float32), "presence_penalty": np.full(3, 0.5, np.float32)},
    ):
        both = np.zeros((3, K, V), np.float32)
        both[:, :, 5], both[:, :, 6] = 10.0, 9.7
        one = state([[5, 6, 5], [5, 5, 6], [6, 5, 6]])
        _, tally, drawn, counts = run(one, jnp.asarray(both), sampling=dataclasses.replace(neutral, **changes))
        assert counts.tolist() == [4, 2, 1]
        assert np.asarray(drawn.tokens)[:, 0].tolist() == [5, 6, 5, 6]
        assert np.asarray(tally.output)[:, 5].tolist() == [2, 1, 1]
        assert np.asarray(tally.output)[:, 6].tolist() == [2, 1, 0]


def test_a_warm_slot_draws_as_it_would_row_by_row() -> None:
    """The noise is that of each position: with right drafts, and with wrong ones, the tokens are the same."""
    values = jax.random.normal(jax.random.key(0), (1, K, V))
    warm = dataclasses.replace(
        SamplingRows.neutral(1), temperature=np.ones(1, np.float32), seed=np.array([7], np.uint32),
        top_k=ints(9), repetition_penalty=np.array([1.3], np.float32),
    )  # fmt: skip
    one, tally, single = state([[]]), None, []
    for row in range(K):
        one, tally, drawn, _ = run(one, values[:, row : row + 1], limit=1, sampling=warm, tally=tally)
        single.append(int(drawn.tokens[0, 0]))
    after, _, drawn, counts = run(state([single[:3]]), values, sampling=warm)
    assert counts.tolist() == [4] and drawn.tokens[:, 0].tolist() == single
    assert (after.token.tolist(), after.position.tolist()) == (one.token.tolist(), one.position.tolist())
    half = [single[0], (single[1] + 1) % V, single[2]]
    _, _, drawn, counts = run(state([half]), values, sampling=warm)
    assert counts.tolist() == [2] and drawn.tokens[:2, 0].tolist() == single[:2]


def test_min_tokens_counts_positions_of_rows() -> None:
    """A stop id may not stand before `first_stop`, whichever row reaches it."""
    sampling = dataclasses.replace(SamplingRows.neutral(1), first_stop=ints(13))
    stops = np.array(sampling.stop_ids)
    stops[0, 0] = 8
    values = np.zeros((1, K, V), np.float32)
    values[:, :, 8], values[:, :, 5] = 10.0, 9.0
    one = state([[5, 5, 5]])
    one = dataclasses.replace(one, stops=np.array(stops))
    after, _, drawn, counts = run(one, jnp.asarray(values), sampling=dataclasses.replace(sampling, stop_ids=stops))
    assert counts.tolist() == [3] and drawn.tokens[:3, 0].tolist() == [5, 5, 8] and after.is_done.tolist() == [True]
