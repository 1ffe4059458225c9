"""How far each decode slot is: tokens computed and steps in flight, as arrays over slots."""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Int64


class Progress:
    """The arrays, and a series of steps by the same slots that is kept as two numbers until the arrays are asked for.

    Nearly every decode step is by the same slots as the one before and gives each one token. Then a step costs no
    array operation here: each costs 3 to 8 us after the sleep for the device, when caches are cold.
    """

    def __init__(self, slots: int):
        self._computed = np.zeros(slots, np.int64)
        self._in_flight = np.zeros(slots, np.int64)
        self._series = np.zeros(slots, bool)  # who is in the steps that are kept as numbers
        self._planned = self._settled = 0

    @property
    def computed(self) -> Int64[np.ndarray, "slots"]:
        """Tokens of each slot that have been settled; to be changed in place."""
        self._catch_up()
        return self._computed

    @property
    def in_flight(self) -> Int64[np.ndarray, "slots"]:
        """Steps of each slot that have not; to be changed in place."""
        self._catch_up()
        return self._in_flight

    def plan(self, is_active: Bool[np.ndarray, "slots"]) -> None:
        """These slots have one more step in flight. The array must not be written to again."""
        if is_active is not self._series:
            self._catch_up()
            self._series = is_active
        self._planned += 1

    def settle(self, is_active: Bool[np.ndarray, "slots"]) -> int:
        """A step by these slots has come to one token of each. Returns how many since the arrays were as they are."""
        if is_active is not self._series:
            self._catch_up()
            self._series = is_active
        self._settled += 1
        return self._settled

    @property
    def computed_then(self) -> Int64[np.ndarray, "slots"]:
        """`computed` before the steps that `settle` has counted; not to be changed."""
        return self._computed

    def _catch_up(self) -> None:
        if self._planned or self._settled:
            self._in_flight += (self._planned - self._settled) * self._series
            self._computed += self._settled * self._series
            self._planned = self._settled = 0
