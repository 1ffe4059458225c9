"""Who is alive: a thread on each rank that beats twice a second, whatever the engine's thread does.

Ranks beat to rank 0 and rank 0 to all of them, on connections of their own. Rank 0 tells everybody of a rank that is
gone, silent or has failed; its own silence each notices by itself. Python's lock is all that can hold a beat up.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import select
import socket
import struct
import threading
import time
from collections.abc import Callable

from widemesh.sharding.ticket.base import Ticket

_FRAME = struct.Struct("=BiH")  # kind, rank, bytes of text that follow
_MAX_TEXT = 2000
_SEND_S = 1.0  # a beat that cannot be sent for so long is given up; silence is for the other side to notice

_log = logging.getLogger(__name__)


class _Kind(enum.IntEnum):
    BEAT = 1
    LEAVE = 2
    FAIL = 3
    STOP = 4


class _Line:
    """One connection: frames out under a lock, frames in on the lifeline's thread."""

    def __init__(self, sock: socket.socket):
        self.sock = sock
        self.heard_s = time.monotonic()
        self._lock = threading.Lock()
        self._buffer = bytearray()
        sock.settimeout(_SEND_S)

    def send(self, kind: _Kind, rank: int, text: str = "") -> None:
        data = text.encode()[:_MAX_TEXT]
        with self._lock, contextlib.suppress(OSError):
            self.sock.sendall(_FRAME.pack(kind, rank, len(data)) + data)

    def frames(self) -> tuple[list[tuple[int, int, str]], bool]:
        """(kind, rank, text) of all that has come, and whether the connection is closed."""
        is_closed = False
        try:
            data = self.sock.recv(65536)
            is_closed = not data
        except OSError:
            data, is_closed = b"", True
        self.heard_s = time.monotonic()
        self._buffer += data
        found = []
        while len(self._buffer) >= _FRAME.size:
            kind, rank, length = _FRAME.unpack_from(self._buffer)
            end = _FRAME.size + length
            if len(self._buffer) < end:
                break
            found.append((kind, rank, self._buffer[_FRAME.size : end].decode(errors="replace")))
            del self._buffer[:end]
        return found, is_closed


class Lifeline:
    """Watches all ranks of a ticket from its construction to `close`, on a daemon thread.

    `on_failure(rank, reason)` is called once, on that thread, for the first rank known to be gone, to have been silent
    for `timeout_s`, or to have said `fail`; just before, the ticket is aborted with the same reason, so that a thread
    in its `sleep` or `wait` comes back. A rank that others gave up hears so itself, with its own number. `on_stop` is
    called instead if the first news of all is that a rank has said `stop`. `remark` ends the sentence about silence.
    """

    def __init__(
        self, ticket: Ticket, on_failure: Callable[[int, str], None], *, timeout_s: float = 5.0,
        interval_s: float = 0.5, on_stop: Callable[[int, str], None] | None = None, remark: str = "",
    ):  # fmt: skip
        self._ticket, self._on_failure, self._on_stop = ticket, on_failure, on_stop or on_failure
        self._limit = timeout_s, remark  # replaced as one
        self._interval_s = min(interval_s, timeout_s / 4)
        self._lines = {rank: _Line(sock) for rank, sock in ticket.take_star().items()}
        self._has_left: set[int] = set()
        self._is_over = threading.Event()
        self._reported = threading.Lock()  # taken for good by who calls `on_failure`, or makes sure that nobody does
        self._thread: threading.Thread | None = None
        if self._lines:
            self._thread = threading.Thread(target=self._run, name="lifeline", daemon=True)
            self._thread.start()

    def set_limit(self, timeout_s: float, remark: str = "") -> None:
        """Silence may last so long from now on; what has lasted until now does not count. Beats stay as they are."""
        for line in self._lines.values():
            line.heard_s = time.monotonic()
        self._limit = timeout_s, remark

    def fail(self, reason: str, rank: int | None = None) -> None:
        """Tell all other ranks that this one cannot go on, because of another `rank` if that is so.

        Sent when it returns; `on_failure` is not called here.
        """
        self._tell(_Kind.FAIL, self._ticket.rank if rank is None else rank, reason)

    def stop(self, reason: str) -> None:
        """Tell all other ranks that this one ends, without their consent but for a good reason. Then `close`.

        Sent when it returns; `on_stop` is not called here.
        """
        self._tell(_Kind.STOP, self._ticket.rank, reason)

    def close(self) -> None:
        """Leave in good order: no failure to anybody, and none is reported here any more."""
        self._reported.acquire(blocking=False)
        self._is_over.set()
        for line in self._lines.values():
            line.send(_Kind.LEAVE, self._ticket.rank)
            with contextlib.suppress(OSError):
                line.sock.shutdown(socket.SHUT_RDWR)  # the thread wakes, and what was sent goes out
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_SEND_S)
        for line in self._lines.values():
            line.sock.close()

    def _tell(self, kind: _Kind, rank: int, reason: str) -> None:
        self._reported.acquire(blocking=False)
        for line in self._lines.values():
            line.send(kind, rank, reason)

    def _run(self) -> None:
        poll = select.poll()
        by_fd = {line.sock.fileno(): rank for rank, line in self._lines.items()}
        for fd in by_fd:
            poll.register(fd, select.POLLIN)
        beat_s = last_s = time.monotonic()
        while not self._is_over.is_set():
            now_s = time.monotonic()
            if now_s - last_s > 2 * self._interval_s:  # this process was stopped, and perhaps the others with it
                for line in self._lines.values():
                    line.heard_s = now_s
            last_s = now_s
            if now_s >= beat_s:
                beat_s = now_s + self._interval_s
                for rank, line in self._lines.items():
                    if rank not in self._has_left:
                        line.send(_Kind.BEAT, self._ticket.rank)
            for fd, _ in poll.poll(max(0.0, beat_s - time.monotonic()) * 1e3):
                if self._is_over.is_set():
                    return
                rank = by_fd[fd]
                if self._hear(rank, self._lines[rank]):
                    poll.unregister(fd)
            # As of before the poll: if this process is stopped here, what has come meanwhile is heard first.
            timeout_s, remark = self._limit
            limit_s = now_s - (timeout_s - 2 * self._interval_s)
            for rank, line in self._lines.items():
                if rank not in self._has_left and line.heard_s < limit_s:
                    self._has_left.add(rank)
                    self._report(rank, f"rank {rank} gave no sign of life for {timeout_s:g} s{remark}")

    def _hear(self, rank: int, line: _Line) -> bool:
        """Take in what a rank says; True when it says no more."""
        frames, is_closed = line.frames()
        for kind, about, text in frames:
            if kind == _Kind.LEAVE:
                self._has_left.add(rank)
            elif kind in (_Kind.FAIL, _Kind.STOP):
                self._report(about, text, _Kind(kind))
        if is_closed and rank not in self._has_left:
            self._has_left.add(rank)
            self._report(rank, f"rank {rank} is gone: its connection was closed")
        return is_closed

    def _report(self, rank: int, reason: str, kind: _Kind = _Kind.FAIL) -> None:
        """Tell the other ranks, which only rank 0 can, and then this one's owner, once."""
        if self._ticket.rank == 0:
            for line in self._lines.values():
                line.send(kind, rank, reason)
        if self._reported.acquire(blocking=False):
            _log.log(logging.ERROR if kind == _Kind.FAIL else logging.WARNING, "%s", reason)
            self._ticket.abort(reason, rank)
            (self._on_failure if kind == _Kind.FAIL else self._on_stop)(rank, reason)
