"""`widemesh bench reshuffle`, tiny: what it prints, that experts did move, and what it refuses."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from widemesh.model.checkpoint import Checkpoint
from widemesh.model.config import ConfigError
from widemesh.model.presets import PRESETS
from widemesh.tools.bench.reshuffle import ReshuffleBench
from widemesh.tools.bench.reshuffle_run import write_skewed
from widemesh.tools.cli import main

# Two layers of the preset, which open in a fraction of the time.
SHORT = dataclasses.replace(
    PRESETS["tiny-structure"], num_hidden_layers=2, compress_ratios=(0, 1), kv_source_layer_ids=(1,),
    index_source_layer_ids=(1,), candidate_source_layer_id=1, engram_layer_ids=(0,), engram_num_embeddings=(156,),
    num_nextn_predict_layers=0, dspark_target_layer_ids=(),
)  # fmt: skip


def test_the_last_line_is_the_figures(capsys, monkeypatch):
    monkeypatch.setitem(PRESETS, "tiny-structure", SHORT)
    flags = {"preset": "tiny-structure", "ranks": 2, "redundant": 2, "slots": 4, "window": 8, "rebalances": 2,
             "stretch": 6, "slice-rows": 1, "skew": 1}  # fmt: skip
    assert main(["bench", "reshuffle", *(str(x) for name, value in flags.items() for x in (f"--{name}", value))]) == 0
    table, _, last = capsys.readouterr().out.rstrip("\n").rpartition("\n")
    found = json.loads(last)
    for kind in ("undisturbed", "migrating"):
        assert 0 < found[kind]["median_ms"] <= found[kind]["p99_ms"]
    rows, row_bytes = found["rows_per_rebalance"], 3 * SHORT.hidden_size * SHORT.moe_intermediate_size * 4
    assert rows == found["least_rows"] > 0 and found["bytes_per_rebalance"] == rows * row_bytes
    assert found["seconds_per_rebalance"] > 0
    skewed = found["skewed"]
    assert skewed["redundant"] == 2 and 0 < skewed["before"] <= 1 and 0 < skewed["after"] <= 1
    assert skewed["before"] <= skewed["sums_before"] < skewed["planned"] <= 1
    assert skewed["after"] <= skewed["sums_after"] <= 1
    assert found["by_slice_rows"]["1"]["migrating"] == found["migrating"]
    assert "of the sums of 8 steps" in table and "P99" in table


def test_gates_are_skewed_by_the_law_it_states(tmp_path):
    config = PRESETS["tiny-structure"]
    write_skewed(tmp_path / "model", config, 0.5)
    checkpoint = Checkpoint.open(tmp_path / "model")
    biases = [checkpoint.read(f"layers.{layer}.ffn.gate.bias") for layer in range(config.num_hidden_layers)]
    for bias in biases:
        np.testing.assert_allclose(np.sort(bias)[::-1], -0.5 * np.log(1 + np.arange(4)), rtol=1e-6)
    assert any((one != biases[0]).any() for one in biases)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"preset": "flash"}, "preset='flash' is unknown; use one of tiny-"),
        ({"rebalances": 0}, "rebalances=0 must be at least 1"),
        ({"slots": 12}, "slots=12 must be a multiple of ranks=8; use 16"),
        ({"slice_rows": ()}, "slice_rows= is empty"),
        ({"slice_rows": (0,)}, "slice_rows=0 must be at least 1"),
        ({"slice_rows": (1, 4)}, "slice_rows=4 is more than the 3 expert slots that a rank has in a layer; use 1 to 3"),
        ({"redundant": 3}, "num_redundant_experts"),
        ({"rebalances": 70}, "rebalances=70 times stretch=60 and twice window=64 are 4328 steps; use fewer than 4096"),
        ({"stretch": 662}, "rebalances=6 times stretch=662 and twice window=64 are 4100 steps"),
        ({"skew": -1}, "skew=-1 must not be negative"),
    ],
)
def test_bad_values_are_one_sentence(fields, sentence):
    with pytest.raises(ConfigError, match=sentence):
        ReshuffleBench(**fields)
