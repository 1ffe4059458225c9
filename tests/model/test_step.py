"""Rows, settings and the recorder of a step."""

import dataclasses

import numpy as np
import pytest

from widemesh.model.numerics import NUMERICS
from widemesh.model.presets import PRESETS
from widemesh.model.step import Recorder, StepSettings, selection_form


def test_positions_and_validity(context):
    rows = context(PRESETS["tiny-structure"], np.zeros((2, 3)), start=[5, 0], length=[2, 0]).rows
    assert np.asarray(rows.positions).tolist() == [[5, 6, 7], [0, 1, 2]]
    assert np.asarray(rows.valid).tolist() == [[True, True, False], [False, False, False]]


def test_recorded_names_carry_their_place(context):
    step = context(PRESETS["tiny-structure"], np.zeros((1, 1)))
    step.at("layers.3").at("attn").record("input", np.ones(1))
    step.record("logits", np.ones(1))
    assert list(step.recorder.values) == ["layers.3.attn.input", "logits"]
    assert step.prefix == ""


def test_default_recorder_keeps_nothing(context):
    step = dataclasses.replace(context(PRESETS["tiny-structure"], np.zeros((1, 1))), recorder=Recorder())
    step.record("x", np.ones(1))
    assert vars(step.recorder) == {}


def test_rounding_needs_indices():
    with pytest.raises(ValueError, match="selection='mask' cannot be used with bf16_rounding=True"):
        StepSettings(numerics=NUMERICS["reference"], selection="mask", start_bound=0)


def test_packed_ops_need_indices():
    with pytest.raises(ValueError, match="selection='mask' cannot be used with packed_weights=True"):
        StepSettings(numerics=NUMERICS["serving"], selection="mask", start_bound=0)


@pytest.mark.parametrize(
    ("rows", "numerics", "form"),
    [(1, "plain", "indices"), (15, "kvq", "indices"), (16, "kvq", "mask"), (512, "plain", "mask"),
     (512, "reference", "indices"), (512, "serving", "indices")],
)  # fmt: skip
def test_form_by_number_of_rows(rows, numerics, form):
    assert selection_form(rows, NUMERICS[numerics]) == form
