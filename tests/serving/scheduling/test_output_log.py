"""Tokens written down by step and read by slot."""

from __future__ import annotations

import numpy as np

from widemesh.serving.scheduling.output_log import OutputLog


def test_slots_read_what_is_theirs_whenever_they_ask() -> None:
    rng = np.random.default_rng(3)
    log = OutputLog(5, 3)
    expected: list[list[int]] = [[] for _ in range(5)]
    got: list[list[int]] = [[] for _ in range(5)]
    for step in range(300):
        if log.is_full:
            for slot in range(5):
                got[slot] += log.read(slot)
            log.clear()
        tokens, counts = rng.integers(0, 99, (5, 3)).astype(np.int32), rng.integers(0, 4, 5)
        log.add(tokens, counts)
        for slot in range(5):
            expected[slot] += tokens[slot, : counts[slot]].tolist()
        if step % 7 == 3:
            slot = int(rng.integers(5))
            got[slot] += log.read(slot)
            assert got[slot] == expected[slot] and log.read(slot) == []
    for slot in range(5):
        assert got[slot] + log.read(slot) == expected[slot]


def test_the_next_owner_of_a_slot_reads_nothing_of_the_last() -> None:
    log = OutputLog(2, 1)
    log.add(np.array([[7], [8]], np.int32), np.array([1, 1]))
    log.skip(0)
    log.add(np.array([[5], [6]], np.int32), np.array([1, 0]))
    assert log.read(0) == [5] and log.read(1) == [8]
