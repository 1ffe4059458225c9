"""`widemesh bench replay`: what it counts, and what it refuses."""

import json

import pytest

from widemesh.model.config import ConfigError
from widemesh.model.presets import PRESETS
from widemesh.tools.bench.replay import Replay


def test_last_line_counts_the_rows_of_every_layer(capsys):
    config = PRESETS["tiny-structure"]
    Replay(preset="tiny-structure", tokens=32, chunk=16, repeat=1, numerics="plain").run()
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    above = config.num_hidden_layers - config.replay_cut
    assert figures["layer_rows_full"] == 32 * config.num_hidden_layers
    assert figures["layer_rows_bounded"] == 32 * config.replay_cut + config.sliding_window * above
    assert figures["ratio"] > 0 and figures["full_tokens_per_s"] > 0


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"preset": "flash"}, "preset='flash' is unknown; use one of tiny-"),
        ({"tokens": 100, "chunk": 64}, "tokens=100 must be a multiple of chunk=64"),
        ({"tokens": 16, "chunk": 8}, "chunk=8 must hold the window of 16 rows"),
        ({"tokens": 0}, "tokens=0 must be at least 1; use 2048"),
        ({"tokens": -256}, "tokens=-256 must be at least 1"),
        ({"numerics": "fp8"}, "numerics='fp8' is unknown; use one of plain, kvq, w8a8, reference, serving"),
        ({"repeat": 0}, "repeat=0 must be at least 1"),
    ],
)
def test_bad_values_are_one_sentence(fields, sentence):
    with pytest.raises(ConfigError, match=sentence):
        Replay(**fields)
