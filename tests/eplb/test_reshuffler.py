"""Experts move while steps are taken: all processes alike, every layer served by a whole placement at every step."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import re
import signal
import sys
import threading
import time

import numpy as np
import pytest

from widemesh.eplb import (
    PAUSE,
    RESUME,
    TRIGGER,
    ChildPlanner,
    ReshuffleBusy,
    ReshufflePaused,
    balancedness,
    expected_slot_load,
    initial_placement,
    make_plan,
    plan_placement,
    trigger_after,
)

# --- a rebalance ------------------------------------------------------------------------------------------------------


def test_a_rebalance_reads_plans_and_moves_layer_by_layer(start, caplog, simulation):
    caplog.set_level(logging.INFO, "widemesh.eplb")
    job = start()
    assert job.run_to_end() == "committed"
    assert job.history[0] == ("read_window", 3)  # the first comes after a quarter of the interval
    moves = [call[:2] for call in job.history if call[0] not in ("read_window", "read_step")]
    order = [move for move, before in zip(moves, [None, *moves], strict=False) if move != before]
    layers = [layer for name, layer in order if name == "commit"]
    assert sorted(layers) == [0, 1, 2]
    assert order == [(name, layer) for layer in layers for name in ("copy", "verify", "commit")]
    status = job.first.status()
    assert status.moved_rows == status.least_rows > 0 and status.moved_bytes == 100 * status.moved_rows
    assert (status.phase, status.layers_total, status.last_failure) == ("idle", 0, "")
    plan, end = (record.getMessage() for record in caplog.records)
    rows = status.moved_rows
    found = re.fullmatch(r"target: rebalanced: balancedness expected (.*) -> (.*), measured before (.*), 3 layers, "
                         rf"{rows} rows moved \(least: {rows}\), 0\.\d s", end)  # fmt: skip
    owners = initial_placement(simulation.LAYOUT), job.first.slot_owner
    for said, owner in zip(found.groups()[:2], owners, strict=True):
        real = balancedness(expected_slot_load(job.popularity, owner), 8)
        assert float(said) == pytest.approx(real, abs=2e-3)
    assert float(found[2]) > 0.95 > float(found[1]) + 0.2
    assert plan == (f"target: balancedness {found[3]} measured in 3 steps; expected of their load in one sum: "
                    f"{found[1]} now, {found[2]} with the plan, at most 1.000 with num_redundant_experts=8; "
                    "num_redundant_experts=16 would allow 0.989")  # fmt: skip


def test_the_log_tells_what_was_measured_from_what_is_expected(start, caplog):
    """Steps are waited for one by one: what was measured is less than what the sum of their load would have."""
    caplog.set_level(logging.INFO, "widemesh.eplb")
    job = start()
    device = job.devices[0]
    device.read_window = lambda: _measured(device, 0.125)
    device.read_step = lambda: _measured(device, 0.25)  # of another step, before the plan is there
    job.planners[0]._looks = lambda: 9
    assert job.run_to_end() == "committed"
    plan, end = (record.getMessage() for record in caplog.records)
    assert plan.startswith("target: balancedness 0.125 measured in 3 steps; expected of their load in one sum: 0.")
    assert ", measured before 0.125, 3 layers" in end


def _measured(device, value):
    load = device._load(sum(load for _, load in device.ring))
    load._value = dataclasses.replace(load._value, balancedness=value)
    return load


def test_fewer_redundant_experts_are_no_improvement(start, caplog, simulation):
    caplog.set_level(logging.INFO, "widemesh.eplb")
    config = dataclasses.replace(simulation.CONFIG, num_redundant_experts=112)
    job = start(config, config.layout(num_layers=3, num_experts=16, ranks=8))
    job.run_until(lambda: job.first.status().phase == "planning")
    job.run(2)
    advice = caplog.records[0].getMessage().rsplit("; ", 1)[1]
    assert re.fullmatch(r"num_redundant_experts=\d\d? would do as well, with 0\.9\d\d", advice)


def test_what_is_shown_is_what_was_measured(start, simulation):
    heard = []

    class Listener:
        def balancedness(self, model, value, feasible):
            heard.append((model, round(value, 6), feasible))

        def rebalanced(self, model, result, rows, num_bytes):
            heard.append((model, result, rows, num_bytes))

        def layer_committed(self, model, seconds):
            heard.append((model, round(seconds, 6)))

        def disabled(self, model, is_disabled):
            heard.append((model, is_disabled))

    job = start(dataclasses.replace(simulation.CONFIG, step_interval=1000), listener=Listener(), model="draft")
    assert job.first.status().load_steps == 0
    job.first.request(trigger_after(3))
    job.run(5)
    shown = job.first.status()
    assert (shown.phase, shown.load_steps) == ("planning", 3)
    np.testing.assert_allclose(simulation.load_by_expert(job.first), 3 * job.popularity, atol=12)
    assert shown.balancedness == balancedness(shown.load, 8)
    assert job.run_to_end() == "committed"
    rows = job.first.status().moved_rows
    assert heard[-1] == ("draft", "committed", rows, 100 * rows)
    assert sum(len(one) == 2 and one[1] > 0 for one in heard) == 3  # layers
    job.run(10)
    shown = job.first.status()
    assert shown.load_steps == 1 and heard[-1] == ("draft", round(shown.balancedness, 6), pytest.approx(1.0, abs=0.1))
    assert shown.balancedness > 0.95 and shown.steps_to_trigger > 0


def test_load_of_other_slots_is_not_shown(start, simulation):
    """From a layer's commit on nothing is known, until a step that ran since has been read."""
    job = start(dataclasses.replace(simulation.CONFIG, step_interval=1000, log_balancedness_interval=1000))
    job.first.request(trigger_after(3))
    job.run_until(lambda: job.first.status().phase == "migrating")
    assert job.first.status().load_steps == 3
    measured = job.first.status().balancedness
    job.run_until(lambda: job.first.status().layers_done == 1)
    shown = job.first.status()
    assert shown.load_steps == 0 and not shown.load.any() and shown.load.shape == (3, 24)
    assert shown.balancedness == measured > 0  # as last measured


@pytest.mark.parametrize("looks", [0, 1, 30])
def test_a_reading_that_comes_after_a_commit_is_dropped(start, simulation, looks):
    """With steps read one after the other, each load that is shown was counted under the placement beside it."""
    job = start(dataclasses.replace(simulation.CONFIG, step_interval=1000, log_balancedness_interval=1))
    device, ran = job.devices[0], []
    read_step = device.read_step

    def read_slowly():
        reading = read_step()
        reading._looks = looks
        return reading

    device.read_step = read_slowly
    record = device.record
    device.record = lambda code, load: (ran.append((device.slot_owner, load)), record(code, load))
    job.first.import_placement(simulation.random_placement(job.rng, simulation.LAYOUT))
    seen = set()
    while job.ended() == 0 or job.num_steps < 100:
        job.step()
        shown = job.first.status()
        seen.add(shown.load_steps)
        if shown.load_steps:
            assert any(owner is shown.slot_owner and load is shown.load for owner, load in ran)
    assert 0 in seen


def test_a_plan_without_gain_moves_nothing_and_the_next_one_comes_in_time(start):
    job = start()
    assert [job.run_to_end(), job.run_to_end()] == ["committed", "skipped"]
    rows = job.first.status().moved_rows
    assert job.run_until(lambda: job.first.status().phase == "reading") <= 12
    job.popularity = job.draw_popularity()
    job.run_to_end()
    assert job.run_to_end() == "committed" and job.first.status().moved_rows > rows


@pytest.mark.parametrize("processes", [1, 2, 3, 4, 5])
def test_processes_move_the_same_layers_at_the_same_steps(start, processes, simulation):
    """Readings, plans and rows are ready at other times on each; `Job.step` checks everything else."""
    for seed in range(4):
        config = dataclasses.replace(simulation.CONFIG, slice_rows=1 + seed % 3)
        job = start(config, processes=processes, seed=seed, delays=6)
        for _ in range(5):
            job.popularity = job.draw_popularity()
            job.run_to_end()
        assert job.first.status().rebalances["committed"] >= 3
        assert job.first.status().rebalances["abandoned"] == 0


def test_a_step_without_decoding_moves_rows_and_is_not_counted(start):
    job = start()
    job.run(3)
    before = job.first._window.num_steps
    assert job.run_to_end(decodes=False) == "committed" and job.first._window.num_steps == before


# --- failures ---------------------------------------------------------------------------------------------------------


def _raise_in(*names):
    return lambda job, rank: job.devices[rank].raises.update(names)


def _get_stuck(job, rank):
    job.devices[rank].is_stuck, job.step_s = True, 0.1


def _corrupt(job, rank):
    for device in job.devices:  # what arrives wrong, arrives wrong in everybody's eyes
        device.corrupts = True


def _plan(trouble):
    def break_it(job, rank):
        job.planners[rank].trouble = trouble

    return break_it


def _plan_too_little(job, rank):
    plan = make_plan(job.popularity, job.first.slot_owner, job.layout, job.config)
    wrong = plan.slot_owner.copy()
    wrong[wrong == 3] = 4
    job.planners[rank].trouble = dataclasses.replace(plan, slot_owner=wrong)


def _heal(job):
    job.step_s = 0.01
    for device, planner in zip(job.devices, job.planners, strict=True):
        device.raises, device.is_stuck, device.corrupts, planner.trouble = set(), False, False, None
        planner._looks = device._looks


FAILURES = {
    "the planner raises": (_plan(ValueError("load is wrong")), "load is wrong"),
    "the plan leaves an expert out": (_plan_too_little, "the plan: no slot of layer 0 holds expert 3; every expert "),
    "the window is not read": (_raise_in("read_window"), "no read_window today"),
    "the load never comes": (_get_stuck, "the load of the window was not there after 5 s"),
    "a copy raises": (_raise_in("copy"), "layer 2: no copy today (0 of 3 layers committed)"),
    "a comparison raises": (_raise_in("verify"), "layer 2: no verify today (0 of 3 layers committed)"),
    "a row arrives wrong": (_corrupt, "layer 2: 1 of 15 copied rows differ from what was sent (0 of 3 layers "),
}  # fmt: skip


@pytest.mark.parametrize("name", FAILURES)
@pytest.mark.parametrize("processes", [1, 3])
def test_failure_gives_up_everywhere_and_the_next_trigger_tries_again(start, caplog, name, processes, simulation):
    breaks, reason = FAILURES[name]
    job = start(processes=processes)
    if processes > 1 and name == "the planner raises":
        job.planners[0]._looks = lambda: 10**6  # this one is still at it
    rank = 0 if name == "a row arrives wrong" else processes - 1  # all see that; the first is named
    breaks(job, rank)
    assert job.run_to_end() == "abandoned"
    for mine, one in enumerate(job.reshufflers):
        status = one.status()
        assert status.last_failure.startswith(f"rank {rank}: {reason if mine == rank else 'its log says why'}")
        assert status.phase == "idle" and not status.is_disabled and job.planners[mine].is_idle
    np.testing.assert_array_equal(job.first.slot_owner, initial_placement(simulation.LAYOUT))
    assert sum(record.levelno == logging.WARNING for record in caplog.records) == processes  # one line each
    assert "the next plan comes in 12 steps" in caplog.text
    _heal(job)
    steps = job.run_until(lambda: job.first.status().phase == "reading")
    assert 11 <= steps <= 12
    assert job.run_to_end() == "committed"


def test_rank_whose_rows_never_arrive_is_named_after_the_deadline(start):
    """All others are ready and wait for it: they notice nothing, it notices itself."""
    job = start(processes=3)
    job.run_until(lambda: job.first.status().phase == "migrating")
    job.run_until(lambda: job.first.status().layers_done == 1)
    job.devices[1].is_stuck, job.step_s = True, 0.1
    steps = job.num_steps
    assert job.run_to_end() == "abandoned"
    assert 48 <= job.num_steps - steps <= 70  # 5 s
    assert job.reshufflers[1].status().last_failure == (
        "rank 1: layer 1: its rows were not there after 5 s (1 of 3 layers committed)")  # fmt: skip
    assert job.first.status().last_failure == "rank 1: its log says why (1 of 3 layers committed)"
    before = job.first.slot_owner
    _heal(job)
    assert job.run_to_end() == "committed"  # on from the placement that was half-way
    assert (before != job.first.slot_owner).any(1).sum() <= 2


def test_commit_that_fails_leaves_weights_and_maps_as_they_were(start):
    job = start()
    job.devices[0].raises = {"commit"}
    before = job.first.slot_owner
    assert job.run_to_end() == "abandoned" and job.first.slot_owner is before
    assert "no commit today" in job.first.status().last_failure


def test_commit_that_fails_on_one_process_alone_shows_in_its_report(start):
    """That cannot be mended: the ticket refuses placements that differ."""
    job = start(processes=2)
    job.devices[1].raises = {"commit"}
    with pytest.raises(AssertionError):
        job.run_to_end()
    assert len({one.report().placement for one in job.reshufflers}) == 2 and job.reshufflers[1].report().fails


def test_failures_in_a_row_wait_longer_and_then_for_good(start, caplog):
    job = start(processes=2)
    job.planners[1].trouble = ValueError("no")
    waits = []
    for _ in range(3):
        assert job.run_to_end() == "abandoned"
        waits.append(job.run_until(lambda: job.first.status().phase == "reading"))
    assert [round(wait / 12) for wait in waits] == [1, 2, 4]
    assert job.run_to_end() == "abandoned" and all(one.status().is_disabled for one in job.reshufflers)
    assert "disabled until it is resumed" in caplog.records[-1].getMessage()
    calls = len(job.history)
    job.run(200)
    assert {call[0] for call in job.history[calls:]} == {"read_step"} and job.first.status().steps_to_trigger == 0
    job.planners[1].trouble = None
    job.reshufflers[1].request(RESUME)
    assert job.run_to_end() == "committed" and not job.first.status().is_disabled


def test_a_trigger_ends_the_wait_after_failures(start, simulation):
    job = start(dataclasses.replace(simulation.CONFIG, max_retries=0))
    job.planners[0].trouble = ValueError("no")
    assert job.run_to_end() == "abandoned" and job.first.status().is_disabled
    job.planners[0].trouble = None
    job.first.request(trigger_after(2))
    before = job.num_steps
    assert job.run_to_end() == "committed" and job.num_steps - before < 80


def _step_to_end(job):
    """Step beside a planner that takes its time. Returns the last failure."""
    ended = job.ended()
    deadline_s = time.monotonic() + 60
    while job.ended() == ended:
        assert time.monotonic() < deadline_s
        job.step()
        time.sleep(0.002 if job.first.phase == "planning" else 0)
    return job.first.status().last_failure


def test_planner_process_that_hangs_or_is_killed_costs_one_rebalance(start, simulation):
    config = dataclasses.replace(simulation.CONFIG, max_retries=9)
    heard = threading.Event()
    command = sys.executable, "-c", "import time; time.sleep(600)"
    hangs = ChildPlanner(simulation.LAYOUT, config, deadline_s=0.3, command=command)
    with contextlib.closing(hangs):
        assert _step_to_end(start(config, planners=[hangs])) == "rank 0: the planner had no plan after 0.3 s"
    planner = ChildPlanner(simulation.LAYOUT, config, on_answer=heard.set)
    job = start(config, planners=[planner])
    with contextlib.closing(job.first):
        assert not _step_to_end(job) and heard.is_set()
        job.popularity = job.draw_popularity()
        pid = planner.pid
        os.kill(pid, signal.SIGSTOP)
        job.run_until(lambda: job.first.status().phase == "planning")
        os.kill(pid, signal.SIGKILL)
        assert "signal 9 (Killed)" in _step_to_end(job)
        _step_to_end(job)
        assert job.first.status().rebalances == {"committed": 2, "skipped": 0, "abandoned": 1} and planner.pid != pid


@pytest.mark.parametrize("seed", range(4))
def test_whatever_happens_no_process_stops_rebalancing_for_good(start, simulation, seed):
    """Troubles, holds, new weights, commands and imports in any order, then none: the next trigger leads to a plan."""
    job = start(dataclasses.replace(simulation.CONFIG, layer_deadline_s=1.0), processes=1 + seed, delays=4, seed=seed)
    rng, held = job.rng, [0] * (1 + seed)

    def replace_weights():
        for one, device in zip(job.reshufflers, job.devices, strict=True):
            device.replace_weights()
            one.discard()

    def import_placement(rank):
        owners = [simulation.random_placement(np.random.default_rng(i), simulation.LAYOUT) for i in range(2)]
        with contextlib.suppress(ReshuffleBusy):
            for one in job.reshufflers[: int(rng.integers(1 + seed)) + 1]:
                one.import_placement(owners[int(rng.random() < 0.2)])

    def request(rank, what):
        with contextlib.suppress(ReshufflePaused):
            job.reshufflers[rank].request(what)

    def hold(rank):
        job.reshufflers[rank].hold()
        held[rank] += 1

    troubles = [lambda rank: _get_stuck(job, rank), lambda rank: _corrupt(job, rank), hold, import_placement,
                *(lambda rank, name=name: _raise_in(name)(job, rank) for name in ("read_window", "read_step", "copy")),
                lambda rank: _plan(ValueError("no"))(job, rank),
                *(lambda rank, what=what: request(rank, what) for what in (TRIGGER, PAUSE, RESUME, 5))]
    for _ in range(40):
        troubles[int(rng.integers(len(troubles)))](int(rng.integers(1 + seed)))
        job.run(int(rng.integers(1, 25)), decodes=rng.random() < 0.8)
        job.step(before_act=replace_weights if rng.random() < 0.3 else lambda: None)
        assert 0 <= job.first.status().steps_to_trigger <= 4 * 12
        if rng.random() < 0.5:
            _heal(job)
            for rank, one in enumerate(job.reshufflers):
                while held[rank]:
                    one.release()
                    held[rank] -= 1
    _heal(job)
    for rank, one in enumerate(job.reshufflers):
        for _ in range(held[rank]):
            one.release()
    job.run(200)
    job.reshufflers[-1].request(RESUME)
    job.popularity = job.draw_popularity()
    before = job.first.status().rebalances["committed"]
    job.run_until(lambda: job.first.status().rebalances["committed"] > before, limit=200)


# --- no steps ---------------------------------------------------------------------------------------------------------


def test_an_idle_engine_goes_on_without_spinning(start):
    """It steps while something moves or is on its way, not while a plan is made or it is held."""
    job = start(processes=2)
    assert not job.first.wants_step
    job.planners[0]._looks = lambda: 4
    job.run(3)
    assert job.first.status().phase == "reading" and job.first.wants_step
    while job.first.wants_step:
        job.step(decodes=False)
    assert job.first.status().phase == "planning" and job.num_steps <= 6
    assert [job.first.wants_step for _ in range(5)] == [False] * 4 + [True]
    job.first.hold()
    while any(one.wants_step for one in job.reshufflers):
        job.step(decodes=False)
    assert job.first.status().phase == "migrating" and job.num_steps < 100
    assert not job.first.report().staged and job.reshufflers[1].report().staged
    job.first.release()
    assert job.first.wants_step
    while any(one.wants_step for one in job.reshufflers):
        job.step(decodes=False)
    assert job.first.status().rebalances["committed"] == 1 and job.first.status().phase == "idle"


def test_time_without_steps_is_not_held_against_a_layer(start):
    job = start()
    job.run_until(lambda: job.first.status().phase == "migrating")
    for _ in range(3):  # an hour's rest, three times
        job.now_s += 3600
        job.step()
    assert job.run_to_end() == "committed" and job.first.status().rebalances["abandoned"] == 0


def test_an_idle_engine_moves_layers_that_have_no_row_to_wait_for(start):
    """Each is staged at once, in the step after the one before."""
    job = start()
    job.first.import_placement(job.first.slot_owner.reshape(3, 8, 3)[..., ::-1].reshape(3, 24))
    while job.first.wants_step:
        job.step(decodes=False)
    assert [call[0] for call in job.history] == ["commit"] * 3 and job.num_steps == 4
    assert job.first.status().rebalances["committed"] == 1 and job.first.status().moved_rows == 0


def test_rows_recorded_before_an_import_are_dropped(start, simulation):
    job = start()
    job.run(2)
    simulation.import_everywhere(job, simulation.random_placement(job.rng, simulation.LAYOUT))
    assert job.run_to_end(decodes=False) == "committed"
    job.run_until(lambda: job.first.status().phase == "planning")
    assert [call for call in job.history if call[0] == "read_window"] == [("read_window", 4)]


def test_a_good_rebalance_ends_the_longer_waits(start):
    job = start()
    job.planners[0].trouble = ValueError("no")
    assert [job.run_to_end(), job.run_to_end()] == ["abandoned"] * 2
    _heal(job)
    assert job.run_to_end() == "committed"
    job.planners[0].trouble = ValueError("no")
    assert job.run_to_end() == "abandoned" and job.first.status().steps_to_trigger <= 12


def test_news_is_told_once(start, simulation):
    job = start(processes=2)
    job.first.import_placement(plan_placement(job.popularity, simulation.LAYOUT))
    assert job.first.wants_step and not job.reshufflers[1].wants_step
    job.step(decodes=False)
    assert not job.first.wants_step and job.first.report().planned  # it is still true, but nobody must step to hear it
    job.first.request(PAUSE)
    assert job.first.wants_step
    job.step(decodes=False)
    assert not job.first.wants_step and job.first.report().command == 0


# --- weights are replaced ---------------------------------------------------------------------------------------------


def test_nothing_is_committed_while_one_process_is_held(start):
    job = start(processes=3, delays=3, seed=1)
    job.run_until(lambda: job.first.status().phase == "migrating")
    before = job.first.slot_owner
    job.reshufflers[2].hold()
    job.reshufflers[2].hold()
    job.step_s = 1.0
    job.run(100)
    job.reshufflers[2].release()
    job.run(3)
    assert job.first.slot_owner is before and job.first.status().rebalances["abandoned"] == 0
    job.reshufflers[2].release()
    job.run(3)
    assert job.first.slot_owner is not before and job.first.status().layers_done == 1


def test_rows_left_from_before_do_not_pass(start, simulation):
    """The same rows were staged before and lie there still, but the newer copies have been lost."""
    job = start(dataclasses.replace(simulation.CONFIG, step_interval=1000))
    (device,) = job.devices
    wanted = job.first.slot_owner.copy()
    wanted[1] = np.roll(wanted[1], 3)

    job.first.import_placement(wanted)
    job.run_until(lambda: job.first.report().staged)
    job.first.hold()
    device.loses = True
    job.first.discard()  # the weights are the same, as it happens
    job.first.release()
    assert job.run_to_end() == "abandoned"
    assert re.search("layer 1: [1-9].* of .* copied rows differ", job.first.status().last_failure)
    device.loses = True  # nor after a rebalance that was given up
    job.first.import_placement(wanted)
    assert job.run_to_end() == "abandoned" and "copied rows differ" in job.first.status().last_failure
    job.first.import_placement(wanted)
    assert job.run_to_end() == "committed"


@pytest.mark.parametrize("seed", range(6))
def test_rows_of_replaced_weights_are_never_committed(start, seed):
    job = start(processes=2, delays=2, seed=seed)
    job.run_until(lambda: job.first.status().phase == "migrating")

    def replace():
        for one, device in zip(job.reshufflers, job.devices, strict=True):
            device.replace_weights()
            one.discard()

    for _ in range(5):
        job.run(int(job.rng.integers(1, 12)))
        job.step(before_act=replace)  # even when all have just said that the layer is staged
    while job.ended() == 0:
        job.step()
    status = job.first.status()
    assert status.rebalances == {"committed": 1, "skipped": 0, "abandoned": 0}
    assert status.moved_rows >= status.least_rows


# --- many -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("redundant", [0, 8, 32])
def test_two_hundred_random_placements_one_after_the_other(start, simulation, redundant):
    """With failures in between, from which each next one goes on half-way. Tags are checked after every step."""
    config = dataclasses.replace(simulation.CONFIG, num_redundant_experts=redundant, slice_rows=2, max_retries=1000)
    job = start(config, config.layout(num_layers=2, num_experts=16, ranks=8), seed=redundant, delays=1)
    for device in job.devices:
        device.read_step = lambda: job.devices[0]._load(job.devices[0].last)
    for turn in range(200):
        job.run_until(lambda: job.first.phase == "idle", decodes=False)
        simulation.import_everywhere(job, simulation.random_placement(job.rng, job.layout))
        if turn % 10 == 5:
            for device in job.devices:
                device.corrupts = True
        job.run_to_end(decodes=turn % 3 > 0)
    results = job.first.status().rebalances
    assert results["committed"] >= 180 and results["abandoned"] == 20


def test_closing_ends_the_planner(start):
    job = start()
    job.first.close()
    assert job.planners[0].is_closed
