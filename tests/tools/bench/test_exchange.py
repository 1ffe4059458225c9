"""`widemesh bench exchange`: what it counts, and what it refuses."""

import json

import pytest

from widemesh.model.config import ConfigError
from widemesh.model.presets import PRESETS
from widemesh.sharding import MeshError
from widemesh.tools.bench.exchange import ExchangeBench


def test_experts_are_shared_and_bytes_follow_the_closed_form(capsys):
    config = PRESETS["tiny-structure"]
    ExchangeBench(preset="tiny-structure", ranks=(1, 2), tokens=64, repeat=1).run()
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [(row["ranks"], row["exchange"]) for row in rows] == [(1, "local"), (2, "all_gather"), (2, "ragged")]
    one_expert = 3 * config.moe_intermediate_size * config.hidden_size * 4
    whole = config.num_hidden_layers * config.n_routed_experts * one_expert
    assert [row["expert_bytes_per_rank"] for row in rows] == [whole, whole // 2, whole // 2]
    local, gathered, ragged = rows
    k, d = config.num_experts_per_tok, config.hidden_size
    assert local["bytes_per_token"] == local["counted_bytes_per_token"] == 0
    assert gathered["bytes_per_token"] == gathered["counted_bytes_per_token"] == 4 * d + 8 * k + 4 * d
    assert ragged["counted_bytes_per_token"] == pytest.approx(ragged["bytes_per_token"], rel=0.1)
    assert all(row["ratio_to_local"] > 0 for row in rows)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"preset": "flash"}, "preset='flash' is unknown; use one of tiny-"),
        ({"tokens": 100}, "tokens=100 must be a multiple of ranks=8"),
        ({"repeat": 0}, "repeat=0 must be at least 1"),
        ({"ranks": (0, 2)}, r"ranks=\(0, 2\) must be numbers of at least 1"),
        ({"seed": -1}, "seed=-1 must not be negative"),
    ],
)
def test_bad_values_are_one_sentence(fields, sentence):
    with pytest.raises(ConfigError, match=sentence):
        ExchangeBench(**fields)


def test_more_ranks_than_devices_are_refused():
    with pytest.raises(MeshError, match="ranks=16 needs as many devices but JAX has started with 8; use fewer"):
        ExchangeBench(ranks=(16,), tokens=16).run()
