"""What can go wrong between ranks. A message names the rank, or the two values side by side."""

from __future__ import annotations


class TicketError(RuntimeError):
    """The ranks cannot go on together. `rank` is the one at fault, as far as is known."""

    def __init__(self, message: str, rank: int | None = None):
        super().__init__(message)
        self.rank = rank


class TicketTimeout(TicketError):
    """A rank did not send its part in time."""


class TicketMismatch(TicketError):
    """Ranks differ in what must be equal."""


class TicketLost(TicketError):
    """A rank's connection was closed or reset, or the rank has reported a failure."""


class TicketLeft(TicketError):
    """A rank has left in good order, so there can be no exchange any more."""
