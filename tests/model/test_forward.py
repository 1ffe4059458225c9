"""Running token lists: modes, buckets, and what is refused."""

import dataclasses

import numpy as np
import pytest

from widemesh.model.engram_hash import EngramHash
from widemesh.model.forward import ForwardModel, Mode, TokenError, check_token_ids
from widemesh.model.loading import read_parameters
from widemesh.model.numerics import NUMERICS
from widemesh.model.presets import PRESETS
from widemesh.model.random_weights import random_tensors


def ids_of(model, length, seed=0):
    """Random text ids of the model's vocabulary."""
    return np.random.default_rng(seed).integers(0, model.config.image_token_id, length, dtype=np.int32)


def errors(found, wanted):
    """Relative L2 per token."""
    return np.linalg.norm(found - wanted, axis=-1) / np.linalg.norm(wanted, axis=-1)


# 13 tokens exceed the window, the top-k and the candidates of tiny-structure; 45 do in tiny-mesh.
@pytest.mark.parametrize(
    ("name", "lengths", "mode"),
    [
        ("tiny-structure", (1, 2, 3, 13), "incremental"),
        ("tiny-structure", (1, 2, 3, 13), "chunked:3"),
        ("tiny-structure", (1, 2, 3, 13), "chunked:7"),
        ("tiny-mesh", (33, 45), "chunked:3"),
    ],
    ids=lambda x: str(x),
)
def test_chunks_equal_one_forward(preset, name, lengths, mode):
    model = preset(name)
    for length in lengths:
        ids = ids_of(model, length)
        found = errors(model.logits(ids, Mode.parse(mode)), model.logits(ids))
        assert np.median(found) < 1e-5
        assert found.max() < 5e-5


def test_single_token(preset):
    """The first token's logits do not depend on how many follow."""
    model = preset("tiny-structure")
    ids = ids_of(model, 13)
    assert errors(model.logits(ids[:1]), model.logits(ids)[:1]).max() < 1e-6


def test_chunk_longer_than_the_list(preset):
    model = preset("tiny-structure")
    ids = ids_of(model, 9)
    assert np.array_equal(model.logits(ids, Mode(chunk=500)), model.logits(ids))


def test_logits_are_the_head_of_the_hidden_states():
    """On a single window-only layer, which compiles at once."""
    config = dataclasses.replace(
        PRESETS["tiny-structure"], num_hidden_layers=1, num_nextn_predict_layers=0, compress_ratios=(0,),
        kv_source_layer_ids=(), index_source_layer_ids=(), candidate_source_layer_id=-1, engram_layer_ids=(),
        engram_num_embeddings=(), dspark_target_layer_ids=(),
    )  # fmt: skip
    tensors = dict(random_tensors(config, 0))
    parameters = read_parameters(config, tensors.__getitem__, np.arange(config.n_routed_experts))
    hash_ = EngramHash.build(config, np.zeros(config.vocab_size, np.int32))
    model = ForwardModel(config, parameters, hash_, NUMERICS["plain"])
    ids = ids_of(model, 5)
    hidden = model.hidden(ids)
    assert hidden.shape == (5, config.hidden_size)
    assert errors(hidden @ tensors["head.weight"].T, model.logits(ids)).max() < 1e-6


def test_lists_do_not_touch_each_other(preset):
    """The same list gives the same bits after any other list."""
    model = preset("tiny-structure")
    first = model.logits(ids_of(model, 7))
    model.logits(ids_of(model, 13, seed=1))
    assert np.array_equal(model.logits(ids_of(model, 7)), first)


@pytest.mark.parametrize(
    ("text", "chunk"), [("full", None), ("incremental", 1), ("chunked:1", 1), ("chunked:3", 3), ("chunked:128", 128)]
)
def test_mode(text, chunk):
    assert Mode.parse(text) == Mode(chunk=chunk)


@pytest.mark.parametrize("text", ["", "Full", "chunked", "chunked:", "chunked:0", "chunked:-1", "chunked:2.5", "3"])
def test_unknown_mode_names_the_remedy(text):
    with pytest.raises(ValueError, match=r"mode=.*use full, incremental or chunked:N"):
        Mode.parse(text)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "is empty; give at least one id"),
        ([[1, 2]], "must be one flat list of integers"),
        ([[1, 2], [3]], "must be one flat list of integers"),
        ([1.0, 2.0], "must be one flat list of integers"),
        (["a"], "must be one flat list of integers"),
        ([0, 128], r"\[1\]=128 is outside the vocabulary; use 0 to 127"),
        ([3, -1], r"\[1\]=-1 is outside"),
        ([2**40], rf"\[0\]={2**40} is outside"),
        ([5, 126], "holds 126, the image placeholder"),
        ([0] * 4097, "has 4097 ids but max_position_embeddings=4096; give fewer"),
    ],
    ids=["empty", "nested", "ragged", "floats", "strings", "too large", "negative", "beyond 32 bits", "image",
         "too long"],
)
def test_bad_ids_are_refused(ids, message):
    with pytest.raises(TokenError, match="^prompt.*" + message):
        check_token_ids(ids, PRESETS["tiny-structure"], name="prompt")


def test_good_ids_become_int32():
    ids = check_token_ids(np.array([0, 127], np.uint8), PRESETS["tiny-structure"])
    assert ids.dtype == np.int32 and ids.tolist() == [0, 127]
