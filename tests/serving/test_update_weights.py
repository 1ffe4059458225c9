"""New weights while serving: the right tokens before and after, and the version in each result."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from widemesh.model.checkpoint import Checkpoint
from widemesh.model.checkpoint.table import tensor_table
from widemesh.model.forward import ForwardModel
from widemesh.model.numerics import NUMERICS
from widemesh.serving import Engine, EngineConfig, EngineError, FinishReason, SamplingParams
from widemesh.serving.device import DecodeStep
from widemesh.tools.init_tiny import write_tiny

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
PROMPT = np.random.default_rng(0).integers(3, 120, 20).astype(np.int32)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two checkpoints of one structure."""
    made = [tmp_path_factory.mktemp(f"weights{seed}") for seed in (0, 1)]
    for seed, folder in enumerate(made):
        write_tiny(folder, preset="tiny-structure", seed=seed, form="quantized")
    return made


@pytest.fixture(scope="module")
def shared_engine(folders: list[Path]) -> Iterator[Engine]:
    config = EngineConfig(model=str(folders[0]), numerics="plain", max_model_len=64, max_num_seqs=2, page_size=4,
                          prefill_devices=1, decode_devices=1, max_num_batched_tokens=16, replay_prefix="exact",
                          replay_tail="full")  # fmt: skip
    with Engine(config) as engine:
        yield engine


@pytest.fixture
def engine(shared_engine: Engine, folders: list[Path]) -> Engine:
    """With the weights of the first checkpoint, whatever the test before has done."""
    shared_engine.update_weights(tensors_of(folders[0]))
    return shared_engine


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    checkpoint = Checkpoint.open(folder)
    return {name: checkpoint.read(name) for name in tensor_table(checkpoint.config)}


def greedy(folder: Path, count: int) -> list[int]:
    """By whole forwards."""
    model, ids = ForwardModel.load(folder, NUMERICS["plain"]), PROMPT
    for _ in range(count):
        ids = np.append(ids, model.logits(ids)[-1].argmax()).astype(np.int32)
    return ids[len(PROMPT) :].tolist()


def test_tokens_version_and_cache_follow_the_weights(engine: Engine, folders: list[Path]) -> None:
    wanted, version = [greedy(folder, 6) for folder in folders], engine.weights_version
    assert wanted[0] != wanted[1]
    compiled = engine.metrics._compiles.after_warm_up
    first, again = engine.generate([PROMPT, PROMPT], GREEDY)
    assert first.token_ids.tolist() == again.token_ids.tolist() == wanted[0]
    assert first.weights_version == version
    assert engine.generate(PROMPT, GREEDY)[0].cached_tokens > 0

    assert engine.update_weights(tensors_of(folders[1])) == engine.weights_version == version + 1
    after = engine.generate(PROMPT, GREEDY)[0]
    assert (after.token_ids.tolist(), after.weights_version, after.cached_tokens) == (wanted[1], version + 1, 0)
    assert engine.metrics._compiles.after_warm_up == compiled

    logits = engine.logits(PROMPT)
    np.testing.assert_allclose(logits, ForwardModel.load(folders[1], NUMERICS["plain"]).logits(PROMPT), atol=1e-5)
    assert engine.hidden_states(PROMPT).shape == (len(PROMPT), engine.model_config.hidden_size)


def test_a_part_of_the_tensors_is_enough(engine: Engine, folders: list[Path]) -> None:
    head = tensors_of(folders[0])["head.weight"]
    before = engine.logits(PROMPT)
    engine.update_weights({"head.weight": head * 2, "mtp.0.norm.weight": np.zeros(3)})
    np.testing.assert_allclose(engine.logits(PROMPT), before * 2, rtol=1e-6)


@pytest.mark.parametrize("how", ["finish", "abort"])
def test_requests_under_way(
    engine: Engine, folders: list[Path], how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They finish on the old weights, or are aborted; what waits starts on the new ones."""
    started, deltas, tensors, wait = threading.Event(), [], tensors_of(folders[1]), DecodeStep.wait
    monkeypatch.setattr(DecodeStep, "wait", lambda step: time.sleep(0.05) or wait(step))  # still running by then
    long = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)

    def deliver(delta) -> None:
        deltas.append(delta)
        started.set()

    version = engine.weights_version
    engine._submit(PROMPT, long, f"running to {how}", deliver, 0)
    assert started.wait(30)
    assert engine.update_weights(tensors, in_flight=how) == version + 1
    assert {delta.weights_version for delta in deltas} == {version}
    last = [delta for delta in deltas if delta.finish_reason is not None]
    assert [d.finish_reason for d in last] == [FinishReason.LENGTH if how == "finish" else FinishReason.ABORT]
    assert engine.generate(PROMPT, GREEDY)[0].token_ids.tolist() == greedy(folders[1], 6)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"head.weigth": np.zeros(3, np.float32)}, "tensor 'head.weigth' is not one of the model's"),
        ({"norm.weight": np.zeros(3, np.float32)}, r"tensor 'norm.weight' has shape \(3,\); give \(64,\)"),
        ({"norm.weight": np.zeros(64)}, "tensor 'norm.weight' has dtype float64; give float32 or bfloat16"),
    ],
)
def test_tensors_that_do_not_fit(engine: Engine, tensors: dict, message: str) -> None:
    version = engine.weights_version
    with pytest.raises(ValueError, match=message):
        engine.update_weights(tensors)
    with pytest.raises(ValueError, match="in_flight='later' is unknown"):
        engine.update_weights({}, in_flight="later")  # type: ignore[arg-type]
    assert engine.weights_version == version and engine.is_alive


def test_a_closed_engine(engine: Engine) -> None:
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        engine.update_weights({})
