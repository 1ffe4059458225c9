"""What is asked of a rebalance from outside: commands, imported placements; and two models that rebalance at once."""

from __future__ import annotations

import dataclasses
import logging

import numpy as np
import pytest

from widemesh.eplb import (
    PAUSE,
    RESUME,
    TRIGGER,
    EplbConfig,
    ReshuffleBusy,
    ReshufflePaused,
    hash_text,
    placement_hash,
    trigger_after,
)
from widemesh.model.config import ConfigError

# --- commands ---------------------------------------------------------------------------------------------------------


def test_commands_of_one_process_are_obeyed_by_all_at_one_step(start, caplog):
    job = start(EplbConfig(window_size=40, step_interval=1000, num_redundant_experts=8), processes=3)
    job.reshufflers[1].request(TRIGGER)
    job.run(1 + 32)  # the step in which it is heard is the first that is recorded
    assert all(one.status().phase in ("idle", "reading") for one in job.reshufflers)
    assert job.run_to_end() == "committed"
    assert [call for call in job.history if call[0] == "read_window"] == [("read_window", 32)]
    job.popularity = job.draw_popularity()
    job.reshufflers[2].request(trigger_after(5))
    assert job.run_to_end() == "committed" and ("read_window", 5) in job.history
    job.reshufflers[0].request(PAUSE)
    job.step()
    assert all(one.status().is_paused for one in job.reshufflers)
    with pytest.raises(ReshufflePaused, match="rebalancing is paused; resume it first"):
        job.reshufflers[0].request(TRIGGER)
    job.run(50)
    assert job.first.status().phase == "idle"
    job.reshufflers[2].request(RESUME)
    job.reshufflers[2].request(TRIGGER)  # it will not be paused then
    job.reshufflers[2].request(PAUSE)
    with pytest.raises(ReshufflePaused):  # it will be paused again
        job.reshufflers[2].request(trigger_after(3))
    job.run(3)
    assert all(one.status().is_paused for one in job.reshufflers)
    job.reshufflers[0].request(RESUME)
    job.step()
    assert not any(one.status().is_paused for one in job.reshufflers)


def test_commands_of_the_same_step_are_obeyed_one_after_the_other(start):
    job = start(processes=2)
    job.reshufflers[0].request(PAUSE)
    job.reshufflers[1].request(RESUME)
    job.step()
    assert not job.first.status().is_paused
    job.step()
    assert job.first.status().is_paused and not job.first.wants_step


def test_a_trigger_beside_another_process_pause_comes_to_nothing(start, caplog):
    job = start(processes=2)
    job.reshufflers[0].request(PAUSE)
    job.reshufflers[1].request(TRIGGER)
    job.run(50)
    assert job.first.status().phase == "idle" and "while rebalancing is paused; resume it first" in caplog.text


def test_a_trigger_while_experts_move_is_obeyed_after_it(start, simulation):
    job = start(dataclasses.replace(simulation.CONFIG, step_interval=1000))
    job.first.request(trigger_after(2))
    job.run_until(lambda: job.first.status().phase == "migrating")
    job.popularity = job.draw_popularity()
    job.first.request(trigger_after(3))
    assert [job.run_to_end(), job.run_to_end()] == ["committed", "committed"] and ("read_window", 3) in job.history


def test_what_is_under_way_when_rebalancing_is_paused_is_finished(start):
    job = start()
    job.run_until(lambda: job.first.status().phase == "migrating")
    job.first.request(PAUSE)
    assert job.run_to_end() == "committed"
    job.run(100)
    assert job.ended() == 1 and job.first.status().is_paused


def test_more_steps_than_a_window_has_are_refused(start):
    job = start()
    with pytest.raises(ConfigError, match="steps=5 must be 1 to 4, the window_size"):
        job.first.request(trigger_after(5))
    for wrong in (1.5, None, "1"):
        with pytest.raises(ConfigError, match=f"command={wrong!r} must be a whole number; use TRIGGER, PAUSE, RESUME"):
            job.first.request(wrong)
    assert job.first.report().command == 0
    with pytest.raises(ValueError, match="steps=0 must be at least 1"):
        trigger_after(0)


# --- imported placements ----------------------------------------------------------------------------------------------


def test_an_imported_placement_is_moved_to_when_all_have_it(start, simulation):
    job = start(dataclasses.replace(simulation.CONFIG, step_interval=1000), processes=3)
    wanted = simulation.random_placement(job.rng, simulation.LAYOUT)
    for one in job.reshufflers:
        assert job.first.phase == "idle"
        one.import_placement(wanted)
        job.run(2)
    assert job.first.status().phase == "migrating"
    with pytest.raises(ReshuffleBusy, match="the target model is migrating; import a placement when it is idle"):
        job.first.import_placement(wanted)
    assert job.run_to_end() == "committed"
    np.testing.assert_array_equal(job.first.slot_owner, wanted)
    assert not any(call[0] == "read_window" for call in job.history)
    simulation.import_everywhere(job, wanted)
    assert job.run_to_end() == "skipped"


def test_different_imports_are_given_up_with_both_hashes(start, simulation):
    job = start(dataclasses.replace(simulation.CONFIG, step_interval=1000), processes=3)
    a, b = (simulation.random_placement(job.rng, simulation.LAYOUT) for _ in range(2))
    for one, owner in zip(job.reshufflers, (a, a, b), strict=True):
        one.import_placement(owner)
    hashes = [one.report().plan_hash & 0xFFFFFFFF for one in job.reshufflers]
    assert job.run_to_end() == "abandoned"
    for one in job.reshufflers:
        assert one.status().last_failure == (
            f"rank 2: it would go to placement {hashes[2]:08x} and rank 0 to {hashes[0]:08x}")  # fmt: skip
    job.run(5)
    assert job.ended() == 1 and not job.first.report().planned  # that was it
    job.first.import_placement(a)
    job.run(2)
    simulation.import_everywhere(job, b)  # a mistake can be mended while not all have one
    assert job.run_to_end() == "committed"
    np.testing.assert_array_equal(job.first.slot_owner, b)


def test_an_import_that_waits_is_seen_and_can_be_withdrawn(start, simulation, caplog):
    caplog.set_level(logging.INFO, "widemesh.eplb")
    job = start(dataclasses.replace(simulation.CONFIG, step_interval=1000), processes=3)
    wanted = simulation.random_placement(job.rng, simulation.LAYOUT)
    for one in job.reshufflers[:2]:
        one.import_placement(wanted)
    job.run(5)
    found = [(one.status().phase, one.status().imported_hash) for one in job.reshufflers]
    assert found == [("waiting", placement_hash(wanted))] * 2 + [("idle", 0)]
    job.reshufflers[2].request(PAUSE)  # any of them
    job.step()
    assert [(one.status().phase, one.status().imported_hash) for one in job.reshufflers] == [("idle", 0)] * 3
    assert f"the imported placement {hash_text(placement_hash(wanted))} is withdrawn" in caplog.text
    job.reshufflers[2].import_placement(wanted)
    job.run(5)
    assert job.ended() == 0  # the others have none any more
    for one in job.reshufflers[:2]:
        one.import_placement(wanted)  # also while paused
    assert job.run_to_end() == "committed"
    assert [(one.status().phase, one.status().imported_hash) for one in job.reshufflers] == [("idle", 0)] * 3


def test_an_import_that_all_have_goes_on_though_one_pauses(start, simulation):
    job = start(processes=2)
    simulation.import_everywhere(job, simulation.random_placement(job.rng, simulation.LAYOUT))
    job.reshufflers[1].request(PAUSE)
    assert job.run_to_end() == "committed" and job.first.status().is_paused


def test_an_import_waits_for_a_rebalance_and_starts_from_its_end(start, simulation):
    job = start(processes=2)
    wanted = simulation.random_placement(job.rng, simulation.LAYOUT)
    job.first.import_placement(wanted)
    assert job.run_to_end() == "committed"
    assert (job.first.slot_owner != wanted).any()
    job.reshufflers[1].import_placement(wanted)
    assert job.run_to_end() == "committed"
    np.testing.assert_array_equal(job.first.slot_owner, wanted)


def test_a_placement_that_does_not_fit_is_refused(start):
    job = start()
    wrong = job.first.slot_owner.copy()
    wrong[wrong == 5] = 6
    with pytest.raises(ConfigError, match="no slot of layer 0 holds expert 5"):
        job.first.import_placement(wrong)
    with pytest.raises(ConfigError, match="has shape"):
        job.first.import_placement(wrong[:2])
    for wrong, words in ((None, "slot_owner is None; it must be an array"), ([[1]], r"has shape \(1, 1\)")):
        with pytest.raises(ConfigError, match=words):
            job.first.import_placement(wrong)


def test_lists_are_imported_as_well(start, simulation):
    job = start()
    wanted = simulation.random_placement(job.rng, simulation.LAYOUT)
    job.first.import_placement(wanted.tolist())
    assert job.run_to_end() == "committed"
    np.testing.assert_array_equal(job.first.slot_owner, wanted)


# --- two models -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("processes", [1, 3])
def test_target_and_draft_each_have_their_own(start, processes):
    """16 and 8 experts, 8 and 0 redundant, other windows. The draft's layers wait while the target's move."""
    config = EplbConfig(window_size=3, step_interval=9)
    target = start(processes=processes, seed=3, delays=3)
    draft = start(config, config.layout(num_layers=2, num_experts=8, ranks=4), processes=processes, seed=4, delays=3,
                  goes_after=target.reshufflers, model="draft")  # fmt: skip
    num_waited = 0
    for count in range(600):
        if count % 100 == 0:
            target.popularity, draft.popularity = target.draw_popularity(), draft.draw_popularity()
            target.first.request(TRIGGER)
            draft.first.request(TRIGGER)
        target.step()
        must_wait, sets_out = target.first.phase == "migrating", draft.first._move is None
        calls = [call[0] for call in draft.step()]
        if must_wait and (sets_out or "commit" in calls):
            assert "copy" not in calls
            num_waited += draft.first.phase == "migrating"
    for job in (target, draft):
        assert job.first.status().rebalances["committed"] >= 3 and job.first.status().rebalances["abandoned"] == 0
    assert num_waited > 10
