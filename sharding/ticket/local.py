"""The ticket of a single rank: nothing is exchanged."""

from __future__ import annotations

import socket
import threading

from widemesh.sharding.ticket.base import Values
from widemesh.sharding.ticket.errors import TicketError, TicketLost
from widemesh.sharding.ticket.schema import Merged, TicketSchema


class LocalPending:
    """An exchange of one rank with itself, over as soon as it begins."""

    def __init__(self, ticket: LocalTicket, merged: Merged):
        self._ticket, self._merged = ticket, merged

    def wait(self) -> Merged:
        """The rank's own values, merged."""
        self._ticket.is_pending = False
        return self._merged


class LocalTicket:
    """`Ticket` for one rank: the merged values are its own."""

    rank = 0
    size = 1

    def __init__(self, schema: TicketSchema):
        self.schema = schema
        self.wave = 1
        self.is_pending = False
        self._is_woken = threading.Event()
        self._aborted: TicketLost | None = None

    def post(self, values: Values) -> LocalPending:
        """See `Ticket`."""
        self._check()
        if self.is_pending:
            raise TicketError("post before the last exchange was waited for; call its wait() first")
        row = memoryview(bytearray(self.schema.row_bytes))
        self.schema.pack(values, row)
        self.is_pending = True
        return LocalPending(self, self.schema.merge(row, (0,)))

    def sleep(self, timeout_s: float | None = None) -> bool:
        """See `Ticket`."""
        is_woken = self._is_woken.wait(timeout_s)
        self._is_woken.clear()
        self._check()
        return is_woken

    def wake(self) -> None:
        """See `Ticket`."""
        self._is_woken.set()

    @property
    def is_called(self) -> bool:
        """Never: there are no peers."""
        return False

    def begin_wave(self) -> None:
        """Nobody has to be told."""

    def end_wave(self) -> None:
        """See `Ticket`."""
        self.wave += 1

    def abort(self, reason: str, rank: int | None = None) -> None:
        """See `Ticket`."""
        self._aborted = TicketLost(reason, rank)
        self.wake()

    def take_star(self) -> dict[int, socket.socket]:
        """There are none."""
        return {}

    def close(self) -> None:
        """Nothing to leave."""

    def _check(self) -> None:
        if self._aborted is not None:
            raise self._aborted
