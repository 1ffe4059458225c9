"""Names of pages: a chained hash over a page's tokens and everything before them. Computed by the front end."""

from __future__ import annotations

import hashlib

import numpy as np
from jaxtyping import Int32, UInt8

DIGEST_BYTES = 16


def hash_pages(
    tokens: Int32[np.ndarray, "S"], page_size: int, *, parent: bytes = bytes(DIGEST_BYTES), salt: bytes = b""
) -> UInt8[np.ndarray, "P 16"]:
    """One BLAKE2b-128 digest per full page of `tokens`, over (digest before it, little-endian int32 ids, salt).

    To go on later, pass the tokens after the last full page, the last digest as `parent`, and the same salt.
    Requests of different salts share no page.
    """
    count = len(tokens) // page_size
    page_bytes = 4 * page_size
    view = memoryview(np.ascontiguousarray(tokens, "<i4")).cast("B")
    blake2b, digests = hashlib.blake2b, bytearray(count * DIGEST_BYTES)
    for page in range(count):
        state = blake2b(parent, digest_size=DIGEST_BYTES)
        state.update(view[page * page_bytes : (page + 1) * page_bytes])
        if salt:
            state.update(salt)
        parent = state.digest()
        digests[page * DIGEST_BYTES : (page + 1) * DIGEST_BYTES] = parent
    return np.frombuffer(digests, np.uint8).reshape(count, DIGEST_BYTES)
