"""Counted bytes of exchanges: the closed forms beside the compiled programs, and what an engine exports."""

from __future__ import annotations

import dataclasses

import jax
import pytest
from prometheus_client import CollectorRegistry

from widemesh.model.config import ConfigError
from widemesh.model.loading import split_model
from widemesh.model.numerics import NUMERICS
from widemesh.model.presets import PRESETS
from widemesh.pallas_kernels.gpu.hlo import Program
from widemesh.serving import EngineConfig, SamplingParams
from widemesh.serving.abstract import AbstractArguments
from widemesh.serving.exchange_traffic import MeshTraffic
from widemesh.serving.programs import Programs
from widemesh.sharding import make_mesh
from widemesh.sharding.exchange import ragged_traffic

RANKS, SLOTS, CHUNK = 2, 3, 16
# A window layer with Engram, one source of each ratio, and a layer above them: two layers below the cut, two above.
SMALL = dataclasses.replace(
    PRESETS["tiny-structure"], num_hidden_layers=4, num_nextn_predict_layers=0, compress_ratios=(0, 2, 1, 1),
    kv_source_layer_ids=(1, 2), index_source_layer_ids=(1, 2), candidate_source_layer_id=2, engram_layer_ids=(0,),
    engram_num_embeddings=PRESETS["tiny-structure"].engram_num_embeddings[:1], dspark_target_layer_ids=(),
)  # fmt: skip


@pytest.fixture(scope="module")
def programs() -> Programs:
    return Programs(config=SMALL, numerics=NUMERICS["plain"], graph=split_model(SMALL)[0],
                    mesh=make_mesh(jax.devices()[:RANKS]), max_len=64)  # fmt: skip


def compiled_bytes(function, arguments) -> float:
    """What a program's collectives send between all ranks; a rank's own part of each does not travel."""
    found = Program(function.lower(*arguments).compile().as_text()).collectives()
    return sum(one.num_bytes for one in found) * (RANKS - 1)


@pytest.mark.parametrize("part", ["encode", "tail", pytest.param("logits", marks=pytest.mark.slow)])
def test_a_program_sends_what_the_closed_form_says(programs: Programs, part: str) -> None:
    abstract = AbstractArguments(programs=programs, slots=SLOTS if part == "logits" else 1, pages=20, page_size=4)
    if part == "encode":
        rows, found = CHUNK, compiled_bytes(programs.encode(CHUNK), abstract.prefill(CHUNK))
    elif part == "tail":
        rows, found = programs.tail_rows(CHUNK), compiled_bytes(programs.tail(CHUNK), abstract.tail(CHUNK))
        assert rows == programs.config.sliding_window < CHUNK
    else:
        rows, found = SLOTS, compiled_bytes(programs.decode(1), abstract.decode())
    assert found == MeshTraffic(programs).step(part, rows, valid=1)


def test_steps_add_up(programs: Programs) -> None:
    traffic, count = MeshTraffic(programs), programs.config.sliding_window
    assert traffic.step("logits", SLOTS, valid=7, times=4) == 4 * traffic.step("logits", SLOTS, valid=7)
    assert traffic.total == 0
    traffic.add("tail", count, valid=3)
    assert traffic.total == traffic.step("tail", count, valid=3)


def test_a_ragged_step_counts_its_valid_rows(programs: Programs) -> None:
    ragged = dataclasses.replace(programs, exchange="ragged", batch_invariant=True)
    traffic, depth = MeshTraffic(ragged), programs.config.num_hidden_layers
    one, none = (ragged_traffic(ragged.exchange_shape(rows)).total for rows in (1, 0))
    at_rest, moved = traffic.step("tail", SLOTS, valid=0), traffic.step("tail", SLOTS, valid=1000)
    layers = depth - 1 - programs.config.replay_cut
    assert at_rest == layers * RANKS * none
    assert moved - at_rest == pytest.approx(1000 * layers * (one - none), abs=1)


def test_an_unknown_exchange_is_one_sentence() -> None:
    with pytest.raises(ConfigError, match="exchange='rdma' is unknown; use one of auto, all_gather, ragged"):
        EngineConfig(exchange="rdma")


def test_an_engine_exports_what_its_steps_have_sent(engine) -> None:
    registry = CollectorRegistry()
    registry.register(engine.metrics)

    def exported(mesh: str) -> float:
        labels = {"model_name": engine.config.model, "engine": "0", "mesh": mesh}
        found = registry.get_sample_value("widemesh:exchange_bytes_total", labels)
        assert found is not None
        return found

    before = {mesh: exported(mesh) for mesh in ("prefill", "decode")}
    engine.generate([[5, 6, 7, 8, 9, 10]], SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))
    moved = {mesh: exported(mesh) - before[mesh] for mesh in before}
    prefill, decode = engine.device.prefill.traffic, engine.device.decode.traffic
    assert moved["prefill"] == prefill.step("prefill", 8, valid=5)  # one chunk
    steps, rest = divmod(moved["decode"], decode.step("logits", 1, valid=1))
    assert rest == 0 and steps in (4, 5)  # the last result comes when another step is on its way
