"""Page hashes: chained, resumable, by value."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from widemesh.serving.scheduling import hash_pages


def test_is_the_chain_it_says_it_is() -> None:
    tokens = np.arange(10, dtype=np.int32)
    first = hashlib.blake2b(bytes(16) + tokens[:4].astype("<i4").tobytes() + b"s", digest_size=16).digest()
    second = hashlib.blake2b(first + tokens[4:8].astype("<i4").tobytes() + b"s", digest_size=16).digest()
    hashes = hash_pages(tokens, 4, salt=b"s")
    assert hashes.dtype == np.uint8 and hashes.tobytes() == first + second


@pytest.mark.parametrize("length", [0, 3, 4, 5, 8, 23])
def test_only_full_pages(length: int) -> None:
    assert hash_pages(np.zeros(length, np.int32), 4).shape == (length // 4, 16)


@pytest.mark.parametrize("cut", [4, 8, 20])
def test_goes_on_from_a_digest(cut: int) -> None:
    tokens = np.arange(23, dtype=np.int32)
    whole = hash_pages(tokens, 4, salt=b"x")
    head = hash_pages(tokens[:cut], 4, salt=b"x")
    tail = hash_pages(tokens[cut:], 4, parent=head[-1].tobytes(), salt=b"x")
    assert np.array_equal(np.concatenate([head, tail]), whole)


def test_depends_on_what_is_before_and_on_the_salt() -> None:
    one, other = np.array([1, 2, 3, 4], np.int32), np.array([9, 2, 3, 4], np.int32)
    assert hash_pages(one, 2)[1].tobytes() != hash_pages(other, 2)[1].tobytes()
    assert not (hash_pages(one, 2) == hash_pages(one, 2, salt=b"tenant")).all(axis=1).any()


def test_takes_any_integer_layout() -> None:
    tokens = np.arange(24, dtype=np.int64)
    strided = tokens.astype(np.int32).repeat(2)[::2]
    assert np.array_equal(hash_pages(strided, 8), hash_pages(tokens.astype(">i4"), 8))
