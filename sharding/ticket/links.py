"""Connections between ranks once all know where the others listen.

Of two ranks that exchange anything the higher one dials. Ranks on one machine use Unix sockets, where a message takes
about half the time that it takes TCP on loopback (4 to 7 us).
"""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import selectors
import socket
import struct
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from widemesh.sharding.ticket.addresses import family_of
from widemesh.sharding.ticket.errors import TicketError, TicketTimeout
from widemesh.sharding.ticket.schedule import make_schedule

_CALLING_CARD = struct.Struct("=iii")  # magic, the job's number, the caller's rank
_MAGIC = 0x774D5402
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """Where a rank listens."""

    host: str  # as its peers reach it; empty for rank 0, which they have reached already
    port: int
    unix: str  # abstract name, empty where there are none
    machine: str


class Door:
    """The listening sockets of one rank, open before it tells anybody of them."""

    def __init__(self, host: str):
        self._listeners = [socket.create_server((host, 0), family=family_of(host), backlog=128)]
        self._port = self._listeners[0].getsockname()[1]
        self._unix = ""
        if sys.platform == "linux":
            self._unix = f"widemesh-ticket-{secrets.token_hex(8)}"
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            listener.bind("\0" + self._unix)
            listener.listen(128)
            self._listeners.append(listener)

    def place(self, host: str) -> Place:
        """What peers have to know."""
        machine = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else socket.gethostname()
        return Place(host=host, port=self._port, unix=self._unix, machine=machine)

    def connect(self, rank: int, places: Mapping[int, Place], job: int, deadline_s: float) -> dict[int, socket.socket]:
        """A connection to every rank that `rank` exchanges with. Raises TicketError with the ranks that are missing."""
        turns = make_schedule(rank, len(places)).rounds
        peers = {turn.to for turn in turns} | {turn.source for turn in turns}
        found: dict[int, socket.socket] = {}
        try:
            for peer in sorted(peer for peer in peers if peer < rank):
                found[peer] = _dial(places[rank], places[peer], peer, deadline_s)
                found[peer].sendall(_CALLING_CARD.pack(_MAGIC, job, rank))
            self._accept({peer for peer in peers if peer > rank}, found, job, deadline_s)
        except BaseException:
            for sock in found.values():
                sock.close()
            raise
        return found

    def close(self) -> None:
        """Take no more calls."""
        for listener in self._listeners:
            listener.close()

    def _accept(self, missing: set[int], found: dict[int, socket.socket], job: int, deadline_s: float) -> None:
        """Until nobody is missing. Cards are read as they come: a stranger who says nothing holds nobody up."""
        cards: dict[socket.socket, bytes] = {}
        with selectors.DefaultSelector() as selector:
            for listener in self._listeners:
                listener.setblocking(False)
                selector.register(listener, selectors.EVENT_READ)
            try:
                while missing:
                    left_s = deadline_s - time.monotonic()
                    if left_s <= 0:
                        raise TicketTimeout(f"ranks {sorted(missing)} did not connect in time", min(missing))
                    for key, _ in selector.select(left_s):
                        sock = cast(socket.socket, key.fileobj)
                        if sock not in cards:
                            with contextlib.suppress(OSError):  # who has hung up already
                                caller, _ = sock.accept()
                                caller.setblocking(False)
                                cards[caller] = b""
                                selector.register(caller, selectors.EVENT_READ)
                            continue
                        more = _receive(sock, _CALLING_CARD.size - len(cards[sock]))
                        cards[sock] += more
                        if more and len(cards[sock]) < _CALLING_CARD.size:
                            continue
                        selector.unregister(sock)
                        rank = _rank_on(cards.pop(sock), job)
                        if rank not in missing:  # of another job, or no rank at all
                            sock.close()
                            continue
                        missing.remove(rank)
                        sock.setblocking(True)
                        found[rank] = no_delay(sock)
            finally:
                for caller in cards:
                    caller.close()


def no_delay(sock: socket.socket) -> socket.socket:
    """Send small messages at once."""
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def _dial(mine: Place, place: Place, rank: int, deadline_s: float) -> socket.socket:
    if place.unix and place.machine == mine.machine:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.connect("\0" + place.unix)
            return sock
        except OSError:  # another network namespace of the same machine
            sock.close()
    try:
        return no_delay(socket.create_connection((place.host, place.port), max(0.01, deadline_s - time.monotonic())))
    except OSError as err:
        raise TicketError(f"rank {rank} cannot be reached at {place.host}:{place.port} ({err})", rank) from None


def _receive(caller: socket.socket, most: int) -> bytes:
    try:
        return caller.recv(most)
    except OSError:
        return b""


def _rank_on(card: bytes, job: int) -> int:
    if len(card) < _CALLING_CARD.size:
        return -1
    magic, its_job, rank = _CALLING_CARD.unpack(card)
    return rank if (magic, its_job) == (_MAGIC, job) else -1
