"""Engram rows hashed on the device: bit-exact against Python integers, the released rows and the host's hashes."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open

from widemesh.model.config import ModelConfig
from widemesh.model.engram_device_hash import Divisors, EngramDeviceHash, next_tail, remainder
from widemesh.model.engram_hash import EngramHash
from widemesh.model.presets import PRESETS

GOLDEN = Path(__file__).parents[1] / "golden"

hash_rows = jax.jit(EngramDeviceHash.rows)


def load(path: str) -> dict[str, np.ndarray]:
    with safe_open(GOLDEN / path, "np") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (the file is no dict)


def fresh(batch: int, history_len: int) -> np.ndarray:
    return np.full((batch, history_len), -1, np.int32)


@pytest.fixture(scope="module")
def released() -> dict[str, np.ndarray]:
    return load("standalone/engram_released.safetensors")


@pytest.fixture(scope="module")
def flash(released) -> EngramHash:
    return EngramHash.build(PRESETS["flash"], released["token_map"])


@pytest.fixture(scope="module")
def tiny() -> EngramHash:
    return EngramHash.build(PRESETS["tiny-structure"], np.arange(128, dtype=np.int32))


# --- the arithmetic ---------------------------------------------------------------------------------------------------

EXTREME_DIVISORS = (2, 3, 5, 2**8 - 1, 2**8, 2**16 - 15, 2**16, 2**16 + 1, 16_000_057, 2**24, 2**30 - 1, 2**30,
                    2**30 + 1, 2**31 - 2, 2**31 - 1)  # fmt: skip


def remainders(numbers: list[int], divisors: list[int]) -> np.ndarray:
    high, low = (np.array([number >> by & 2**32 - 1 for number in numbers], np.uint32) for by in (32, 0))
    built = Divisors.build(np.array(divisors))
    return np.asarray(jax.jit(remainder)(high[:, None], low[:, None], built))


def expected(numbers: list[int], divisors: list[int]) -> list[list[int]]:
    return [[number % divisor for divisor in divisors] for number in numbers]


def test_remainders_of_extreme_numbers():
    words = (0, 1, 2**16 - 1, 2**16, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1)
    numbers = [high << 32 | low for high in words for low in words]
    for divisor in EXTREME_DIVISORS:  # multiples and their neighbours, where a wrong quotient shows
        top = (2**64 - 1) // divisor
        numbers += [q * divisor + off for q in (top, top - 1, top // 2, 1) for off in (-1, 0, 1)
                    if q * divisor + off < 2**64]  # fmt: skip
    divisors = list(EXTREME_DIVISORS)
    assert remainders(numbers, divisors).tolist() == expected(numbers, divisors)


def test_remainders_of_random_numbers():
    rng = np.random.default_rng(7)
    numbers = (rng.integers(0, 2**64, 3000, np.uint64) >> rng.integers(0, 64, 3000, np.uint64)).tolist()
    divisors = [int(rng.integers(2**(bits - 1), 2**bits)) for bits in range(2, 32) for _ in range(3)]
    assert remainders(numbers, divisors).tolist() == expected(numbers, divisors)


@pytest.mark.parametrize("number", [0, 1, 2**31, -7])
def test_a_divisor_out_of_range_is_refused(number):
    with pytest.raises(ValueError, match=rf"divisor {number} must lie between 2 and 2\^31 - 1"):
        Divisors.build(np.array([[17, number]]))


def hand_made(multipliers: list[list[int]], primes: list[list[int]], token_map: list[int]) -> EngramHash:
    numbers = np.array(primes, np.int64)
    return EngramHash(token_map=np.array(token_map, np.int32), primes=numbers, offsets=np.cumsum(numbers, 1) - numbers,
                      multipliers=np.array(multipliers, np.int64), pad_compressed_id=0)  # fmt: skip


def test_products_use_all_64_bits():
    """Compressed ids up to 2^31 - 1 and multipliers up to 2^63 - 1: products wrap as unsigned 64-bit integers."""
    rng = np.random.default_rng(8)
    token_map = [0, 1, 2**16 - 1, 2**16, 2**31 - 1, *rng.integers(0, 2**31, 27).tolist()]
    multipliers = [[2**63 - 1, 2**32 - 1, 2**32 + 1], rng.integers(0, 2**62, 3).tolist()]
    primes = [[13, 999_983], [1_000_003, 2_000_003]]
    device = EngramDeviceHash.build(hand_made(multipliers, primes, token_map))
    ids = rng.integers(0, 32, (3, 50)).astype(np.int32)
    rows = np.asarray(hash_rows(device, ids, fresh(3, 2)))
    for b, s in np.ndindex(3, 50):
        for layer in range(2):
            grams = [token_map[ids[b, s - back]] if s >= back else 0 for back in range(3)]
            products = [gram * factor % 2**64 for gram, factor in zip(grams, multipliers[layer], strict=True)]
            mixed = products[0] ^ products[1], products[0] ^ products[1] ^ products[2]
            want = [mixed[0] % primes[layer][0], mixed[1] % primes[layer][1] + primes[layer][0]]
            assert rows[b, s, layer].tolist() == want


# --- against the released rows and the host ---------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["", "text0.", "text1.", "text2."])
def test_released_rows(flash, released, key):
    ids = released[f"{key}input_ids"].astype(np.int32)
    rows = hash_rows(EngramDeviceHash.build(flash), ids, fresh(len(ids), 3))
    assert rows.dtype == jnp.int32
    np.testing.assert_array_equal(rows, released[f"{key}hash_ids"])


def test_negative_ids_cut_every_ngram_that_reaches_them(flash, released):
    dead = released["masked.token_mask"] == 0
    ids = np.where(dead, -1, released["input_ids"]).astype(np.int32)
    rows = hash_rows(EngramDeviceHash.build(flash), ids, fresh(len(ids), 3))
    np.testing.assert_array_equal(rows, released["masked.hash_ids"])


@pytest.mark.parametrize("name", ["A", "B"])
def test_golden_models(name):
    config, inputs = ModelConfig.from_dir(GOLDEN / name), load(f"{name}/inputs.safetensors")
    device = EngramDeviceHash.build(EngramHash.build(config, inputs["engram_token_map"]))
    ids = inputs["long"].astype(np.int32)
    with safe_open(GOLDEN / name / "outputs_plain_long.safetensors", "np") as golden:
        np.testing.assert_array_equal(hash_rows(device, ids, fresh(len(ids), device.history_len)),
                                      golden.get_tensor("engram_hash_ids"))  # fmt: skip


@pytest.mark.parametrize("which", ["flash", "tiny"])
def test_random_ids_equal_the_host(which, request):
    host = request.getfixturevalue(which)
    rng = np.random.default_rng(9)
    ids = rng.integers(0, len(host.token_map), (4, 501)).astype(np.int32)
    tail = rng.integers(-1, len(host.token_map), (4, 3)).astype(np.int32)
    tail[0], tail[1, 1] = -1, -1
    np.testing.assert_array_equal(hash_rows(EngramDeviceHash.build(host), ids, tail), host.rows(ids, tail))


@pytest.mark.parametrize("chunk", [1, 3, 7])
def test_chunks_with_tails_equal_the_whole(flash, released, chunk):
    """Each chunk gets the tail that the one before left; the last one is padded with garbage."""
    device, ids = EngramDeviceHash.build(flash), released["input_ids"].astype(np.int32)
    batch, total = ids.shape
    tail, parts = jnp.asarray(fresh(batch, 3)), []
    for at in range(0, total, chunk):
        valid = min(chunk, total - at)
        padded = np.full((batch, chunk), 77, np.int32)
        padded[:, :valid] = ids[:, at : at + valid]
        parts.append(np.asarray(hash_rows(device, padded, tail))[:, :valid])
        tail = next_tail(tail, jnp.asarray(padded), jnp.full(batch, valid, jnp.int32))
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), released["hash_ids"])


def test_tails_follow_each_request_by_its_own_length():
    tail = jnp.array([[-1, -1, 5], [1, 2, 3], [1, 2, 3], [-1, -1, -1]], jnp.int32)
    ids = jnp.array([[10, 11, 12, 13]] * 4, jnp.int32)
    after = jax.jit(next_tail)(tail, ids, jnp.array([0, 1, 4, 2], jnp.int32))
    assert after.dtype == jnp.int32
    assert after.tolist() == [[-1, -1, 5], [2, 3, 10], [11, 12, 13], [-1, 10, 11]]


def test_another_model_of_the_same_shape_compiles_nothing(tiny):
    """Constants are arguments: a program serves whatever weights and tokenizer it is given."""
    traces = []

    @jax.jit
    def hashed(device: EngramDeviceHash, ids: jax.Array, tail: jax.Array) -> jax.Array:
        traces.append(ids.shape)
        return device.rows(ids, tail)

    ids = np.arange(20, dtype=np.int32)[None]
    other = dataclasses.replace(tiny, token_map=tiny.token_map[::-1].copy(), pad_compressed_id=9,
                                multipliers=tiny.multipliers // 3 | 1)  # fmt: skip
    for host in (tiny, other):
        np.testing.assert_array_equal(hashed(EngramDeviceHash.build(host), ids, fresh(1, 3)), host.rows(ids))
    assert traces == [(1, 20)]
    assert not jax.config.jax_enable_x64


def test_no_tokens_and_no_engram_layers(tiny):
    device = EngramDeviceHash.build(tiny)
    assert device.rows(jnp.zeros((2, 0), jnp.int32), jnp.asarray(fresh(2, 3))).shape == (2, 0, 2, 6)
    config = dataclasses.replace(PRESETS["tiny-structure"], engram_layer_ids=(), engram_num_embeddings=())
    device = EngramDeviceHash.build(EngramHash.build(config, np.arange(5, dtype=np.int32)))
    assert device.rows(jnp.zeros((1, 3), jnp.int32), jnp.asarray(fresh(1, 3))).shape == (1, 3, 0, 6)


def test_a_tail_of_the_wrong_length_is_refused(tiny):
    with pytest.raises(ValueError, match=r"tail has shape \(1, 2\); give .* = \(1, 3\)"):
        EngramDeviceHash.build(tiny).rows(jnp.zeros((1, 4), jnp.int32), jnp.zeros((1, 2), jnp.int32))
