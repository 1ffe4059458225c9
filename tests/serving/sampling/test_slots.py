"""The host's rows of settings: written for the slots that change, and for no others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import numpy as np

from widemesh.serving.request import SamplingParams
from widemesh.serving.sampling import SamplingRows, SlotSettings
from widemesh.serving.sampling.rows import NO_ID

V = 50


class FakeRequest(SimpleNamespace):
    """Equal to itself alone, as requests are."""

    __eq__ = object.__eq__
    __hash__ = object.__hash__


def request(**settings: Any) -> Any:
    return FakeRequest(prompt=np.array([3, 4, 4], np.int32), output=[7, 7, 8], seed=-2, stop_token_ids={9, 1},
                       sampling=SamplingParams(**settings))  # fmt: skip


FULL = {
    "temperature": 0.5, "top_k": 3, "top_p": 0.5, "min_p": 0.25, "repetition_penalty": 2.0, "frequency_penalty": 0.5,
    "presence_penalty": -0.5, "logit_bias": {5: 1.5, 6: -2.0}, "min_tokens": 4, "logprobs": 2,
}  # fmt: skip


def test_every_setting_arrives_in_its_slot_and_leaves_with_its_request() -> None:
    settings = SlotSettings(4, V)
    neutral = SamplingRows.neutral(4)
    rows: Any
    rows, tallies = settings.sync([(2, 0, request(**FULL))])
    assert (rows.temperature[2], rows.top_k[2], rows.top_p[2], rows.min_p[2]) == (0.5, 3, 0.5, 0.25)
    assert (rows.repetition_penalty[2], rows.frequency_penalty[2], rows.presence_penalty[2]) == (2.0, 0.5, -0.5)
    assert (rows.seed[2], rows.logprobs[2], rows.first_stop[2]) == (2**32 - 2, 2, 7)
    assert rows.bias_ids[2, :3].tolist() == [5, 6, NO_ID] and rows.bias_values[2, :2].tolist() == [1.5, -2.0]
    assert rows.stop_ids[2, :3].tolist() == [1, 9, NO_ID]
    for array, off in zip(jax.tree.leaves(rows), jax.tree.leaves(neutral), strict=True):
        np.testing.assert_array_equal(np.delete(array, 2, 0), np.delete(off, 2, 0))
    (tally,) = tallies
    bits = np.unpackbits(tally.prompt.view(np.uint8), bitorder="little")
    assert (tally.slot, np.flatnonzero(bits).tolist()) == (2, [3, 4])
    assert {i: int(n) for i, n in enumerate(tally.output) if n} == {7: 2, 8: 1}
    empty, tallies = settings.sync([])
    assert tallies == []
    for array, off in zip(jax.tree.leaves(empty), jax.tree.leaves(neutral), strict=True):
        np.testing.assert_array_equal(array, off)


def test_the_same_rows_while_nothing_changes() -> None:
    settings, one, two = SlotSettings(2, V), request(**FULL), request(temperature=0.0)
    rows, tallies = settings.sync([(0, 0, one), (1, 0, two)])
    assert len(tallies) == 1
    again, tallies = settings.sync([(1, 0, two), (0, 0, one)])
    assert again is rows and tallies == []


def test_rows_that_were_handed_out_are_never_written() -> None:
    settings = SlotSettings(2, V)
    rows: Any
    rows, _ = settings.sync([(0, 0, request(**FULL))])
    before = jax.tree.map(np.copy, rows)
    settings.sync([(0, 0, request(temperature=0.0)), (1, 0, request())])
    for array, then in zip(jax.tree.leaves(rows), jax.tree.leaves(before), strict=True):
        np.testing.assert_array_equal(array, then)


def test_who_comes_back_to_its_slot_is_counted_anew() -> None:
    settings, one = SlotSettings(2, V), request(**FULL)
    settings.sync([(0, 0, one)])
    one.output.append(8)
    _, tallies = settings.sync([(0, 1, one)])
    assert [int(tally.output[8]) for tally in tallies] == [2]


def test_stop_ids_are_sent_only_to_be_held_back() -> None:
    rows: Any
    rows, _ = SlotSettings(1, V).sync([(0, 0, request())])
    assert (rows.stop_ids == NO_ID).all() and rows.first_stop[0] == 0
