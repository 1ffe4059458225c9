"""What a step's results mean for the requests that decode, all of them at once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from widemesh.serving.compile_counter import CompileCounter
from widemesh.serving.mailbox import Mailbox
from widemesh.serving.metrics import EngineMetrics, RequestTrace
from widemesh.serving.programs import ENDED, NOT_FINITE
from widemesh.serving.running_set import RunningSet
from widemesh.serving.scheduling import Accepted

SLOTS = 6


def request(slot: int, mailbox: Mailbox, *, constraint: Any = None, logprobs: int | None = None) -> Any:
    return SimpleNamespace(
        request_id=f"r{slot}", decode_slot=slot, mailbox=mailbox, constraint=constraint, cached_tokens=slot * 10,
        sampling=SimpleNamespace(logprobs=logprobs), trace=RequestTrace(prompt_tokens=3, arrived_s=90.0),
    )  # fmt: skip


def accepted(live: list[int], *, counts: dict[int, int] | None = None, at_limit: tuple[int, ...] = ()) -> Accepted:
    is_live = np.isin(np.arange(SLOTS), live)
    count = np.array([(counts or {}).get(slot, 1) for slot in range(SLOTS)]) * is_live
    return Accepted(
        is_live=is_live, tokens=np.arange(2 * SLOTS, dtype=np.int32).reshape(SLOTS, 2), counts=count,
        outputs_then=np.arange(SLOTS) + 100, is_at_limit=np.isin(np.arange(SLOTS), at_limit),
    )  # fmt: skip


class Seen(EngineMetrics):
    """Metrics that keep what they are told."""

    def __init__(self) -> None:
        super().__init__(model_name="tiny", max_model_len=64, compiles=CompileCounter())
        self.firsts: list[RequestTrace] = []
        self.later: list[tuple[float, int]] = []

    def first_token(self, trace: RequestTrace, now_s: float) -> None:
        super().first_token(trace, now_s)
        self.firsts.append(trace)

    def later_tokens(self, interval_s: float, times: int) -> None:
        super().later_tokens(interval_s, times)
        self.later.append((round(interval_s, 6), times))


@pytest.fixture
def boxes() -> tuple[Mailbox, Mailbox]:
    return Mailbox(lambda read: False), Mailbox(lambda read: False)


def test_which_slots_need_a_look(boxes):
    held = RunningSet(SLOTS)
    held.sync([request(0, boxes[0]), request(1, boxes[0], logprobs=0), request(2, boxes[0], constraint=object()),
               request(3, boxes[0]), request(4, boxes[0]), request(5, boxes[0])])  # fmt: skip
    nothing = np.zeros(SLOTS, np.int32)
    assert np.flatnonzero(held.to_look_at(accepted(list(range(6))), nothing)).tolist() == [1, 2]
    assert np.flatnonzero(held.to_look_at(accepted([0, 3]), nothing)).tolist() == []
    ends = np.array([ENDED, 0, 0, NOT_FINITE, 0, ENDED], np.int32)
    assert np.flatnonzero(held.to_look_at(accepted([0, 3, 4]), ends)).tolist() == [0, 3]  # 5 has left
    step = accepted([0, 3, 4], counts={4: 0}, at_limit=(3, 5))
    assert np.flatnonzero(held.to_look_at(step, nothing)).tolist() == [3, 4]


def test_each_mailbox_gets_one_letter_with_its_own(boxes):
    held = RunningSet(SLOTS)
    held.sync([request(0, boxes[0]), request(2, boxes[1]), request(3, boxes[0]), request(5, boxes[1])])
    step = accepted([0, 2, 3, 5], counts={3: 2})
    assert list(held.post(step, np.isin(np.arange(SLOTS), [0, 3, 5]), 7)) == list(boxes)
    read = [[(x.request.request_id, x.new, x.num_tokens, x.cached, x.version) for x in box.letters[0].letters()]
            for box in boxes]  # fmt: skip
    assert read == [[("r0", [0], 100, 0, 7), ("r3", [6, 7], 103, 30, 7)], [("r5", [10], 105, 50, 7)]]
    assert list(held.post(step, np.isin(np.arange(SLOTS), [2]), 7)) == [boxes[1]]
    assert [len(box.letters) for box in boxes] == [1, 2]
    assert list(held.post(step, np.zeros(SLOTS, bool), 7)) == []


def test_times_between_tokens(boxes):
    held, metrics = RunningSet(SLOTS), Seen()
    one, two, three = (request(slot, boxes[0]) for slot in (1, 2, 4))

    def got(*slots: int) -> np.ndarray:
        return np.isin(np.arange(SLOTS), slots)

    held.sync([one, two])
    held.note_times(got(1), 100.0, metrics)
    held.note_times(got(1, 2), 100.5, metrics)
    assert metrics.firsts == [one.trace, two.trace] and metrics.later == [(0.5, 1)]
    held.note_times(got(1, 2), 100.75, metrics)
    held.note_times(got(1, 2), 101.75, metrics)
    assert metrics.later[1:] == [(0.25, 2), (1.0, 2)]
    held.note_times(got(2), 102.0, metrics)
    held.note_times(got(), 102.1, metrics)
    held.note_times(got(1, 2), 103.75, metrics)
    assert metrics.later[3:] == [(0.25, 1), (2.0, 1), (1.75, 1)]

    assert held.sync([two, three]) and (one.trace.last_token_s, two.trace.last_token_s) == (103.75, 103.75)
    held.note_times(got(2, 4), 104.0, metrics)
    assert metrics.firsts[2:] == [three.trace] and metrics.later[6:] == [(0.25, 1)]
    held.note_times(got(2, 4), 105.0, metrics)
    assert two.trace.last_token_s == 103.75
    held.store_time(2, two)
    held.store_time(4, one)  # not its slot
    assert (two.trace.last_token_s, one.trace.last_token_s, three.trace.last_token_s) == (105.0, 103.75, 104.0)
    two.decode_slot = -1  # has left; the others go on
    held.note_times(got(4), 106.0, metrics)
    held.store_times()
    assert (two.trace.last_token_s, three.trace.last_token_s) == (105.0, 106.0)


def test_the_same_requests_are_taken_over_once(boxes):
    held, running = RunningSet(SLOTS), [request(0, boxes[0])]
    assert held.sync(running) and not held.sync(running) and held.sync(list(running))
