"""What goes wrong while experts move, and what may come in between: requests get the right tokens all the while."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from widemesh.eplb import EplbConfig, initial_placement
from widemesh.eplb.placement_file import dump_placement
from widemesh.model.checkpoint import Checkpoint
from widemesh.model.checkpoint.table import tensor_table
from widemesh.serving import Engine, EngineConfig, EngineError, FinishReason, SamplingParams
from widemesh.serving.expert_control import EplbBusy, EplbPaused
from widemesh.sharding.migrate import Staging


def _beside(name: str):
    """A module beside this file; tests are imported without a path of their own."""
    spec = importlib.util.spec_from_file_location(f"widemesh_test_{name}", Path(__file__).parent / f"{name}.py")
    module = sys.modules.setdefault(spec.name, importlib.util.module_from_spec(spec))
    spec.loader.exec_module(module)
    return module


models, tags = _beside("reshuffle_model"), _beside("expert_tags")

WAIT_S = 60
DEADLINE_S = 0.5  # for the rows of a layer
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
PROMPTS = [np.random.default_rng(4).integers(3, 400, length).astype(np.int32) for length in (9, 1, 14, 5, 3, 11)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two checkpoints of one structure."""
    parent = tmp_path_factory.mktemp("reshuffles")
    return [models.write_model(parent / str(seed), models.SHORT, seed) for seed in (0, 1)]


def open_engine(folder: Path, **settings: Any) -> Engine:
    """On four ranks with two slots each beside their experts; nothing is planned unless it is asked for."""
    eplb = EplbConfig(num_redundant_experts=8, window_size=8, step_interval=100_000, min_gain=0.0,
                      layer_deadline_s=DEADLINE_S, max_retries=2)  # fmt: skip
    return Engine(EngineConfig(
        model=str(folder), numerics="plain", max_model_len=32, max_num_seqs=4, max_num_batched_tokens=8, page_size=4,
        prefill_devices=1, decode_devices=4, replay_prefix="exact", replay_tail="full", batch_invariant=True,
        enable_eplb=True, eplb=eplb, **settings,
    ))  # fmt: skip


@pytest.fixture(scope="module")
def shared_engine(folders: list[Path]) -> Iterator[Engine]:
    with open_engine(folders[0]) as engine:
        yield engine


@pytest.fixture
def engine(shared_engine: Engine, folders: list[Path], wanted: list[list[list[int]]]) -> Iterator[Engine]:
    """Idle, with the weights of the first checkpoint. Afterwards every expert is where the placement says."""
    compiled = shared_engine.metrics._compiles.after_warm_up  # by the other engine's start
    yield shared_engine
    assert shared_engine.metrics._compiles.after_warm_up == compiled
    assert tags.Tags(folders[0]).problems(shared_engine.device.decode) == []


@pytest.fixture(scope="module")
def other(folders: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine that starts with the other weights and, from a file, with another placement."""
    config = EngineConfig(decode_devices=4, enable_eplb=True, eplb=EplbConfig(num_redundant_experts=8))
    layout = config.expert_layouts(models.SHORT)[0]
    owner = tags.any_placement(layout, initial_placement(layout), np.random.default_rng(6))
    file = tmp_path_factory.mktemp("placement") / "placement.json"
    file.write_text(dump_placement(owner, layout), encoding="utf-8")
    with open_engine(folders[1], expert_placement=str(file)) as engine:
        np.testing.assert_array_equal(engine.experts.status().slot_owner, owner)
        yield engine


@pytest.fixture(scope="module")
def wanted(shared_engine: Engine, other: Engine) -> list[list[list[int]]]:
    """Tokens with the weights of each checkpoint."""
    found = [tokens_of(engine) for engine in (shared_engine, other)]
    assert found[0] != found[1]
    return found


def tokens_of(engine: Engine) -> list[list[int]]:
    return [one.token_ids.tolist() for one in engine.generate(PROMPTS, GREEDY)]


@contextlib.contextmanager
def busy(engine: Engine, wanted: list[list[int]]) -> Iterator[None]:
    """Requests come and go meanwhile, and all get what they should."""
    is_over, wrong, rounds = threading.Event(), [], 0

    def ask() -> None:
        nonlocal rounds
        while not is_over.is_set():
            found, rounds = tokens_of(engine), rounds + 1
            if found != wanted:
                wrong.append(found)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join(WAIT_S)
    assert not thread.is_alive() and rounds and not wrong


def until(is_true: Callable[[], bool]) -> None:
    end_s = time.monotonic() + WAIT_S
    while not is_true():
        assert time.monotonic() < end_s
        time.sleep(0.002)


def ended(engine: Engine, result: str, do: Callable[[], None]) -> str:
    """Do it, and wait for a rebalance that ends so. Returns the last failure."""
    before = dict(engine.experts.status().rebalances)
    do()
    until(lambda: sum(engine.experts.status().rebalances.values()) > sum(before.values()))
    status = engine.experts.status()
    assert dict(status.rebalances) == before | {result: before[result] + 1}, status.last_failure
    assert status.phase == "idle"
    return status.last_failure


def move(engine: Engine, seed: int) -> None:
    """All layers to some other placement."""
    status, rng = engine.experts.status(), np.random.default_rng(seed)
    wanted = status.slot_owner
    while (wanted == status.slot_owner).all(axis=1).any():
        wanted = tags.any_placement(status.layout, wanted, rng)
    engine.experts.import_placement(wanted)


def counted(engine: Engine, result: str) -> float:
    """By the metrics."""
    (family,) = [one for one in engine.metrics.collect() if one.name == "widemesh:eplb_rebalances"]
    return sum(sample.value for sample in family.samples if sample.labels["result"] == result)


def mover_of(engine: Engine) -> Any:
    return engine._reshufflers[0]._mover  # type: ignore[union-attr]


def corrupt(engine: Engine, patch: pytest.MonkeyPatch) -> str:
    """A bit of a staged row is flipped before the comparison."""
    mover, verify = mover_of(engine), mover_of(engine).verify

    def flip(migration: Any) -> Any:
        staging = mover._staging
        rows = np.array(staging.rows["w3"])
        rows.view(np.uint32)[migration.transfers[0, 1], 3, 5] ^= 1
        changed = {**staging.rows, "w3": jax.device_put(rows, staging.rows["w3"].sharding)}
        mover._staging = Staging(rows=changed, checksums=staging.checksums)
        return verify(migration)

    patch.setattr(mover, "verify", flip)
    return r"rank 0: layer 0: 1 of \d+ copied rows differ from what was sent \(0 of 2 layers committed\)"


def never_arrive(engine: Engine, patch: pytest.MonkeyPatch) -> str:
    """The second layer's comparison is never done."""
    verify, silent = mover_of(engine).verify, SimpleNamespace(is_ready=lambda: False)
    patch.setattr(mover_of(engine), "verify", lambda migration: silent if migration.layer else verify(migration))
    return r"rank 0: layer 1: its rows were not there after 0.5 s \(1 of 2 layers committed\)"


def fail(engine: Engine, patch: pytest.MonkeyPatch, *, call: str) -> str:
    """The mover raises."""

    def raises(*given: Any) -> None:
        raise RuntimeError("out of memory")

    patch.setattr(mover_of(engine), call, raises)
    return r"rank 0: layer 0: out of memory \(0 of 2 layers committed\)"


FAILURES = {
    "a changed row": corrupt,
    "rows that never arrive": never_arrive,
    **{f"{call} fails": functools.partial(fail, call=call) for call in ("copy", "verify", "commit")},
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_failure_is_told_and_the_next_try_succeeds(engine, wanted, name, monkeypatch) -> None:
    before = counted(engine, "abandoned")
    with busy(engine, wanted[0]):
        with monkeypatch.context() as patch:
            reason = FAILURES[name](engine, patch)
            assert re.fullmatch(reason, ended(engine, "abandoned", lambda: move(engine, 1)))
        assert counted(engine, "abandoned") == before + 1
        committed = counted(engine, "committed")
        ended(engine, "committed", lambda: move(engine, 2))
        assert counted(engine, "committed") == committed + 1
    assert tokens_of(engine) == wanted[0]


def test_failures_in_a_row_switch_it_off_until_it_is_resumed(engine, wanted, monkeypatch) -> None:
    with monkeypatch.context() as patch, busy(engine, wanted[0]):
        fail(engine, patch, call="copy")
        for _ in range(3):
            assert not engine.experts.status().is_disabled
            ended(engine, "abandoned", lambda: move(engine, 3))
    assert engine.experts.status().is_disabled
    (family,) = [one for one in engine.metrics.collect() if one.name == "widemesh:eplb_disabled"]
    assert [sample.value for sample in family.samples] == [1]
    engine.experts.resume()
    until(lambda: not engine.experts.status().is_disabled)
    with busy(engine, wanted[0]):
        ended(engine, "committed", lambda: engine.experts.rebalance(2))


def test_a_planner_that_is_killed_costs_one_plan(engine, wanted) -> None:
    planner = engine._reshufflers[0]._planner
    with busy(engine, wanted[0]):
        ended(engine, "committed", lambda: move(engine, 4))
        ended(engine, "committed", lambda: engine.experts.rebalance(4))  # from random to even: its process runs now
        first = planner.pid
        os.kill(first, signal.SIGSTOP)

        def kill() -> None:
            engine.experts.rebalance(4)
            until(lambda: engine.experts.status().phase == "planning")
            with pytest.raises(EplbBusy):
                move(engine, 5)
            os.kill(first, signal.SIGKILL)

        assert ended(engine, "abandoned", kill) == "rank 0: the planner's process has ended: signal 9 (Killed)"
        ended(engine, "committed", lambda: move(engine, 6))
        ended(engine, "committed", lambda: engine.experts.rebalance(4))
        assert planner.pid != first


def test_pausing(engine, wanted) -> None:
    """No plans while paused; a placement may be imported all the same."""
    with busy(engine, wanted[0]):
        engine.experts.pause()
        until(lambda: engine.experts.status().is_paused)
        before = dict(engine.experts.status().rebalances)
        with pytest.raises(EplbPaused, match="rebalancing is paused; run `widemesh experts resume` first"):
            engine.experts.rebalance(1)
        seen = engine.stats().generated_tokens
        until(lambda: engine.stats().generated_tokens > seen + 200)
        status = engine.experts.status()
        assert (dict(status.rebalances), status.steps_to_trigger, status.phase) == (before, 0, "idle")
        ended(engine, "committed", lambda: move(engine, 7))
        engine.experts.resume()
        until(lambda: not engine.experts.status().is_paused)
        ended(engine, "committed", lambda: engine.experts.rebalance(4))


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    checkpoint = Checkpoint.open(folder)
    return {name: checkpoint.read(name) for name in tensor_table(checkpoint.config)}


@pytest.fixture
def restored(engine: Engine, folders: list[Path]) -> Iterator[None]:
    """Afterwards the first checkpoint's weights serve again."""
    yield
    engine.update_weights(tensors_of(folders[0]))


def test_new_weights_follow_the_placement(engine, restored, folders, wanted) -> None:
    ended(engine, "committed", lambda: move(engine, 8))
    for turn in (1, 0, 1):
        engine.update_weights(tensors_of(folders[turn]))
        assert tags.Tags(folders[turn]).problems(engine.device.decode) == []
        assert tokens_of(engine) == wanted[turn]


@pytest.mark.parametrize("moment", ["staged", "committing"])
def test_new_weights_while_experts_move(engine, restored, folders, wanted, moment, monkeypatch) -> None:
    """Rows that were copied from the old weights are copied anew; what is committed is of the new ones alone."""
    reshuffler, verify, may_go = engine._reshufflers[0], mover_of(engine).verify, threading.Event()
    staged: list[int] = []

    def when_told(migration: Any) -> Any:
        found = verify(migration)
        staged.append(migration.layer)
        return SimpleNamespace(is_ready=lambda: may_go.is_set() and found.is_ready(), bad_rows=found.bad_rows)

    def check_tokens_while_it_moves() -> None:
        move(engine, 9)
        until(lambda: bool(staged))
        tensors, laid_out = tensors_of(folders[1]), engine.device.decode.place
        if moment == "committing":  # rows are ready to be committed while the new weights are being laid out

            def place(*given: Any) -> Any:
                may_go.set()
                until(lambda: engine._loop.call(lambda: reshuffler._is_staged))
                status = engine.experts.status()
                found = laid_out(*given)
                assert tokens_of_one(engine) == wanted[0][0]  # steps are taken, but nothing is committed
                assert engine.experts.status().placement_hash == status.placement_hash
                return found

            patch.setattr(engine.device.decode, "place", place)
        engine.update_weights(tensors)
        if moment == "staged":
            assert (engine.experts.status().layers_done, staged) == (0, [0])
            may_go.set()

    with monkeypatch.context() as patch:
        patch.setattr(reshuffler, "_config", _patient(reshuffler._config))
        patch.setattr(mover_of(engine), "verify", when_told)
        ended(engine, "committed", check_tokens_while_it_moves)
    assert staged == [0, 0, 1]
    assert tags.Tags(folders[1]).problems(engine.device.decode) == []
    assert tokens_of(engine) == wanted[1]


def tokens_of_one(engine: Engine) -> list[int]:
    return engine.generate(PROMPTS[0], GREEDY)[0].token_ids.tolist()


def _patient(config: EplbConfig) -> EplbConfig:
    return dataclasses.replace(config, layer_deadline_s=WAIT_S)


def test_closing_while_experts_move(other: Engine, wanted, monkeypatch) -> None:
    """Last with this engine: requests end with `abort`, its planner and its thread are gone."""
    engine = other
    ended(engine, "committed", lambda: engine.experts.rebalance(1) or tokens_of(engine))
    pid = engine._reshufflers[0]._planner.pid
    never_arrive(engine, monkeypatch)
    monkeypatch.setattr(engine._reshufflers[0], "_config", _patient(engine._reshufflers[0]._config))
    done: list[Any] = []
    long = SamplingParams(temperature=0.0, max_tokens=31 - len(PROMPTS[0]), ignore_eos=True)
    asking = threading.Thread(target=lambda: done.extend(engine.generate([PROMPTS[0]] * 40, long)))
    asking.start()
    move(engine, 10)
    until(lambda: engine.experts.status().layers_done == 1)
    engine.close()
    asking.join(WAIT_S)
    assert len(done) == 40 and FinishReason.ABORT in {one.finish_reason for one in done}
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert not engine._loop._thread.is_alive()
    with pytest.raises(EngineError):
        engine.experts.status()
