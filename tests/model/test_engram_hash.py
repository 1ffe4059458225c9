"""Engram table rows: bit-exact against the released constants and the golden models, whole and in chunks."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from widemesh.model.config import ConfigError, ModelConfig
from widemesh.model.engram_hash import EngramHash
from widemesh.model.presets import PRESETS

GOLDEN = Path(__file__).parents[1] / "golden"


def load(path: str) -> dict[str, np.ndarray]:
    with safe_open(GOLDEN / path, "np") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (the file is no dict)


@pytest.fixture(scope="module")
def released() -> dict[str, np.ndarray]:
    return load("standalone/engram_released.safetensors")


@pytest.fixture(scope="module")
def flash(released) -> EngramHash:
    return EngramHash.build(PRESETS["flash"], released["token_map"])


@pytest.fixture(scope="module")
def tiny() -> EngramHash:
    return EngramHash.build(PRESETS["tiny-structure"], np.arange(128, dtype=np.int32))


def test_released_constants(flash, released):
    np.testing.assert_array_equal(flash.primes, released["primes"])
    np.testing.assert_array_equal(flash.offsets, released["offsets"])
    np.testing.assert_array_equal(flash.multipliers, released["multipliers"])
    assert flash.pad_compressed_id == released["pad_compressed_id"] == 2
    assert flash.history_len == 3


@pytest.mark.parametrize("key", ["", "text0.", "text1.", "text2."])
def test_released_rows(flash, released, key):
    rows = flash.rows(released[f"{key}input_ids"])
    assert rows.dtype == np.int32
    np.testing.assert_array_equal(rows, released[f"{key}hash_ids"])
    np.testing.assert_array_equal(flash.token_map[released[f"{key}input_ids"]], released[f"{key}compressed_ids"])


def test_dead_tokens_cut_every_ngram_that_reaches_them(flash, released):
    dead = released["masked.token_mask"] == 0
    assert dead.any()
    rows = flash.rows(released["input_ids"], dead=dead)
    np.testing.assert_array_equal(rows, released["masked.hash_ids"])
    assert (rows != released["hash_ids"]).any()
    negative = np.where(dead, -1, released["input_ids"]).astype(np.int32)
    np.testing.assert_array_equal(flash.rows(negative), rows)


@pytest.mark.parametrize("name", ["A", "B"])
def test_golden_models(name):
    config, inputs = ModelConfig.from_dir(GOLDEN / name), load(f"{name}/inputs.safetensors")
    built = EngramHash.build(config, inputs["engram_token_map"])
    np.testing.assert_array_equal(built.primes, inputs["engram_primes"])
    np.testing.assert_array_equal(built.offsets, inputs["engram_offsets"])
    np.testing.assert_array_equal(built.multipliers, inputs["engram_multipliers"])
    with safe_open(GOLDEN / name / "outputs_plain_long.safetensors", "np") as golden:
        np.testing.assert_array_equal(built.rows(inputs["long"]), golden.get_tensor("engram_hash_ids"))
    with safe_open(GOLDEN / name / "outputs_other.safetensors", "np") as golden:
        for batch in ("batch", "short"):
            np.testing.assert_array_equal(built.rows(inputs[batch]),
                                          golden.get_tensor(f"plain.{batch}.engram_hash_ids"))


@pytest.mark.parametrize("chunk", [1, 3, 7])
def test_chunks_with_history_equal_the_whole(flash, released, chunk):
    dead = released["masked.token_mask"] == 0
    ids = np.where(dead, -1, released["input_ids"]).astype(np.int32)
    past = np.concatenate([np.full((len(ids), flash.history_len), -1, np.int32), ids], axis=1)
    parts = [flash.rows(ids[:, at:at + chunk], past[:, at:at + flash.history_len])
             for at in range(0, ids.shape[1], chunk)]
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), released["masked.hash_ids"])


def test_rows_stay_within_their_column(tiny):
    rows = tiny.rows(np.random.default_rng(0).integers(0, 128, (4, 200), dtype=np.int32))
    assert (rows >= tiny.offsets).all() and (rows < tiny.offsets + tiny.primes).all()
    assert tiny.primes.tolist() == [[17, 19, 23, 29, 31, 37], [41, 43, 47, 53, 59, 61]]
    assert (rows.max(axis=(0, 1)) == tiny.offsets + tiny.primes - 1).mean() > 0.5  # the columns are used to the end


def test_ngrams_read_exactly_their_own_tokens(tiny):
    ids = np.arange(10, 18, dtype=np.int32)[None]
    other = ids.copy()
    other[0, 4] = 99
    differs = (tiny.rows(ids) != tiny.rows(other))[0].reshape(8, 2, 3, 2).any(axis=(1, 3))  # [S, n-gram size 2..4]
    for size in (2, 3, 4):
        assert np.flatnonzero(differs[:, size - 2]).tolist() == list(range(4, 4 + size))


def test_no_tokens_and_no_engram_layers(tiny):
    assert tiny.rows(np.empty((2, 0), np.int32)).shape == (2, 0, 2, 6)
    config = dataclasses.replace(PRESETS["tiny-structure"], engram_layer_ids=(), engram_num_embeddings=())
    assert EngramHash.build(config, np.arange(5, dtype=np.int32)).rows(np.zeros((1, 3), np.int32)).shape == (1, 3, 0, 6)


def test_history_of_the_wrong_length_is_refused(tiny):
    with pytest.raises(ValueError, match=r"history has shape \(1, 2\); give .* = \(1, 3\)"):
        tiny.rows(np.zeros((1, 4), np.int32), np.zeros((1, 2), np.int32))


@pytest.mark.parametrize(("change", "size", "message"), [
    ({}, 127, r"the tokenizer names 127 ids, vocab_size=128"),
    ({"engram_compressed_vocab_size": 120}, 128, r"engram_compressed_vocab_size=120 .* has 128 ids"),
    ({"engram_num_embeddings": (156, 305)}, 128, r"engram_num_embeddings=\[156, 305\] must be \[156, 304\]"),
    ({"engram_pad_token_id": 128}, 128, r"engram_pad_token_id=128 must be a token id below 128"),
    ({"engram_max_ngram_size": 1}, 128, r"engram_max_ngram_size=1 must be at least 2"),
])
def test_a_configuration_that_would_hash_wrongly_is_refused(change, size, message):
    config = dataclasses.replace(PRESETS["tiny-structure"], **change)
    with pytest.raises(ConfigError, match=message):
        EngramHash.build(config, np.arange(size, dtype=np.int32))
