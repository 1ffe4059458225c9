"""When load is recorded and when a plan is due."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from widemesh.eplb import EplbConfig, LoadWindow
from widemesh.eplb.window import FIRST_ROW, NEXT_ROW, NOT_RECORDED

SMALL = EplbConfig(window_size=4, step_interval=12)


def _run(window, steps, *, is_migrating=False):
    return [window.step(is_migrating=is_migrating) for _ in range(steps)]


def test_first_trigger_after_a_quarter_then_one_per_interval():
    window = LoadWindow(EplbConfig())
    records = _run(window, 750 + 2 * 3000)
    triggers = [i + 1 for i, record in enumerate(records) if record.is_trigger]
    assert triggers == [750, 3750, 6750]
    assert [records[i - 1].window_rows for i in triggers] == [750, 1000, 1000]
    rows = np.array([record.ring_row for record in records])
    assert rows[:750].tolist() == list(range(750))
    assert (rows[750:2750] == -1).all() and rows[2750:3750].tolist() == list(range(1000))  # the last 1,000 only


def test_a_window_waits_until_nothing_moves():
    window = LoadWindow(SMALL)
    _run(window, 3)
    records = _run(window, 100, is_migrating=True)
    assert not any(record.is_trigger or record.ring_row >= 0 for record in records)
    assert window.since == 8  # where recording begins, and no further
    records = _run(window, 4)
    assert [record.ring_row for record in records] == [0, 1, 2, 3] and records[-1].window_rows == 4
    assert window.since == 0


def test_rows_of_an_earlier_placement_are_dropped():
    window = LoadWindow(SMALL)
    _run(window, 3)
    _run(window, 10)
    window.step(is_migrating=True)  # a placement is imported in the middle of a window
    assert window.num_recorded == 0 and window.since == 8
    assert [record.window_rows for record in _run(window, 4)] == [0, 0, 0, 4]


_EVENTS = ["step"] * 6 + ["moving", "committed", "abandoned", "ask", "pause"]


@settings(max_examples=50, deadline=None)
@given(events=st.lists(st.sampled_from(_EVENTS), max_size=80), size=st.integers(1, 6), more=st.integers(0, 9))
def test_the_counter_never_leaves_the_interval(events, size, more):
    """Whatever the migrations do, in any order: no run-away counter, no row outside the ring, no silent stop."""
    window = LoadWindow(EplbConfig(window_size=size, step_interval=size + more, max_retries=2))
    for doing in events:
        if doing == "committed":
            window.committed()
        elif doing == "abandoned":
            window.abandoned()
        elif doing == "ask":
            window.bring_forward(1 + len(events) % size)
        elif doing == "pause":
            window.pause()
            window.resume()
        else:
            record = window.step(is_migrating=doing == "moving")
            assert -1 <= record.ring_row < size and 0 <= record.window_rows <= size
        assert 0 <= window.since < window.interval <= 2 * (size + more) and window.num_recorded <= size
    window.resume()
    assert any(record.is_trigger for record in _run(window, window.interval))


def test_abandoned_migrations_wait_longer_each_time_and_then_for_good():
    window = LoadWindow(SMALL)
    waits = []
    for _ in range(3):
        window.abandoned()
        steps = 0
        while not window.step(is_migrating=False).is_trigger:
            steps += 1
        waits.append(steps + 1)
    assert waits == [12, 24, 48] and not window.is_disabled
    window.abandoned()
    assert window.is_disabled and not any(record.is_trigger for record in _run(window, 500))
    window.resume()
    assert not window.is_disabled and [r.is_trigger for r in _run(window, 12)].index(True) == 11


def test_once_disabled_it_stays_so_until_it_is_resumed():
    """Also when a placement that was imported meanwhile went well, and the next one did not."""
    window = LoadWindow(SMALL)
    for _ in range(4):
        window.abandoned()
    window.committed()
    window.abandoned()
    assert window.is_disabled and not any(record.is_trigger for record in _run(window, 500))
    window.resume()
    assert not window.is_disabled


def test_a_good_migration_ends_the_waiting():
    window = LoadWindow(SMALL)
    window.abandoned()
    window.abandoned()
    assert window.interval == 24
    window.committed()
    assert window.interval == 12 and window.num_abandoned == 0
    assert _run(window, 12)[-1].window_rows == 4


def test_a_plan_can_be_asked_for():
    window = LoadWindow(SMALL)
    _run(window, 2)
    window.bring_forward(2)
    assert [record.window_rows for record in _run(window, 2)] == [0, 2]
    assert [record.is_trigger for record in _run(window, 12)].index(True) == 11
    with pytest.raises(ValueError, match="steps=5 must be between 1 and window_size=4"):
        window.bring_forward(5)


def test_pausing_stops_recording_but_not_the_measuring():
    window = LoadWindow(EplbConfig(window_size=4, step_interval=12, log_balancedness_interval=3))
    _run(window, 2)
    window.pause()
    records = _run(window, 30)
    assert all(record.ring_row == -1 and not record.is_trigger for record in records)
    assert sum(record.is_log_due for record in records) == 10
    window.resume()
    assert [record.window_rows for record in _run(window, 3)] == [0, 0, 3]


def test_the_first_row_of_a_window_begins_the_ring_anew():
    window = LoadWindow(SMALL)
    codes = [record.code for record in _run(window, 12)]
    assert codes == [FIRST_ROW, *[NEXT_ROW] * 2, *[NOT_RECORDED] * 8, FIRST_ROW]


def test_balancedness_is_measured_every_hundred_steps():
    window = LoadWindow(EplbConfig())
    assert [i for i, record in enumerate(_run(window, 300), 1) if record.is_log_due] == [100, 200, 300]
