"""Placements as JSON."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from widemesh.eplb import ExpertLayout, dump_placement, hash_text, parse_placement, placement_hash, read_placement
from widemesh.model.config import ConfigError

LAYOUT = ExpertLayout(num_layers=2, num_experts=4, ranks=2)
OWNER = [[3, 2, 1, 0], [0, 1, 2, 3]]


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_what_goes_out_comes_in(draws, data):
    layout = draws.layout(data)
    owner = draws.placement(data, layout)
    read = parse_placement(dump_placement(owner, layout), layout)
    assert read.dtype == np.int32 and np.array_equal(read, owner)


def test_a_file_has_a_line_per_layer_and_may_be_written_by_hand(tmp_path):
    text = dump_placement(np.array(OWNER, np.int32), LAYOUT)
    assert text.splitlines()[1:] == ["[3, 2, 1, 0],", "[0, 1, 2, 3]", "]}"]
    assert json.loads(text)["hash"] == hash_text(placement_hash(np.array(OWNER)))
    path = tmp_path / "p.json"
    path.write_text(json.dumps({"slot_owner": OWNER}))
    assert read_placement(path, LAYOUT).tolist() == OWNER


@pytest.mark.parametrize(("content", "words"), [
    ("{", "p is not JSON"),
    ("[]", "p has no list slot_owner"),
    ({"slot_owner": 3}, "p has no list slot_owner"),
    ({"slot_owner": [[0, 1, 2, 3], [0, 1, 2]]}, "p: layer 1 has length 3; it must be 4, an owner for each slot"),
    ({"slot_owner": [[0, 1, 2, [3]], [0, 1, 2, 3]]}, r"p: slot 3 of layer 0 holds \[3\]; it must hold an expert"),
    ({"slot_owner": [[0, 1, 2, 3], 7]}, "p: layer 1 is 7; it must be a list of the owners of its 4 slots"),
    ({"slot_owner": OWNER[:1]}, r"p has shape \(1, 4\); it must be \(2, 4\)"),
    ({"slot_owner": [[3, 2, 1, 1], [0, 1, 2, 3]]}, "p: no slot of layer 0 holds expert 0"),
    ({"slot_owner": [["a", 2, 1, 1], [0, 1, 2, 3]]}, "p: slot 0 of layer 0 holds 'a'; it must hold an expert"),
    ({"slot_owner": [[0, 1, 2, 3], [0, 1, 2, 3.5]]}, "p: slot 3 of layer 1 holds 3.5; it must hold an expert"),
    ({"slot_owner": OWNER, "ranks": 4}, "p was made for ranks=4; it must be 2: use a placement of a model with r"),
    ({"slot_owner": OWNER, "hash": 1}, r"p does not have the hash that stands in it \(1\)"),
    ({"slot_owner": OWNER, "hash": "0000000a"}, r"p does not have the hash that stands in it \('0000000a'\)"),
])  # fmt: skip
def test_files_that_cannot_be_used_are_refused(content, words):
    text = content if isinstance(content, str) else json.dumps(content)
    with pytest.raises(ConfigError, match=words):
        parse_placement(text, LAYOUT, "p")


def test_bytes_are_refused(tmp_path):
    path = tmp_path / "p.json"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is not text"):
        read_placement(path, LAYOUT)
