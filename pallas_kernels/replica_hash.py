"""The hash by which a row chooses among the copies of an expert, for the host and for devices. Imports no jax.

    h = mix(row * ROW + position * POSITION + expert * EXPERT)    mod 2^32
    turn = floor(h / 2^16) * copies / 2^16

All arithmetic is of 32 unsigned bits, in numpy or jax.numpy. The upper bits decide, after every bit has gone into them:
a product alone leaves the lowest bits of the row in its lowest bits, and `mod copies` would look at nothing else, so
that with 2, 4 or 8 copies rows at a distance of 8, such as the first slots of all ranks, would take the same one.
"""

from __future__ import annotations

from typing import Any

import numpy as np

ROW, POSITION, EXPERT = (np.uint32(x) for x in (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D))
_FIRST, _SECOND = (np.uint32(x) for x in (0x7FEB352D, 0x846CA68B))


def copy_turn(row: Any, position: Any, expert: Any, copies: Any) -> Any:
    """Which of an expert's `copies` (1 to 2^16) serves a row; uint32 arrays that broadcast, of either library."""
    h = row * ROW + position * POSITION + expert * EXPERT
    h = (h ^ (h >> 16)) * _FIRST
    h = (h ^ (h >> 15)) * _SECOND
    h = h ^ (h >> 16)
    return ((h >> 16) * copies) >> 16
