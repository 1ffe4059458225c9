"""Settings that must not change a token: batch, prefixes, chunks, pages, overlap, dispatches, meshes, preemption."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from widemesh.model.forward import ForwardModel
from widemesh.model.numerics import numerics_named
from widemesh.serving import Engine, EngineConfig, FinishReason, loop
from widemesh.tools.init_tiny import write_tiny


def _beside(name: str):
    """A module beside this file; tests are imported without a path of their own."""
    spec = importlib.util.spec_from_file_location(f"widemesh_test_{name}", Path(__file__).parent / f"{name}.py")
    module = sys.modules.setdefault(spec.name, importlib.util.module_from_spec(spec))
    spec.loader.exec_module(module)
    return module


harness, near_ties, injected = _beside("invariance"), _beside("near_ties"), _beside("injected_drafts")

OPERATIONS = 500
FIXED_SEED = 20
BASE = {"max_model_len": 32, "max_num_seqs": 4, "max_num_batched_tokens": 16, "prefill_devices": 1,
        "decode_devices": 1, "page_size": 4, "numerics": "plain", "replay_prefix": "exact",
        "replay_tail": "full"}  # fmt: skip
# What is changed, one pair of settings each.
VARIANTS = {
    "one request at a time": {"max_num_seqs": 1},
    "no overlap": {},
    "chunks of 3 rows": {"max_num_batched_tokens": 3},
    "chunks of one page and a row": {"max_num_batched_tokens": 5},
    "pages of 2 tokens": {"page_size": 2},
    "pages of 16 tokens": {"page_size": 16},
    "few prefill pages: prefixes are evicted": {"num_prefill_pages": 10},
    "few pages: preemptions": {"num_pages": 13, "reserve_output_tokens": 1},
    "four tokens a dispatch": {"decode_steps": 4},
    "eight tokens a dispatch, more than any output": {"decode_steps": 8},
    "two prefill and two decode devices": {"prefill_devices": 2, "decode_devices": 2, "max_num_batched_tokens": 32},
    "two each, a ragged exchange, sums in order of experts": {
        "prefill_devices": 2, "decode_devices": 2, "max_num_batched_tokens": 32, "exchange": "ragged",
        "batch_invariant": True,
    },
    "one draft": {"num_speculative_tokens": 1},
    "two drafts, two prefill and two decode devices": {
        "num_speculative_tokens": 2, "prefill_devices": 2, "decode_devices": 2, "max_num_batched_tokens": 32,
    },
    "three drafts, few pages: preemptions": {
        "num_speculative_tokens": 3, "num_pages": 13, "reserve_output_tokens": 1,
    },
}
# Their programs take 30 to 40 s to compile; test_speculation.py has drafts on a smaller model.
SLOW = ("two each, a ragged exchange, sums in order of experts", "one draft",
        "two drafts, two prefill and two decode devices", "three drafts, few pages: preemptions")  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    write_tiny(folder, preset="tiny-structure", seed=0, form="quantized")
    return folder


@pytest.fixture(scope="module")
def workloads(folder: Path) -> list:
    """One that is always the same and one that is new every time."""
    fresh = int(os.environ["WIDEMESH_TEST_SEED"])  # printed in the header of the run
    sizes = {"vocab": 120, "longest_prompt": 22, "longest_output": 7, "image_id": -1}
    return [harness.Workload.draw(seed, OPERATIONS // 2, **sizes) for seed in (FIXED_SEED, fresh)]


@pytest.fixture(scope="module")
def reference(folder: Path, workloads: list) -> Iterator[list]:
    with Engine(EngineConfig(model=str(folder), **BASE)) as engine:
        yield [harness.run(engine, workload) for workload in workloads]


@pytest.fixture(scope="module")
def closest_choice(folder: Path) -> Callable:
    return functools.partial(near_ties.closest_choice, ForwardModel.load(folder, numerics_named("plain", "cpu")))


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in VARIANTS])
def test_same_tokens(
    folder: Path, workloads: list, reference: list, closest_choice: Callable, name: str, monkeypatch
) -> None:
    if name == "no overlap":
        monkeypatch.setattr(loop, "_STEPS_IN_FLIGHT", 1)
    with injected.injecting() if "draft" in name else contextlib.nullcontext():
        engine = Engine(EngineConfig(model=str(folder), **BASE | VARIANTS[name]))
    with engine:
        for workload, wanted in zip(workloads, reference, strict=True):
            if "draft" in name:
                injected.set_drafts(engine, harness.known_tokens(workload, wanted), wrong=0.1, seed=workload.seed)
            compared = harness.compare(workload, wanted, harness.run(engine, workload), closest_choice)
            assert compared > OPERATIONS // 4
        scheduler = engine._loop._scheduler
        if "preemptions" in name:
            assert scheduler.num_preemptions > 0
        assert scheduler.prefill.hit_tokens > 0
        if "draft" in name:
            figures = engine.metrics.speculation
            assert (figures.accepted > 0).all() and figures.accepted_tokens < figures.tried_tokens * 0.9


def test_a_wrong_token_is_found(workloads: list, reference: list, closest_choice: Callable) -> None:
    workload, outcomes = workloads[0], reference[0]  # the fixed one: whether a tie hides the change is known
    changed = copy.deepcopy(outcomes)
    name = next(name for name, one in changed.items() if one.reason is FinishReason.LENGTH and len(one.tokens) > 3)
    changed[name].tokens[2] += 1
    with pytest.raises(AssertionError, match=rf"^{name} of seed .*closest: Choice\("):
        harness.compare(workload, outcomes, changed, closest_choice)
    changed = copy.deepcopy(outcomes)
    changed[name].tokens.pop()
    with pytest.raises(AssertionError, match=f"^{name} of seed "):
        harness.compare(workload, outcomes, changed, closest_choice)


def test_a_near_tie_is_found(closest_choice: Callable) -> None:
    """A list on which one slot and four chose different experts in the last row; without that row there is no tie."""
    prompt = [26, 9, 88, 26, 28, 102, 63, 83, 86, 4, 6, 50, 45, 11, 117, 105, 43, 86, 48, 65, 86, 45, 77, 125, 104]
    choice = closest_choice(prompt)
    assert (choice.name, choice.row) == ("layers.2.ffn.router_logits", 24) and choice.margin < 2e-6
    assert closest_choice(prompt[:-1]).margin > 1e-3
