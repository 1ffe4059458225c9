"""Functions for the engine's thread: run, answered, and refused at the end; none is ever left without an answer."""

from __future__ import annotations

import threading

import pytest

from widemesh.serving.engine_calls import EngineCalls, EngineError


def answers_of(calls: EngineCalls, functions):
    """What asking each of them from a thread of its own comes to."""
    found = {}

    def ask(place, function):
        try:
            found[place] = calls.ask(function)
        except Exception as err:
            found[place] = err

    threads = [threading.Thread(target=ask, args=pair, daemon=True) for pair in enumerate(functions)]
    for thread in threads:
        thread.start()
    return found, threads


def wait_for(threads):
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


def test_answers_and_errors_reach_those_who_ask():
    woken = threading.Semaphore(0)
    calls = EngineCalls(woken.release)
    found, threads = answers_of(calls, [lambda: 7, lambda: 1 // 0, lambda: None])
    for _ in range(3):
        assert woken.acquire(timeout=10)
    assert calls.are_waiting and not found
    calls.run()
    wait_for(threads)
    assert not calls.are_waiting
    assert found[0] == 7 and found[2] is None and isinstance(found[1], ZeroDivisionError)


def test_the_end_refuses_those_who_wait_and_those_who_come():
    woken = threading.Semaphore(0)
    calls = EngineCalls(woken.release)
    found, threads = answers_of(calls, [lambda: 7])
    assert woken.acquire(timeout=10)
    calls.end()
    wait_for(threads)
    assert isinstance(found[0], EngineError)
    with pytest.raises(EngineError, match="start a new one"):
        calls.ask(lambda: 7)


def test_many_askers_and_an_end_in_between():
    """Each gets its own answer or a refusal; nobody is left."""
    calls = EngineCalls(lambda: None)
    found, threads = answers_of(calls, [lambda i=i: i for i in range(50)])
    while len(found) < 25:
        calls.run()
    calls.end()
    wait_for(threads)
    assert len(found) == 50
    assert all(answer == place or isinstance(answer, EngineError) for place, answer in found.items())
