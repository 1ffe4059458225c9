"""The control of a running engine's experts: what it asks of the reshuffler, and what it refuses in one sentence."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from widemesh.eplb import PAUSE, RESUME, TRIGGER, EplbConfig, Reshuffler, initial_placement, trigger_after
from widemesh.model.config import ConfigError
from widemesh.serving.expert_control import EplbBusy, EplbOff, EplbPaused, control_of
from widemesh.serving.live_experts import LiveExperts
from widemesh.serving.request import Status

CONFIG = EplbConfig(window_size=4, step_interval=12)
LAYOUT = CONFIG.layout(num_layers=2, num_experts=4, ranks=2)


@pytest.fixture
def reshuffler() -> Reshuffler:
    unused: Any = SimpleNamespace(row_bytes=1)
    return Reshuffler("target", LAYOUT, CONFIG, initial_placement(LAYOUT), unused, unused)


@pytest.fixture
def experts(reshuffler: Reshuffler) -> LiveExperts:
    return control(reshuffler)


def control(reshuffler: Reshuffler | None, model: str = "target") -> LiveExperts:
    """Between two steps of an engine that takes none."""
    loop: Any = SimpleNamespace(call=lambda function: function())
    placed: Any = SimpleNamespace(layout=LAYOUT, slot_owner=initial_placement(LAYOUT))
    return LiveExperts(model, loop, placed, reshuffler, CONFIG.window_size)


def test_a_plan_may_be_asked_for_without_a_number(experts: LiveExperts, reshuffler: Reshuffler) -> None:
    experts.rebalance()
    experts.rebalance(3)
    assert list(reshuffler._commands) == [TRIGGER, trigger_after(3)]


def test_a_plan_is_refused_while_paused(experts: LiveExperts, reshuffler: Reshuffler) -> None:
    """Also in the step in which the pause is asked for."""
    experts.pause()
    for steps in (None, 2):
        with pytest.raises(EplbPaused) as caught:
            experts.rebalance(steps)
        assert str(caught.value) == "rebalancing is paused; run `widemesh experts resume` first"
        assert caught.value.status is Status.FAILED_PRECONDITION
    experts.resume()
    experts.rebalance(2)
    assert list(reshuffler._commands) == [PAUSE, RESUME, trigger_after(2)]


@pytest.mark.parametrize("steps", [1.5, "3", 0, 5])
def test_what_is_no_number_of_steps_is_refused(experts: LiveExperts, reshuffler: Reshuffler, steps: Any) -> None:
    with pytest.raises(ConfigError, match=f"^steps={steps!r} must be .*; use .*, or leave it out"):
        experts.rebalance(steps)
    assert not reshuffler._commands


@pytest.mark.parametrize(("given", "words"), [
    (None, "slot_owner is None; it must be an array of whole numbers"),
    ([[1]], r"slot_owner has shape \(1, 1\); it must be \(2, 4\)"),
    ([[0, 1, 2, 3], [0, 1, 2, 3.5]], "slot_owner: slot 3 of layer 1 holds 3.5; it must hold an expert from 0 to 3"),
])  # fmt: skip
def test_what_is_no_placement_is_refused(experts: LiveExperts, given: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        experts.import_placement(given)
    assert experts.status().phase == "idle"


def test_an_imported_placement_waits_for_the_other_processes(experts: LiveExperts, reshuffler: Reshuffler) -> None:
    experts.import_placement([[3, 2, 1, 0]] * 2)  # type: ignore[arg-type]
    status = experts.status()
    assert (status.phase, status.imported_hash) == ("waiting", reshuffler.report().plan_hash)


def test_where_experts_stay_only_status_answers() -> None:
    for model in ("target", "draft"):
        fixed = control(None, model)
        status = fixed.status()
        assert (status.model, status.phase, status.load_steps) == (model, "off", 0)
        assert status.slot_owner.tolist() == [[0, 1, 2, 3]] * 2 and status.load.shape == (2, 4)
        for call in (fixed.rebalance, lambda: fixed.rebalance(-1), fixed.pause, fixed.resume,  # noqa: B023
                     lambda: fixed.import_placement([])):  # noqa: B023 # fmt: skip
            with pytest.raises(EplbOff) as caught:
                call()
            assert str(caught.value) == ("enable_eplb=False: experts stay where they are; start the server with "
                                         "--enable-eplb")  # fmt: skip


@pytest.mark.parametrize(("model", "flag"), [("target", ""), ("draft", " --model draft")])
def test_remedies_name_the_model(
    reshuffler: Reshuffler, model: str, flag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    experts = control(reshuffler, model)
    monkeypatch.setattr(reshuffler, "phase", "migrating")
    with pytest.raises(EplbBusy) as busy:
        experts.import_placement(initial_placement(LAYOUT))
    assert str(busy.value) == f"experts are moving already; wait until `widemesh experts show{flag}` says idle"
    assert busy.value.status is Status.ABORTED
    experts.pause()
    with pytest.raises(EplbPaused) as paused:
        experts.rebalance()
    assert str(paused.value) == f"rebalancing is paused; run `widemesh experts resume{flag}` first"


def test_a_control_is_found_by_the_name_of_its_model() -> None:
    target, draft = control(None), control(None, "draft")
    assert control_of("target", target, None) is control_of("target", target, draft) is target
    assert control_of("draft", target, draft) is draft
    for name, served, words in (("draft", None, "target"), ("x", None, "target"), ("x", draft, "target or draft")):
        with pytest.raises(ConfigError) as caught:
            control_of(name, target, served)
        assert str(caught.value) == f"model={name!r} is not served here; use {words}"
