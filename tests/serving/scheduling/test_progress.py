"""Tokens computed and steps in flight of each slot, kept as numbers while steps are alike."""

from __future__ import annotations

import numpy as np

from widemesh.serving.scheduling.progress import Progress

SLOTS = 5


def test_numbers_come_to_what_arrays_come_to() -> None:
    rng = np.random.default_rng(11)
    progress = Progress(SLOTS)
    computed, in_flight = np.zeros(SLOTS, np.int64), np.zeros(SLOTS, np.int64)
    groups = [rng.random(SLOTS) < 0.6 for _ in range(3)]
    active = groups[0]
    for _ in range(2000):
        match rng.integers(8):
            case 0:
                active = groups[rng.integers(3)]
            case 1:
                slot = rng.integers(SLOTS)
                progress.computed[slot] = computed[slot] = 7
            case 2:
                assert np.array_equal(progress.computed, computed)
                assert np.array_equal(progress.in_flight, in_flight)
            case 3 | 4:
                progress.plan(active)
                in_flight += active
            case _:
                before = computed.copy()
                steps = progress.settle(active)
                computed += active
                in_flight -= active
                if steps == 1:
                    assert np.array_equal(progress.computed_then, before)
                assert np.array_equal(progress.computed_then + steps * active, computed)
