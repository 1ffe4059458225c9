"""The ticket of several processes: one connection to each peer, blocking sockets, no thread.

A PART of a later exchange may come early; it stays in its socket until it is asked for, since each peer sends parts
of one round only and in order. Two are the most that can wait there: a rank ends an exchange only when all have begun
it.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import time
from collections.abc import Iterable, Mapping

from widemesh.sharding.ticket.base import Values
from widemesh.sharding.ticket.errors import TicketError, TicketLeft, TicketLost, TicketMismatch, TicketTimeout
from widemesh.sharding.ticket.rendezvous import Links, meet
from widemesh.sharding.ticket.schedule import make_schedule
from widemesh.sharding.ticket.schema import Merged, TicketSchema
from widemesh.sharding.ticket.wire import HEADER, MAGIC, Fault, Kind, Peer

# A read blocks this long before the other connections are looked at: a fault is heard after at most that time, and a
# rank that waits long makes 20 rounds of system calls a second.
_SLICE_S = 0.05


class _Round:
    """One round of every exchange, with the pieces of memory that it moves."""

    __slots__ = ("into", "out", "source", "to")

    def __init__(self, to: Peer, source: Peer, out: memoryview, into: memoryview):
        self.to, self.source, self.out, self.into = to, source, out, into


class NetPending:
    """An exchange that has begun."""

    __slots__ = ("_merged", "_ticket")

    def __init__(self, ticket: NetTicket):
        self._ticket, self._merged = ticket, None

    _merged: Merged | None

    def wait(self) -> Merged:
        """See `Pending`."""
        if self._merged is None:
            self._merged = self._ticket.finish()
        return self._merged


class NetTicket:
    """`Ticket` over sockets. Made by `join`."""

    def __init__(self, schema: TicketSchema, rank: int, size: int, links: Links, timeout_s: float):
        self.schema, self.rank, self.size = schema, rank, size
        self.wave = 1
        self.num_exchanges = 0
        self.num_messages = 0  # sent, of all kinds
        self._timeout_s = timeout_s
        self._star = links.star
        schedule = make_schedule(rank, size)
        row_bytes = schema.row_bytes
        rows_from = {turn.source: turn.rows for turn in schedule.rounds}
        self._peers = {
            peer: Peer(_tuned(sock, timeout_s), peer, rows_from.get(peer, 0) * row_bytes)
            for peer, sock in links.peers.items()
        }
        self._out = memoryview(bytearray(HEADER.size + size * row_bytes))
        self._rows = rows = self._out[HEADER.size :]
        self._own = rows[:row_bytes]
        self._position = schedule.position
        self._rounds = [
            _Round(
                self._peers[turn.to],
                self._peers[turn.source],
                self._out[: HEADER.size + turn.rows * row_bytes],
                rows[turn.start * row_bytes : (turn.start + turn.rows) * row_bytes],
            )
            for turn in schedule.rounds
        ]
        self._targets = list({turn.to.rank: turn.to for turn in self._rounds}.values())
        self._bell, self._ear = socket.socketpair()  # `wake` rings, `sleep` listens
        self._bell.setblocking(False)
        self._ear.setblocking(False)
        self._poll = select.poll()
        self._poll.register(self._ear, select.POLLIN)
        self._by_fd = {peer.sock.fileno(): peer for peer in self._peers.values()}
        for fd in self._by_fd:
            self._poll.register(fd, select.POLLIN)
        self._called = 0  # the highest wave that a peer has begun
        self._is_pending = False
        self._sent_rounds = 0
        self._error: TicketError | None = None
        self._abort: TicketError | None = None  # set by another thread
        self._is_closed = False

    @classmethod
    def join(
        cls,
        schema: TicketSchema,
        *,
        rank: int,
        size: int,
        address: str,
        timeout_s: float = 5.0,
        join_timeout_s: float = 60.0,
        digests: Mapping[str, str] | None = None,
    ) -> NetTicket:
        """Meet the other ranks. Rank 0 listens at `address` (host:port), the others come there.

        `timeout_s` is for each exchange, `join_timeout_s` for the meeting. `digests` must be the same on all ranks
        (checkpoint, settings, version): a difference raises TicketMismatch with both values, on all ranks. Other
        reasons not to meet raise TicketError, TicketTimeout among them.
        """
        links = meet(str(schema), rank=rank, size=size, address=address, timeout_s=join_timeout_s, digests=digests)
        return cls(schema, rank, size, links, timeout_s)

    @property
    def num_rounds(self) -> int:
        """Rounds of an exchange: ceil(log2 size)."""
        return len(self._rounds)

    def post(self, values: Values) -> NetPending:
        """See `Ticket`."""
        self._check()
        if self._is_pending:
            raise TicketError("post before the last exchange was waited for; call its wait() first")
        self.schema.pack(values, self._own)
        self._is_pending = True
        if self._rounds:
            self._send_round(0, self.rank)
        return NetPending(self)

    def finish(self) -> Merged:
        """All rounds of the exchange under way; what its `wait` calls."""
        self._check()
        start_s = time.perf_counter()
        last, number, wave = self.rank, self.num_exchanges, self.wave
        for i, turn in enumerate(self._rounds):
            if i:
                self._send_round(i, last)
            source = turn.source
            is_waited_for = source.fill < source.need and not self._is_there(source)
            if is_waited_for:
                self._receive(source, start_s + self._timeout_s)
            magic, kind, round_, _, its_number, its_wave, its_last = HEADER.unpack_from(source.view)
            if magic != MAGIC or kind != Kind.PART or round_ != i or its_number != number or its_wave != wave:
                raise self._diverged(source)
            turn.into[:] = source.rows
            source.fill = 0
            source.blames = -1
            if is_waited_for:  # so the last of its ranks is later than the last of those that were here
                last = its_last
        self.num_exchanges += 1
        self._is_pending = False
        try:
            merged = self.schema.merge(self._rows, self._position)
        except TicketMismatch as err:
            self._error = err  # all ranks have the same rows, so all raise it
            raise
        merged.last_rank = last
        merged.wait_s = time.perf_counter() - start_s
        return merged

    def sleep(self, timeout_s: float | None = None) -> bool:
        """See `Ticket`."""
        self._check()
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            if self.is_called:
                return True
            left_ms = None if deadline_s is None else max(0.0, deadline_s - time.monotonic()) * 1e3
            ready = self._poll.poll(left_ms)
            if not ready:
                return False
            is_woken = False
            for fd, _ in ready:
                peer = self._by_fd.get(fd)
                if peer is None:
                    with contextlib.suppress(BlockingIOError):
                        self._ear.recv(4096)
                    is_woken = True
                    continue
                self._take_in(peer)
                if peer.fill >= HEADER.size and not self.is_called:  # its part of an exchange that is over here
                    raise self._diverged(peer)
            self._check()
            for peer in self._peers.values():
                if peer.has_left:
                    raise self._left(peer)
            if is_woken:
                return True

    def wake(self) -> None:
        """See `Ticket`."""
        with contextlib.suppress(OSError):  # full: it is rung already; closed: nobody sleeps
            self._bell.send(b"\0")

    @property
    def is_called(self) -> bool:
        """See `Ticket`."""
        return self._called >= self.wave

    def begin_wave(self) -> None:
        """See `Ticket`."""
        self._check()
        self._tell(self._targets, Kind.WAKE, 0, 0)

    def end_wave(self) -> None:
        """See `Ticket`. Reads what has come, so that calls do not pile up on a rank that never sleeps."""
        self.wave += 1
        for peer in self._peers.values():
            self._take_in(peer)

    def abort(self, reason: str, rank: int | None = None) -> None:
        """See `Ticket`."""
        self._abort = TicketLost(reason, rank)
        self.wake()

    def take_star(self) -> dict[int, socket.socket]:
        """See `Ticket`."""
        star, self._star = self._star, {}
        return star

    def close(self) -> None:
        """See `Ticket`."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._error is None:
            self._error = TicketError("this ticket is closed", self.rank)
            with contextlib.suppress(TicketError):
                self._tell(self._peers.values(), Kind.LEAVE, 0, 0)
        for peer in self._peers.values():
            peer.hang_up()
        for sock in (*self._star.values(), self._bell, self._ear):
            sock.close()

    def _send_round(self, number: int, last: int) -> None:
        turn = self._rounds[number]
        HEADER.pack_into(self._out, 0, MAGIC, Kind.PART, number, 0, self.num_exchanges, self.wave, last)
        self._sent_rounds = number + 1
        self.num_messages += 1
        try:
            turn.to.send(turn.out)
        except OSError as err:
            raise self._broken(turn.to, err) from None

    def _is_there(self, source: Peer) -> bool:
        """Whether the part of `source` can be had without waiting; then it is in its buffer."""
        self._take_in(source)
        return source.fill == source.need

    def _receive(self, source: Peer, deadline_s: float) -> None:
        """Until the part that `source` owes is here. Blocks in its socket, and looks around between slices."""
        told_s = time.perf_counter()
        while True:
            if source.has_left:
                raise self._left(source)
            try:
                source.read()
            except BlockingIOError:
                self._look_around(source)
                now_s = time.perf_counter()
                if now_s > deadline_s:
                    raise self._late(source) from None
                if now_s - told_s > self._timeout_s / 20:
                    told_s = now_s
                    waited_for = source.rank if source.blames < 0 else source.blames
                    later = [turn.to for turn in self._rounds[self._sent_rounds :]]
                    self._tell(later, Kind.WAITING, 0, waited_for)
                continue
            self._digest(source)
            if source.fill == source.need and source.need > HEADER.size:
                return

    def _look_around(self, source: Peer) -> None:
        """Read what other peers have sent meanwhile: parts of later rounds, or that they gave up."""
        for peer in self._peers.values():
            if peer is not source and not peer.has_left:
                self._take_in(peer)
        self._check()

    def _take_in(self, peer: Peer) -> None:
        """Read without blocking, unless the buffer holds a part already."""
        if peer.fill < peer.need:
            with contextlib.suppress(BlockingIOError):
                peer.read(socket.MSG_DONTWAIT)
                self._digest(peer)

    def _digest(self, peer: Peer) -> None:
        """Act on messages that are not parts. Raises what a FAULT says, or TicketLost for a closed connection."""
        while (message := peer.take_control()) is not None:
            kind, round_, wave, rank = message
            if kind == Kind.WAKE:
                self._called = max(self._called, wave)
            elif kind == Kind.WAITING:
                peer.blames = rank
            elif kind == Kind.LEAVE:
                peer.has_left = True
            elif kind == Kind.FAULT:
                raise self._give_up(_told(Fault(round_), rank, peer.rank), Fault(round_))
        if peer.fill >= HEADER.size:
            self._called = max(self._called, HEADER.unpack_from(peer.view)[5])  # a part calls for its wave too
        if peer.is_gone and not peer.has_left:
            raise self._broken(peer, None)

    def _tell(self, peers: Iterable[Peer], kind: Kind, round_: int, rank: int) -> None:
        message = HEADER.pack(MAGIC, kind, round_, 0, self.num_exchanges, self.wave, rank)
        for peer in peers:
            self.num_messages += 1
            try:
                peer.send(message)
            except OSError as err:
                if kind not in (Kind.FAULT, Kind.LEAVE):
                    raise self._broken(peer, err) from None

    def _check(self) -> None:
        if self._error is None and self._abort is not None:
            raise self._give_up(self._abort, Fault.LOST)
        if self._error is not None:
            raise self._error

    def _late(self, source: Peer) -> TicketError:
        rank = source.rank if source.blames < 0 else source.blames
        heard = "" if rank == source.rank else f" (rank {source.rank} waits for it)"
        error = TicketTimeout(
            f"rank {rank} did not send its part of exchange {self.num_exchanges} within {self._timeout_s:g} s{heard}",
            rank,
        )
        return self._give_up(error, Fault.TIMEOUT)

    def _broken(self, peer: Peer, err: OSError | None) -> TicketError:
        if isinstance(err, BlockingIOError):
            error: TicketError = TicketTimeout(f"rank {peer.rank} took nothing for {self._timeout_s:g} s", peer.rank)
            return self._give_up(error, Fault.TIMEOUT)
        for _ in range(0 if err is None else 3):  # it may have said why before it closed, behind two parts at most
            if not peer.has_left:
                peer.fill = 0
                self._take_in(peer)
        if peer.has_left:
            return self._left(peer)
        return self._give_up(TicketLost(f"rank {peer.rank} has closed its connection", peer.rank), Fault.LOST)

    def _left(self, peer: Peer) -> TicketError:
        return self._give_up(TicketLeft(f"rank {peer.rank} has left", peer.rank), Fault.LEFT)

    def _diverged(self, peer: Peer) -> TicketError:
        _, _, _, _, number, wave, _ = HEADER.unpack_from(peer.view)
        rank = peer.rank
        mine = f"exchange={self.num_exchanges}, wave={self.wave} on rank {self.rank}"
        error = TicketMismatch(
            f"{mine} but exchange={number}, wave={wave} on rank {rank}; all ranks must take the same steps, restart "
            "them together",
            rank,
        )
        return self._give_up(error, Fault.DIVERGED)

    def _give_up(self, error: TicketError, fault: Fault) -> TicketError:
        """Remember the error and tell the peers, once; they raise the same about the same rank."""
        if self._error is None:
            self._error = error
            rank = self.rank if error.rank is None else error.rank
            self._tell(self._peers.values(), Kind.FAULT, fault, rank)
        return self._error


def _told(fault: Fault, rank: int, by: int) -> TicketError:
    what = {
        Fault.TIMEOUT: (TicketTimeout, f"rank {rank} did not send its part in time, as rank {by} says"),
        Fault.LOST: (TicketLost, f"rank {rank} is lost, as rank {by} says"),
        Fault.DIVERGED: (TicketMismatch, f"rank {rank} is at another exchange or wave than its peers, rank {by} says"),
        Fault.LEFT: (TicketLeft, f"rank {rank} has left, as rank {by} says"),
    }
    error, message = what[fault]
    return error(message, rank)


def _tuned(sock: socket.socket, timeout_s: float) -> socket.socket:
    """Blocking, with time limits of the kernel's: a call that is served at once is one system call."""
    sock.setblocking(True)
    for option, limit_s in ((socket.SO_RCVTIMEO, _SLICE_S), (socket.SO_SNDTIMEO, timeout_s)):
        sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(limit_s), int(limit_s % 1 * 1e6)))
    return sock
