"""How much of a prompt a pool already holds."""

from __future__ import annotations

import numpy as np
from jaxtyping import Int32, UInt8

from widemesh.serving.scheduling.page_pool import PagePool

_PROBES = 32  # hashes looked up together: numpy's cost of a call, not of a hash, is what counts


def count_hits(pool: PagePool, hashes: UInt8[np.ndarray, "n 16"]) -> int:
    """How many pages, from the first on, the pool holds. Looks up O(log n) hashes.

    A pool evicts tails before heads, so what it holds of a prompt is a prefix: gallop, then narrow down.
    """
    if not len(hashes):
        return 0
    places = np.append((1 << np.arange(len(hashes).bit_length() - 1, dtype=np.int64)) - 1, len(hashes) - 1)
    held, missing = -1, len(hashes)  # the last place known to be held, the first known to be missing
    while places.size:
        is_held = pool.find(hashes[places]) >= 0
        first_missing = int(np.argmin(is_held)) if not is_held.all() else len(places)
        if first_missing < len(places):
            missing = int(places[first_missing])
        if first_missing:
            held = int(places[first_missing - 1])
        inside = missing - held - 1
        step = -(-inside // _PROBES)
        places = np.arange(held + step, missing, step) if inside else places[:0]
    return held + 1


def find_prefix(pool: PagePool, hashes: UInt8[np.ndarray, "n 16"]) -> Int32[np.ndarray, "m"]:
    """The pages of a prefix of which `count_hits` said that it is held. Takes no reference."""
    pages = pool.find(hashes)
    is_missing = pages < 0
    return pages[: int(np.argmax(is_missing))] if is_missing.any() else pages
