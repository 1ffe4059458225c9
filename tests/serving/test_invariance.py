"""Settings that must not change a token: batch, prefixes, chunks, pages, overlap, dispatches, meshes, preemption."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from widemesh.serving import Engine, EngineConfig, loop
from widemesh.tools.init_tiny import write_tiny


def _harness():
    """The module beside this file; tests are imported without a path of their own."""
    spec = importlib.util.spec_from_file_location("widemesh_test_invariance", Path(__file__).parent / "invariance.py")
    module = sys.modules.setdefault(spec.name, importlib.util.module_from_spec(spec))
    spec.loader.exec_module(module)
    return module


harness = _harness()

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
    "three tokens a dispatch": {"decode_steps": 3},
    "two prefill and two decode devices": {"prefill_devices": 2, "decode_devices": 2, "max_num_batched_tokens": 32},
}


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


@pytest.mark.parametrize("name", VARIANTS)
def test_same_tokens(folder: Path, workloads: list, reference: list, name: str, monkeypatch) -> None:
    if name == "no overlap":
        monkeypatch.setattr(loop, "_STEPS_IN_FLIGHT", 1)
    with Engine(EngineConfig(model=str(folder), **BASE | VARIANTS[name])) as engine:
        for workload, wanted in zip(workloads, reference, strict=True):
            compared = harness.compare(workload, wanted, harness.run(engine, workload))
            assert compared > OPERATIONS // 4
        scheduler = engine._loop._scheduler
        if "preemptions" in name:
            assert scheduler.num_preemptions > 0
        assert scheduler.prefill.hit_tokens > 0
