"""When ranks step, and when they rest: waves, pause and resume. Nobody coordinates.

A wave is a stretch of exchanges in which all ranks take part, also those with nothing to do. Every rank's part of the
ticket says whether it has work and whether it votes for a pause, and from the merged ticket all ranks conclude the
same: go on, or leave the wave together. A rank that gets work while all rest begins the next wave: it tells its
peers, they tell theirs, and all know after ceil(log2 N) hops.

Waves are numbered. A call for a wave that is over is stale and ignored; a call for the next one can come before a
rank has left this one, and is kept.

The pause has two phases. A vote is told in a wave, which is begun for it if need be; only when all ranks vote do they
pause, and only when none does any more do they go on. While they pause, work begins no wave, only a changed vote does.
"""

from __future__ import annotations

from collections.abc import Callable

from widemesh.sharding.ticket.base import Ticket
from widemesh.sharding.ticket.schema import Field, Merged

# To be part of the schema of a ticket that has waves.
WAVE_FIELDS = (Field("has_work", "any"), Field("pause_votes", "sum"))


class WaveControl:
    """Waves over a ticket whose schema has WAVE_FIELDS. One thread uses it; votes may come from any.

        while ...:
            if not waves.is_running:
                if not waves.rest(has_work, timeout_s=1.0):
                    continue                                    # still resting; look at flags of one's own
            pending = ticket.post({**mine, **waves.values(has_work())})
            ...
            waves.settle(pending.wait())                        # False: the wave is over, on all ranks
    """

    def __init__(self, ticket: Ticket):
        self._ticket = ticket
        self.is_running = False
        self.is_paused = False  # work must not be dispatched
        self.num_steps = 0  # exchanges since start; the same on all ranks
        self._votes = False
        self._told_vote = False  # the vote in the last ticket

    @property
    def wave(self) -> int:
        """The wave that runs, or else the next one."""
        return self._ticket.wave

    def rest(self, has_work: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Sleep until this rank or a peer begins a wave; True if one runs now.

        Returns False after `timeout_s`, and after a `wake` of the ticket's with nothing to do. Raises TicketError.
        """
        if not self._is_due(has_work):
            self._ticket.sleep(timeout_s)
            if not self._is_due(has_work):
                return False
        self._ticket.begin_wave()
        self.is_running = True
        return True

    def values(self, has_work: bool) -> dict[str, int]:
        """This rank's WAVE_FIELDS for the next exchange. What waits during a pause counts as work."""
        self._told_vote = self._votes
        return {"has_work": int(has_work), "pause_votes": int(self._told_vote)}

    def settle(self, merged: Merged) -> bool:
        """Take in the merged ticket: whether the wave goes on, with work to dispatch or to be waited for."""
        self.num_steps += 1
        votes = merged.value("pause_votes")
        if votes == self._ticket.size:
            self.is_paused = True
        elif votes == 0:
            self.is_paused = False
        self.is_running = not self.is_paused and bool(merged.value("has_work"))
        if not self.is_running:
            self._ticket.end_wave()
        return self.is_running

    def pause(self) -> None:
        """Vote for a pause; it begins, `is_paused`, when all ranks have. From any thread."""
        self._votes = True
        self._ticket.wake()

    def resume(self) -> None:
        """Take the vote back; all go on together when no rank votes any more. From any thread."""
        self._votes = False
        self._ticket.wake()

    def _is_due(self, has_work: Callable[[], bool]) -> bool:
        return self._ticket.is_called or self._votes != self._told_vote or (not self.is_paused and has_work())
