"""Messages between ranks, and the connection that they come by.

A message is a header of 24 bytes (native byte order: all ranks run on machines of one kind) and, in a PART, rows of
int32. The other kinds are headers alone.

    magic u32 | kind u8 | round u8 | 0 u16 | exchange i64 | wave i32 | rank i32
"""

from __future__ import annotations

import contextlib
import enum
import socket
import struct

from widemesh.sharding.ticket.errors import TicketError

MAGIC = 0x774D5401
HEADER = struct.Struct("=IBBHqii")


class Kind(enum.IntEnum):
    """What a message says. `rank` is, in this order: who came last, nothing, who is waited for, who failed, nothing."""

    PART = 1
    WAKE = 2
    WAITING = 3
    FAULT = 4
    LEAVE = 5


class Fault(enum.IntEnum):
    """Why a rank gave up; lies in `round` of a FAULT."""

    TIMEOUT = 1
    LOST = 2
    DIVERGED = 3
    LEFT = 4


class Peer:
    """The connection to one rank. A PART is read into a buffer of its own size, so a later one waits in the socket.

    `rows_bytes` is the size of the parts that this peer sends, 0 if it sends none.
    """

    __slots__ = ("blames", "fill", "has_left", "is_gone", "need", "rank", "rows", "sock", "view")

    def __init__(self, sock: socket.socket, rank: int, rows_bytes: int):
        self.sock, self.rank = sock, rank
        self.need = HEADER.size + rows_bytes
        self.view = memoryview(bytearray(self.need))
        self.rows = self.view[HEADER.size :]
        self.fill = 0
        self.has_left = False  # said so
        self.is_gone = False  # closed without a word
        self.blames = -1  # the rank that it says it is waiting for

    def read(self, flags: int = 0) -> None:
        """Add to the buffer what has come. Raises BlockingIOError when nothing has; sets `is_gone` at the end."""
        try:
            count = self.sock.recv_into(self.view[self.fill :], 0, flags)
        except BlockingIOError:
            raise
        except OSError:
            count = 0
        self.fill += count
        self.is_gone = count == 0

    def take_control(self) -> tuple[int, int, int, int] | None:
        """(kind, round, wave, rank) of the next message that is not a PART, taken out of the buffer; None if there
        is none in whole."""
        if self.fill < HEADER.size:
            return None
        magic, kind, round_, _, _, wave, rank = HEADER.unpack_from(self.view)
        if magic != MAGIC:
            raise TicketError(f"rank {self.rank} sent what is no ticket message; restart all ranks", self.rank)
        if kind == Kind.PART:
            return None
        rest = bytes(self.view[HEADER.size : self.fill])
        self.view[: len(rest)] = rest
        self.fill = len(rest)
        return kind, round_, wave, rank

    def send(self, message: memoryview | bytes) -> None:
        """Send all of it. Raises OSError; BlockingIOError when the peer has read nothing for the socket's timeout."""
        sent = self.sock.send(message)
        while sent < len(message):
            sent += self.sock.send(memoryview(message)[sent:])

    def hang_up(self) -> None:
        """Close. What was sent still arrives: unread bytes would turn the end into a reset, so they are read."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_WR)
            while self.sock.recv(65536, socket.MSG_DONTWAIT):
                pass
        self.sock.close()
