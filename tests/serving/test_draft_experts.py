"""The draft's experts beside the target's: other numbers of them, placements and controllers of their own."""

from __future__ import annotations

import importlib.util
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from widemesh.eplb import EplbConfig, initial_placement
from widemesh.eplb.placement_file import dump_placement
from widemesh.model.checkpoint import Checkpoint
from widemesh.model.checkpoint.table import tensor_table
from widemesh.model.config import ConfigError
from widemesh.model.forward import load_engram_hash
from widemesh.model.presets import PRESETS
from widemesh.serving import Engine, EngineConfig, SamplingParams
from widemesh.serving.device import DeviceEngine
from widemesh.serving.expert_control import EplbPaused
from widemesh.serving.expert_models import DRAFT, MODEL_NAMES, TARGET
from widemesh.sharding import make_meshes


def _beside(name: str):
    """A module beside this file; tests are imported without a path of their own."""
    spec = importlib.util.spec_from_file_location(f"widemesh_test_{name}", Path(__file__).parent / f"{name}.py")
    module = sys.modules.setdefault(spec.name, importlib.util.module_from_spec(spec))
    spec.loader.exec_module(module)
    return module


models, tags = _beside("reshuffle_model"), _beside("expert_tags")

WAIT_S, RANKS, DRAFTS = 60, 4, 2
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
PROMPTS = [np.random.default_rng(4).integers(3, 400, length).astype(np.int32) for length in (9, 1, 14, 5)]
FIELDS = ("expert_placement", "draft_expert_placement")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two checkpoints of one structure, with drafts."""
    parent = tmp_path_factory.mktemp("drafts")
    return [models.write_model(parent / str(seed), models.SHORT_WITH_DRAFT, seed) for seed in (0, 1)]


def config_of(folder: Path, **settings: Any) -> EngineConfig:
    """20 slots for 16 experts, and 12 for the 8 of the draft; nothing is planned unless it is asked for."""
    each: dict[str, Any] = {"step_interval": 100_000, "min_gain": 0.0, "layer_deadline_s": float(WAIT_S)}
    return EngineConfig(
        model=str(folder), numerics="plain", max_model_len=32, max_num_seqs=4, max_num_batched_tokens=8, page_size=4,
        prefill_devices=1, decode_devices=RANKS, replay_prefix="exact", replay_tail="full", batch_invariant=True,
        **{"num_speculative_tokens": DRAFTS, "enable_eplb": True,
           "eplb": EplbConfig(num_redundant_experts=4, window_size=8, **each),
           "draft_eplb": EplbConfig(num_redundant_experts=4, window_size=5, **each), **settings},
    )  # fmt: skip


@pytest.fixture(scope="module")
def given(folders: list[Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, np.ndarray]]:
    """By field: the file of a placement that is not the first one, and what it holds."""
    folder, found = tmp_path_factory.mktemp("placements"), {}
    layouts = config_of(folders[0]).expert_layouts(models.SHORT_WITH_DRAFT.with_draft(DRAFTS))
    assert [(one.num_experts, one.num_slots, one.num_layers) for one in layouts] == [(16, 20, 2), (8, 12, 1)]
    for field, layout in zip(FIELDS, layouts, strict=True):
        owner = tags.any_placement(layout, initial_placement(layout), np.random.default_rng(6))
        (folder / field).write_text(dump_placement(owner, layout))
        found[field] = str(folder / field), owner
    return found


@pytest.fixture(scope="module")
def shared_engine(folders: list[Path], given: dict[str, tuple[str, np.ndarray]]) -> Iterator[Engine]:
    """Without programs for prompts' log-probabilities, a third of a start: no request here asks for any."""
    every = DeviceEngine._warm_up_runs
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeviceEngine, "_warm_up_runs", lambda self: (
            (name, run) for name, run in every(self) if not name.startswith("log-probabilities")))  # fmt: skip
        engine = Engine(config_of(folders[0], **{field: file for field, (file, _) in given.items()}))
    with engine:
        for control, (_, owner) in zip(controls(engine), given.values(), strict=True):
            np.testing.assert_array_equal(control.status().slot_owner, owner)
        yield engine


@pytest.fixture
def engine(shared_engine: Engine, folders: list[Path]) -> Iterator[Engine]:
    """Idle, with the weights of the first checkpoint. Afterwards every expert is where the placements say."""
    compiled = shared_engine.metrics._compiles.after_warm_up  # by a device that another test has opened
    yield shared_engine
    assert shared_engine.metrics._compiles.after_warm_up == compiled
    assert tags.Tags(folders[0], DRAFTS).problems(shared_engine.device.decode) == []


def controls(engine: Engine) -> tuple[Any, Any]:
    return engine.experts, engine.draft_experts


def tokens_of(engine: Engine) -> list[list[int]]:
    return [one.token_ids.tolist() for one in engine.generate(PROMPTS, GREEDY)]


def until(is_true: Callable[[], bool]) -> None:
    end_s = time.monotonic() + WAIT_S
    while not is_true():
        assert time.monotonic() < end_s
        time.sleep(0.002)


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    checkpoint = Checkpoint.open(folder, DRAFTS)
    return {name: checkpoint.read(name) for name in tensor_table(checkpoint.config)}


def committed(engine: Engine) -> list[int]:
    return [control.status().rebalances["committed"] for control in controls(engine)]


def move(control: Any, seed: int) -> None:
    """All layers to some other placement."""
    status, rng = control.status(), np.random.default_rng(seed)
    wanted = status.slot_owner
    while (wanted == status.slot_owner).all(axis=1).any():
        wanted = tags.any_placement(status.layout, wanted, rng)
    control.import_placement(wanted)


def test_an_engine_starts_with_other_numbers_of_experts_in_its_draft(engine: Engine, folders: list[Path]) -> None:
    """Each with rebalancing on, redundant experts, and a placement from a file."""
    statuses = [control.status() for control in controls(engine)]
    assert [one.model for one in statuses] == list(MODEL_NAMES)
    assert [(one.layout.num_experts, one.layout.num_slots) for one in statuses] == [(16, 20), (8, 12)]
    assert [one.phase for one in statuses] == ["idle", "idle"]
    assert tags.Tags(folders[0], DRAFTS).problems(engine.device.decode) == []


def test_each_models_rows_are_counted(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a request of six tokens, no draft of which is right; every row is sent to 4 experts, or to 2 of the draft."""
    dispatch, loads = engine.device.decode_step, []

    def dispatched(*args: Any, **kwargs: Any) -> Any:
        step = dispatch(*args, **kwargs)
        loads.append([np.asarray(load.last) for load in engine.device.expert_loads])
        return step

    monkeypatch.setattr(engine.device, "decode_step", dispatched)
    accepted = engine.metrics.speculation.accepted_tokens
    engine.generate(PROMPTS[0], GREEDY)
    assert engine.metrics.speculation.accepted_tokens == accepted
    target, draft = (np.sum([load[model].sum(axis=(0, 2)) for load in loads], axis=0) for model in (TARGET, DRAFT))
    # The first step has no drafts, the last ones no more than may still be drawn; behind the last token none is made.
    assert target.tolist() == [4 * (1 + 3 + 3 + 3 + 2 + 1)] * 2
    assert draft.tolist() == [2 * DRAFTS * 5]


def test_each_model_moves_by_itself(engine: Engine) -> None:
    wanted = tokens_of(engine)
    for mine, other in ((TARGET, DRAFT), (DRAFT, TARGET)):
        moved, still = controls(engine)[mine], controls(engine)[other]
        before, ended = still.status().slot_owner, committed(engine)
        rows = still.status().moved_rows
        move(moved, mine)
        until(lambda: moved.status().rebalances["committed"] > ended[mine])  # noqa: B023 - it is over by the next turn
        np.testing.assert_array_equal(still.status().slot_owner, before)
        assert (committed(engine)[other], still.status().moved_rows) == (ended[other], rows)
        assert tokens_of(engine) == wanted


def test_both_move_at_a_time_under_load(engine: Engine) -> None:
    """Plans from loads of their own, and imports; every request gets its tokens."""
    wanted, is_over, found = tokens_of(engine), threading.Event(), []

    def ask() -> None:
        while not is_over.is_set():
            found.append(tokens_of(engine))

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        for turn in range(2):
            before = committed(engine)
            for model, control in enumerate(controls(engine)):
                if turn:
                    move(control, 10 + model)
                else:
                    control.rebalance(4)
            until(lambda: all(a > b for a, b in zip(committed(engine), before, strict=True)))  # noqa: B023
            until(lambda: all(control.status().phase == "idle" for control in controls(engine)))
    finally:
        is_over.set()
        thread.join(WAIT_S)
    assert not thread.is_alive() and found and all(tokens == wanted for tokens in found)
    labels = [{sample.labels["model"] for sample in family.samples} for family in engine.metrics.collect()
              if family.name == "widemesh:eplb_rebalances"]  # fmt: skip
    assert labels == [set(MODEL_NAMES)]


def test_each_model_is_paused_by_itself(engine: Engine) -> None:
    engine.draft_experts.pause()
    with pytest.raises(EplbPaused) as caught:
        engine.draft_experts.rebalance(1)
    assert str(caught.value) == "rebalancing is paused; run `widemesh experts resume --model draft` first"
    until(lambda: engine.draft_experts.status().is_paused)
    assert not engine.experts.status().is_paused
    ended = committed(engine)
    move(engine.experts, 20)  # so that a plan has something to gain
    until(lambda: committed(engine)[TARGET] == ended[TARGET] + 1)
    engine.experts.rebalance(1)
    tokens_of(engine)
    until(lambda: committed(engine)[TARGET] == ended[TARGET] + 2)
    assert committed(engine)[DRAFT] == ended[DRAFT]
    engine.draft_experts.resume()
    until(lambda: not engine.draft_experts.status().is_paused)


def test_new_weights_follow_both_placements(engine: Engine, folders: list[Path]) -> None:
    for model, control in enumerate(controls(engine)):
        ended = committed(engine)[model]
        move(control, 30 + model)
        until(lambda: committed(engine)[model] > ended)  # noqa: B023 - it is over by the next turn
    for folder in (folders[1], folders[0]):
        engine.update_weights(tensors_of(folder))
        assert tags.Tags(folder, DRAFTS).problems(engine.device.decode) == []


def test_new_weights_while_both_move(engine: Engine, folders: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of either model that were copied from the old weights are copied anew. The draft's layer has set out first:
    no other would while the target moves."""
    may_go, staged, ended = threading.Event(), ([], []), committed(engine)
    for model, control in reversed(list(enumerate(controls(engine)))):
        mover = engine._reshufflers[model]._mover

        def when_told(migration: Any, verify: Any = mover.verify, seen: list[int] = staged[model]) -> Any:
            found = verify(migration)
            seen.append(migration.layer)
            return SimpleNamespace(is_ready=lambda: may_go.is_set() and found.is_ready(), bad_rows=found.bad_rows)

        monkeypatch.setattr(mover, "verify", when_told)
        move(control, 40 + model)
        until(lambda seen=staged[model]: seen)
    engine.update_weights(tensors_of(folders[1]))
    assert staged == ([0], [0]) and committed(engine) == ended
    may_go.set()
    until(lambda: all(a > b for a, b in zip(committed(engine), ended, strict=True)))
    assert staged == ([0, 0, 1], [0, 0])
    assert tags.Tags(folders[1], DRAFTS).problems(engine.device.decode) == []
    engine.update_weights(tensors_of(folders[0]))


def test_without_rebalancing_both_start_from_files_and_only_status_answers(folders: list[Path], tmp_path: Path) -> None:
    """The arrays of an engine that has compiled nothing; the prefill mesh keeps expert e in slot e."""
    off: dict[str, Any] = {"enable_eplb": False, "eplb": EplbConfig(), "draft_eplb": EplbConfig()}
    owners = [np.random.default_rng(6).permutation(count).astype(np.int32) for count in (16, 8)]
    config = config_of(folders[0], **off)
    checkpoint = Checkpoint.open(folders[0], DRAFTS)
    for field, owner, layout in zip(FIELDS, owners, config.expert_layouts(checkpoint.config), strict=True):
        (tmp_path / field).write_text(dump_placement(np.tile(owner, (layout.num_layers, 1)), layout))
        off[field] = str(tmp_path / field)
    config = config_of(folders[0], **off)
    config.check_model(checkpoint.config)
    engram_hash = load_engram_hash(checkpoint.config, config.model)
    device = DeviceEngine(config, checkpoint, engram_hash, make_meshes(1, RANKS))
    for placed, owner in zip(device.decode.experts, owners, strict=True):
        assert (placed.slot_owner == owner).all()
    for placed in device.prefill.experts:
        assert (placed.slot_owner == initial_placement(placed.layout)).all()
    for state in (device.decode, device.prefill):
        assert tags.Tags(folders[0], DRAFTS).problems(state) == []


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"enable_eplb": True, "draft_eplb": EplbConfig(num_redundant_experts=8)},
         "draft_eplb.num_redundant_experts=8 needs a draft; set num_speculative_tokens, or use 0"),
        ({"draft_eplb": EplbConfig(num_redundant_experts=8), "num_speculative_tokens": 2},
         "draft_eplb.num_redundant_experts=8 needs enable_eplb; set it, or use 0"),
        ({"draft_expert_placement": "a.json"},
         "draft_expert_placement=a.json needs a draft; set num_speculative_tokens, or leave it out"),
    ],
)  # fmt: skip
def test_what_only_a_draft_can_have_needs_one(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**settings)
    assert str(caught.value) == sentence


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"draft_eplb": EplbConfig(num_redundant_experts=3), "enable_eplb": True},
         "draft_eplb.num_redundant_experts=3 does not suit num_experts=8 on 4 ranks with at most 4 copies of each; use "
         "0, 4, 8, 12, 16, ... or 24"),
        ({"draft_eplb": EplbConfig(slice_rows=3), "enable_eplb": True, "eplb": EplbConfig(slice_rows=4)},
         "draft_eplb.slice_rows=3 is more than the 2 expert slots that a rank has in a layer; use 1 to 2"),
        ({"draft_expert_placement": "/no/such"},
         "draft_expert_placement=/no/such cannot be read (No such file or directory); use a file made by `widemesh "
         "experts export`"),
        ({"prefill_devices": 16}, "prefill_devices=16 must divide the model's dspark_n_routed_experts=8; use "
         "prefill_devices=8"),
    ],
)  # fmt: skip
def test_what_does_not_suit_the_draft_is_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(num_speculative_tokens=2, **settings).check_model(PRESETS["tiny-mesh"])
    assert str(caught.value) == sentence


def test_a_placement_of_the_target_is_none_of_the_draft(given: dict[str, tuple[str, np.ndarray]], folders) -> None:
    file, _ = given["expert_placement"]
    with pytest.raises(ConfigError) as caught:
        config_of(folders[0], draft_expert_placement=file).check_model(models.SHORT_WITH_DRAFT)
    assert str(caught.value) == (f"{file} was made for num_layers=2; it must be 1: use a placement of a model with "
                                 "num_layers=1")  # fmt: skip
