"""Which expert each physical slot holds."""

from __future__ import annotations

import numpy as np
from jaxtyping import Int32


def initial_slot_owner(num_experts: int, ranks: int) -> Int32[np.ndarray, "X"]:
    """Slot e holds expert e; slots that fill the last rank up are empty (-1).

    The number of slots is the smallest multiple of `ranks` that holds every expert, so every rank holds equally many.
    """
    slots = -(-num_experts // ranks) * ranks
    owner = np.full(slots, -1, np.int32)
    owner[:num_experts] = np.arange(num_experts, dtype=np.int32)
    return owner
