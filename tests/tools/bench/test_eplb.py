"""The rebalancing benchmark at a small size: what it prints, draws and refuses."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from widemesh.eplb import ExpertLayout, initial_placement
from widemesh.model.config import ConfigError
from widemesh.tools.bench.eplb import SKEWS, TARGET, EplbBench, _Case
from widemesh.tools.bench.eplb_loads import Measured, Skew, draw_window, measure, uniform
from widemesh.tools.bench.eplb_peer import load_peer
from widemesh.tools.cli import main

PEER = """
import numpy as np

def rebalance_experts(weight, num_replicas, num_groups, num_nodes, num_gpus):
    layers, experts = weight.shape
    return np.tile(np.arange(num_replicas) % experts, (layers, 1)), None, None
"""


def test_the_last_line_is_the_figures(tmp_path, capsys):
    peer, plot = tmp_path / "peer.py", tmp_path / "loads.png"
    peer.write_text(PEER)
    flags = {"layers": 2, "steps": 3, "repeat": 1, "window": 100, "peer": peer, "plot": plot}
    assert main(["bench", "eplb", *(str(x) for name, value in flags.items() for x in (f"--{name}", value))]) == 0
    table, _, last = capsys.readouterr().out.rstrip("\n").rpartition("\n")
    figures = json.loads(last)
    assert list(figures) == ["target", "draft", "plan_s", "policy_s", "plan_plain_python_s", "plan_peer_s"]
    for name, least in (("target", 0.97), ("draft", 0.93)):
        one = figures[name]
        assert one["redundant"] == 32 and one["before"] < 0.6 and one["moved_rows"] == one["least_moved_rows"] > 0
        covered = (one["after"] - one["before"]) / (one["uniform"] - one["before"])
        assert one["recovered"] == pytest.approx(covered, abs=2e-3) and covered > least - 0.05  # of two layers
    for words in ("recovered", "redundant", "Zipf 0.72", "plain Python", "peer"):
        assert words in table
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("skew", SKEWS["target"], ids=str)
def test_probabilities_add_up_to_the_experts_of_a_row(skew):
    chance = skew.probabilities(TARGET, 5, np.random.default_rng(0))
    assert chance.shape == (5, 384) and chance.sum(1) == pytest.approx(6) and chance.max() <= 1
    assert len({tuple(row.argsort()[-3:]) for row in chance}) == 5  # other experts are hot in each layer


def test_an_expert_is_taken_by_a_row_once_at_most():
    chance = Skew("Zipf", 3.0).probabilities(TARGET, 2, np.random.default_rng(0))
    assert chance.max() == 1 and chance.sum(1).max() < 6
    assert draw_window(chance, 100, 7, np.random.default_rng(1)).max() == 700


def test_rows_are_shared_by_copies():
    layout = ExpertLayout(num_layers=1, num_experts=2, ranks=3, num_redundant_experts=1)
    owner, rng = initial_placement(layout), np.random.default_rng(0)
    always = measure(owner, np.ones((1, 2)), layout, 4096, 2, rng)
    assert always.rank_share == pytest.approx(np.array([[0.75, 1.5, 0.75]]), abs=0.04)  # five deviations
    assert always.balancedness == pytest.approx(2 / 3, abs=0.02)


def test_uniform_routing_reaches_what_it_can():
    layout = ExpertLayout(num_layers=10, num_experts=384, ranks=32)
    even = measure(initial_placement(layout), uniform(TARGET, 10), layout, 72 * 6 * 32, 5, np.random.default_rng(0))
    assert even.balancedness == pytest.approx(0.96, abs=0.005)


@pytest.mark.parametrize(("before", "recovered"), [(0.5, 0.5), (0.9, 0.0)])
def test_where_nothing_is_to_be_recovered_nothing_is(before, recovered):
    layout = ExpertLayout(num_layers=1, num_experts=2, ranks=2)
    found = [Measured(balancedness=even, rank_share=np.ones((1, 2))) for even in (before, 0.7)]
    case = _Case(model=TARGET, skew=SKEWS["target"][0], layout=layout, load=np.ones((1, 2)), uniform=0.9, bound=1.0,
                 expected=1.0, before=found[0], after=found[1], transfers=0, least_transfers=0)  # fmt: skip
    assert case.recovered == pytest.approx(recovered)


@pytest.mark.parametrize(("fields", "words"), [
    ({"ranks": 1}, "ranks=1 must be at least 2"),
    ({"steps": 0}, "steps=0 must be at least 1; use 1 or more"),
    ({"seed": -1}, "seed=-1 must not be negative; use 0"),
    ({"draft_redundant": 12}, "draft: num_redundant_experts=12 .* use 0, 32, 64, 96, 128, ... or 896"),
    ({"plot": "x.jpg"}, "plot='x.jpg' must end in .png; use 'x.png'"),
    ({"plot": "/no/such/x.png"}, "plot='/no/such/x.png': its folder does not exist; make it first"),
])  # fmt: skip
def test_bad_settings_are_refused(fields, words):
    with pytest.raises(ConfigError, match=words):
        EplbBench(**{name: Path(value) if name == "plot" else value for name, value in fields.items()})


@pytest.mark.parametrize(("text", "words"), [
    (None, "is not a Python file"),
    ("import nowhere_to_be_found", "cannot be imported"),
    ("def rebalance_experts(", r"peer=.* cannot be run \(SyntaxError: .*\); correct it"),
    ("1 / 0", r"cannot be run \(ZeroDivisionError: division by zero\); correct it"),
    ("x = 1", "has no rebalance_experts"),
    ("def rebalance_experts(*a): return [[[0]]]", r"shape \(1, 1\); the first of what it returns must be \(1, 2\)"),
])  # fmt: skip
def test_peers_that_cannot_be_used_are_refused(text, words, tmp_path):
    path = tmp_path / "peer.py"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        load_peer(path)(np.ones((1, 2)), ExpertLayout(num_layers=1, num_experts=2, ranks=2))
