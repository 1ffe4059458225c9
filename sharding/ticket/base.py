"""What a ticket is to its user, whether there is one rank or many."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Protocol

import numpy as np
from jaxtyping import Int32

from widemesh.sharding.ticket.schema import Merged, TicketSchema

Values = Mapping[str, int] | Int32[np.ndarray, "F"]


class Pending(Protocol):
    """An exchange that has begun."""

    def wait(self) -> Merged:
        """The merged ticket, when all parts are here. Raises TicketError; then the ticket is of no more use."""
        ...


class Ticket(Protocol):
    """One exchange after the other between all ranks. One thread uses it; `wake` and `abort` are for any thread."""

    schema: TicketSchema
    rank: int
    size: int
    wave: int  # the wave that runs, or else the next one; the same on all ranks

    def post(self, values: Values) -> Pending:
        """Begin an exchange with this rank's values, which are copied. One at a time; returns at once."""
        ...

    def sleep(self, timeout_s: float | None = None) -> bool:
        """Rest, between waves, until `wake` is called (or was, since the last sleep) or a peer begins the wave.

        False after `timeout_s` without either. Raises TicketError when a rank is lost, has left or reports a failure.
        """
        ...

    def wake(self) -> None:
        """Make `sleep` return, the next one if none is under way. From any thread."""
        ...

    @property
    def is_called(self) -> bool:
        """A peer has begun `wave`, as far as `sleep` has seen."""
        ...

    def begin_wave(self) -> None:
        """Tell peers that `wave` begins. Each tells its own, so all know after ceil(log2 N) hops."""
        ...

    def end_wave(self) -> None:
        """The wave is over on all ranks; what still calls for it is stale from now on."""
        ...

    def abort(self, reason: str, rank: int | None = None) -> None:
        """Make the thread in `sleep` or `wait` raise TicketLost, and every later call. From any thread."""
        ...

    def take_star(self) -> dict[int, socket.socket]:
        """The connections between rank 0 and each other rank, by the rank at the other end. The caller closes them."""
        ...

    def close(self) -> None:
        """Leave in good order. Peers that still want to exchange get TicketLeft."""
        ...
