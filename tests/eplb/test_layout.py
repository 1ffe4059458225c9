"""The numbers of slots, and which numbers go together."""

from __future__ import annotations

import pytest

from widemesh.eplb import EplbConfig, ExpertLayout
from widemesh.model.config import ConfigError


def test_released_models_at_32_ranks():
    target = EplbConfig(num_redundant_experts=32).layout(num_layers=40, num_experts=384, ranks=32)
    draft = EplbConfig(num_redundant_experts=64).layout(num_layers=3, num_experts=128, ranks=32)
    assert (target.num_slots, target.slots_per_rank, target.max_copies) == (416, 13, 8)
    assert (draft.num_slots, draft.slots_per_rank, draft.max_copies) == (192, 6, 8)  # each its own number


@pytest.mark.parametrize(("redundant", "ranks", "wanted", "copies"), [
    (0, 8, 8, 1), (1, 17, 8, 2), (16, 8, 8, 8), (16, 8, 3, 3), (16, 4, 8, 4), (112, 8, 8, 8),
])  # fmt: skip
def test_copies_are_limited_by_redundancy_setting_and_ranks(redundant, ranks, wanted, copies):
    layout = ExpertLayout(num_layers=1, num_experts=16, ranks=ranks, num_redundant_experts=redundant,
                          max_copies_per_expert=wanted)  # fmt: skip
    assert layout.max_copies == copies


@pytest.mark.parametrize(("fields", "words"), [
    ({"num_experts": 384, "ranks": 32, "num_redundant_experts": 10},
     r"num_redundant_experts=10 .* use 0, 32, 64, 96, 128, \.\.\. or 2688$"),
    ({"num_experts": 256, "ranks": 16, "num_redundant_experts": 12}, "use 0, 16, 32, 48, 64, ... or 1792$"),
    ({"num_experts": 9, "ranks": 4, "num_redundant_experts": 4}, "use 3, 7, 11, 15, 19, ... or 27$"),
    ({"num_experts": 9, "ranks": 4}, "num_redundant_experts=0 .* num_experts=9 on 4 ranks .* use 3, 7, 11, 15, 19, "),
    ({"num_experts": 9, "ranks": 4, "max_copies_per_expert": 1}, "at most 1 copy of each; use 3 or 9 ranks$"),
    ({"num_experts": 2, "ranks": 5, "max_copies_per_expert": 2}, "at most 2 copies of each; use 2 ranks$"),
    ({"num_experts": 8, "ranks": 2, "num_redundant_experts": 10}, "on 2 ranks with at most 2 copies .* 2, 4, 6 or 8$"),
    ({"num_experts": 8, "ranks": 1, "num_redundant_experts": 8}, "on 1 rank with at most 1 copy of each; use 0$"),
    ({"num_experts": 8, "ranks": 0}, "ranks=0 must be at least 1; use 1 or more"),
    ({"num_experts": 9, "ranks": 4, "num_groups": 2}, "num_groups=2 must divide num_experts=9; use one of 1, 3 or 9"),
    ({"num_experts": 8, "ranks": 4, "num_nodes": 3}, "num_nodes=3 must divide ranks=4; use one of 1, 2 or 4"),
])  # fmt: skip
def test_numbers_that_do_not_fit_are_refused_with_those_that_do(fields, words):
    with pytest.raises(ConfigError, match=words):
        ExpertLayout(num_layers=1, **fields)


@pytest.mark.parametrize(("fields", "words"), [
    ({"window_size": 4000}, "window_size=4000 must be at most step_interval=3000; use 1 to 3000"),
    ({"window_size": 0}, "window_size=0 must be at least 1"),
    ({"num_redundant_experts": -1}, "num_redundant_experts=-1 must be at least 0; use 0 or more"),
    ({"min_gain": 1.0}, "min_gain=1 must be at least 0 and below 1; use 0.05"),
    ({"max_copies_per_expert": 0}, "max_copies_per_expert=0 must be at least 1"),
    ({"log_balancedness_interval": 0}, "log_balancedness_interval=0 must be at least 1"),
    ({"slice_rows": 0}, "slice_rows=0 must be at least 1; use 1 or more"),
    ({"layer_deadline_s": 0.0}, "layer_deadline_s=0 must be above 0 and finite; use 5"),
    ({"layer_deadline_s": float("inf")}, "layer_deadline_s=inf must be above 0 and finite; use 5"),
])  # fmt: skip
def test_bad_settings_are_refused(fields, words):
    with pytest.raises(ConfigError, match=words):
        EplbConfig(**fields)
