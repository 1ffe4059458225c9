"""Step programs compiled for GPUs that are not there: the ones that the engine dispatches, every op with its kernel."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys

import pytest

from widemesh.model.presets import FLASH
from widemesh.pallas_kernels.gpu.toolchain import has_plugin
from widemesh.serving.ahead import step_programs

needs_aot = pytest.mark.skipif(not has_plugin(), reason="needs pip install 'widemesh[aot]'")

# Every kind of layer once and a draft of two, at the widths that the kernels are written for and few experts.
SMALL = dataclasses.replace(
    FLASH, hidden_size=512, moe_intermediate_size=256, num_hidden_layers=5, n_routed_experts=16,
    num_nextn_predict_layers=2, compress_ratios=(0, 0, 2, 1, 1, 0, 0), kv_source_layer_ids=(2, 3),
    index_source_layer_ids=(2, 3, 4), candidate_source_layer_id=3, engram_layer_ids=(1,),
    engram_num_embeddings=(384006168,), dspark_target_layer_ids=(3, 4), dspark_n_routed_experts=8,
)  # fmt: skip
CASES = [("decode", 5), pytest.param(("decode", 0), marks=pytest.mark.slow),
         pytest.param(("prefill", 5), marks=pytest.mark.slow)]  # fmt: skip


def test_they_are_what_the_engine_dispatches(engine) -> None:
    device, config = engine.device, engine.config
    (decode,) = step_programs(device.decode.programs, config, "decode")
    (prefill,) = step_programs(device.prefill.programs, config, "prefill")
    assert decode[1] is device._decode and prefill[1] is device._whole[config.chunk_rows]
    assert device.decode.programs.decode(config.decode_steps + 1) is not device._decode


def test_a_bounded_tail_is_two_programs(engine) -> None:
    programs, config = engine.device.prefill.programs, dataclasses.replace(engine.config, replay_tail="bounded")
    rows = config.chunk_rows
    encode, tail = step_programs(programs, config, "prefill")
    assert encode[:2] == ("encode", programs.encode(rows))
    assert tail[:2] == ("tail", programs.tail(rows))


@pytest.fixture(scope="module", params=CASES)
def checked(request, tmp_path_factory):
    """A run of `widemesh check` on the small model, in a process of its own: its role, drafts, output and last line."""
    role, drafts = request.param
    folder = tmp_path_factory.mktemp("small")
    (folder / "config.json").write_text(json.dumps(SMALL.to_json()))
    command = [sys.executable, "-m", "widemesh.tools.cli", "check", str(folder), "--target", "B200", "--devices", "4",
               "--role", role, "--slots", "16", "--max-model-len", "8192", "--chunk-rows", "256",
               "--drafts", str(drafts)]  # fmt: skip
    env = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=400)
    return role, drafts, done, json.loads(done.stdout.splitlines()[-1])


@needs_aot
def test_every_op_has_its_kernel_and_nothing_spills(checked) -> None:
    role, drafts, done, facts = checked
    assert done.returncode == 0, done.stderr
    assert facts["compiled"] and facts["fits"] and facts["spill_bytes"] == 0 and facts["role"] == role
    # Layers, those with an index, with compressed keys of their own, and with Engram; of each op so many kernels.
    layers, index, sources, engram = 5, 3, 2, 1
    if role == "prefill":  # which makes no logits and no drafts: nothing reads what the last layer adds
        layers, index = layers - 1, index - 1
    elif drafts:  # whose layers have the ops of any layer with window keys alone
        layers += 2
    assert facts["drafts"] == drafts
    assert facts["kernels"]["sparse_attention"] == layers
    assert facts["kernels"]["grouped_moe"] == 3 * layers
    assert facts["kernels"]["compress"] == sources and facts["kernels"]["engram_gate"] == 2 * engram
    assert facts["kernels"]["select_entries"] >= 2 * index and facts["kernels"]["mhc"] >= 2 * 2 * layers


@needs_aot
def test_the_collectives_are_those_of_the_exchange(checked) -> None:
    role, drafts, _, facts = checked
    assert facts["collectives"].keys() == {"all-gather", "reduce-scatter"}
    # One per layer (in a prefill, but the last, and none of the draft), one for the Engram rows.
    layers = 4 if role == "prefill" else 5 + 2 * (drafts > 0)
    assert facts["collectives"]["reduce-scatter"]["count"] == layers + 1
