"""Letters from the engine's thread: in order, all of a step in one call, and never lost silently."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest

from widemesh.serving.mailbox import Letter, Mailbox, StepLetter, on_the_spot
from widemesh.serving.request import Delta, FinishReason
from widemesh.serving.scheduling import Accepted


@pytest.fixture
def got() -> list[Delta]:
    return []


def letter(got: list[Delta], name: str, new: list[int], reason: FinishReason | None = None) -> Letter:
    request = SimpleNamespace(request_id=name, prompt=range(7), stop_token_ids=frozenset({9}), deliver=got.append,
                              prompt_scores=None)  # fmt: skip
    return Letter(request, new, 10 + len(new), 4, 2, reason, None)  # type: ignore[arg-type]


def test_a_letter_becomes_a_delta(got):
    mailbox = on_the_spot()
    mailbox.letters.append(letter(got, "a", [5, 9], FinishReason.STOP))
    assert got == [] and mailbox.send() == []
    (delta,) = got
    assert (delta.request_id, delta.token_ids.tolist(), delta.token_ids.dtype) == ("a", [5, 9], "int32")
    assert (delta.prompt_tokens, delta.completion_tokens, delta.cached_tokens, delta.weights_version) == (7, 12, 4, 2)
    assert (delta.finish_reason, delta.matched_token_id, delta.logprobs) == (FinishReason.STOP, 9, None)


@pytest.mark.parametrize(
    ("new", "reason"), [([5, 9], None), ([9], FinishReason.LENGTH), ([5], FinishReason.STOP), ([], FinishReason.STOP)]
)
def test_only_a_stop_token_that_ended_it_is_matched(got, new, reason):
    mailbox = on_the_spot()
    mailbox.letters.append(letter(got, "a", new, reason))
    mailbox.send()
    assert got[0].matched_token_id is None and got[0].token_ids.tolist() == new


def test_one_call_carries_all_letters_in_order(got):
    calls = []
    mailbox = Mailbox(lambda read: calls.append(read) or True)
    for name in "abca":
        mailbox.letters.append(letter(got, name, [1]))
    mailbox.send()
    mailbox.letters.append(letter(got, "d", [2]))
    mailbox.send()
    assert len(calls) == 2 and got == []
    for read in calls:
        read()
    assert [delta.request_id for delta in got] == ["a", "b", "c", "a", "d"]
    assert mailbox.letters == []


def test_a_step_is_one_letter_for_many_requests(got):
    requests = tuple(letter(got, name, []).request for name in "ab")
    accepted = Accepted(
        is_live=np.ones(4, bool), tokens=np.arange(8, dtype=np.int32).reshape(4, 2), counts=np.array([1, 2, 2, 1]),
        outputs_then=np.array([8, 9, 10, 11]), steps_since=3, is_at_limit=np.zeros(4, bool),
    )  # fmt: skip
    step = StepLetter(requests, np.array([3, 1]), (4, 0), accepted, 2)
    mailbox = on_the_spot()
    mailbox.letters += [step, letter(got, "b", [9], FinishReason.STOP)]
    mailbox.send()
    assert [(d.request_id, d.token_ids.tolist(), d.completion_tokens, d.cached_tokens) for d in got] == [
        ("a", [6], 14, 4), ("b", [2, 3], 12, 0), ("b", [9], 11, 4)
    ]  # fmt: skip
    assert [(d.finish_reason, d.weights_version) for d in got] == [(None, 2), (None, 2), (FinishReason.STOP, 2)]
    unread = Mailbox(lambda read: False)
    unread.letters.append(step)
    assert unread.send() == list(requests)


def test_requests_that_nobody_reads_come_back(got):
    mailbox = Mailbox(lambda read: False)
    letters = [letter(got, name, [1]) for name in "ab"]
    mailbox.letters.extend(letters)
    assert mailbox.send() == [letters[0].request, letters[1].request] and got == []
    assert mailbox.send() == []


def test_readers_of_one_loop_share_a_mailbox(engine):
    """And another loop has another, which is forgotten with it."""

    async def mailboxes():
        loop = asyncio.get_running_loop()
        return engine._mailbox_of(loop), engine._mailbox_of(loop)

    first, same = asyncio.run(mailboxes())
    other, _ = asyncio.run(mailboxes())
    assert first is same and first is not other
