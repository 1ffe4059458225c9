"""How ranks find each other: all come to rank 0, which compares what they say and gives everybody the table of places.

Messages are JSON with their length in front, one each way. Rank 0 answers everybody, also with a refusal.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import logging
import os
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from typing import Any

from widemesh.sharding.ticket.addresses import family_of, split_address
from widemesh.sharding.ticket.errors import TicketError, TicketMismatch, TicketTimeout
from widemesh.sharding.ticket.links import Door, Place, no_delay

_PROTOCOL = "widemesh-ticket-1"
_LENGTH = struct.Struct("!I")
_MAX_BYTES = 1 << 20
_RETRY_S = 0.05
_REFUSAL_S = 2.0  # after a refusal, rank 0 waits this long for ranks that have not come yet, to tell them too
_log = logging.getLogger(__name__)
_ERRORS = {cls.__name__: cls for cls in (TicketError, TicketTimeout, TicketMismatch)}


@dataclasses.dataclass(frozen=True)
class Links:
    """A rank's connections: to those that it exchanges with, and between rank 0 and every other."""

    peers: dict[int, socket.socket]
    star: dict[int, socket.socket]


def meet(
    schema: str, *, rank: int, size: int, address: str, timeout_s: float, digests: Mapping[str, str] | None = None
) -> Links:
    """Find all ranks and connect to the peers of `rank`. Raises TicketError, TicketMismatch or TicketTimeout."""
    host, port = split_address(address)
    if size < 1 or not 0 <= rank < size:
        raise TicketError(f"rank={rank} must be from 0 to size - 1 with size={size}")
    if size == 1:
        return Links({}, {})
    deadline_s = time.monotonic() + timeout_s
    hello = {
        "protocol": _PROTOCOL, "rank": rank, "size": size, "process": f"{socket.gethostname()}:{os.getpid()}",
        "digests": {"ticket fields": schema, **(digests or {})},
    }  # fmt: skip
    meeting = _host if rank == 0 else _visit
    return meeting(hello, host, port, timeout_s, deadline_s)


def _host(hello: dict[str, Any], host: str, port: int, timeout_s: float, deadline_s: float) -> Links:
    """Rank 0's part."""
    with contextlib.ExitStack() as stack:
        listener, bound = _listen(host, port)
        stack.enter_context(listener)
        door = Door(bound)
        stack.callback(door.close)
        hello["place"] = dataclasses.asdict(door.place(""))
        hall = _Hall(hello)
        stack.callback(hall.close)
        for sock in _callers(listener, deadline_s, hall):
            hall.take(sock)
        if hall.refusal is None and hall.missing:
            hall.refusal = TicketTimeout(
                f"ranks {hall.missing} of {hello['size']} did not come to {host}:{port} within {timeout_s:g} s; start "
                "them, or raise the time to join",
                hall.missing[0],
            )
        job = secrets.randbits(31)
        hall.answer(job)
        peers = door.connect(0, hall.places(), job, deadline_s)
        return Links(peers, hall.take_star())


class _Hall:
    """Everybody who has come to rank 0."""

    def __init__(self, hello: dict[str, Any]):
        self.size: int = hello["size"]
        self.refusal: TicketError | None = None
        self._hellos = {0: hello}
        self._sockets: dict[int, socket.socket] = {}
        self._refused: list[socket.socket] = []
        self.refused_since_s = 0.0

    @property
    def missing(self) -> list[int]:
        """Ranks that have not come."""
        return [rank for rank in range(self.size) if rank not in self._hellos]

    @property
    def is_full(self) -> bool:
        """As many have come as there are ranks, in whatever order."""
        return len(self._hellos) + len(self._refused) >= self.size

    def take(self, caller: tuple[socket.socket, dict[str, Any]]) -> None:
        """Seat a caller by rank, or note why not."""
        sock, hello = caller
        rank: Any = hello.get("rank")
        problem = self._problem(rank, hello)
        if problem is None:
            self._hellos[rank] = hello
            self._sockets[rank] = sock
            if not self.missing and self.refusal is None:
                self.refusal = _compare({of: said["digests"] for of, said in sorted(self._hellos.items())})
            return
        self._refused.append(sock)
        if self.refusal is None:
            self.refusal = TicketError(problem, rank if isinstance(rank, int) else None)
            self.refused_since_s = time.monotonic()

    def unseat(self, sock: socket.socket) -> None:
        """A caller is gone; another process may have its rank. Those who were refused keep their count."""
        for rank, seated in self._sockets.items():
            if seated is sock:
                _log.warning("rank %d has gone while others are waited for; it may come again", rank)
                del self._sockets[rank], self._hellos[rank]
                sock.close()
                return

    def _problem(self, rank: Any, hello: dict[str, Any]) -> str | None:
        """Why a caller cannot be seated."""
        protocol, size = hello.get("protocol"), hello.get("size")
        if protocol != _PROTOCOL:
            return f"protocol={protocol!r} on rank {rank} but {_PROTOCOL!r} on rank 0; use one version"
        if size != self.size:
            return f"size={size} on rank {rank} but size={self.size} on rank 0; give all the number of processes"
        if not isinstance(rank, int) or not 0 <= rank < self.size:
            return f"rank={rank} must be from 0 to size - 1 with size={self.size}"
        if rank in self._hellos:
            both = f"{self._hellos[rank]['process']} and {hello.get('process')}"
            return f"rank={rank} was given to two processes, {both}; give each its own"
        return None

    def places(self) -> dict[int, Place]:
        """Of all ranks."""
        return {rank: Place(**hello["place"]) for rank, hello in sorted(self._hellos.items())}

    def answer(self, job: int) -> None:
        """Send everybody the table, or the refusal, which is raised then."""
        if self.refusal is None:
            reply: dict[str, Any] = {"job": job, "places": [dataclasses.asdict(p) for p in self.places().values()]}
        else:
            reply = {"error": type(self.refusal).__name__, "message": str(self.refusal), "rank": self.refusal.rank}
        for sock in (*self._sockets.values(), *self._refused):
            with contextlib.suppress(OSError):  # gone already; its peers will notice
                _send(sock, reply)
        if self.refusal is not None:
            raise self.refusal

    def take_star(self) -> dict[int, socket.socket]:
        """The connections, which are the caller's from now on."""
        star, self._sockets = self._sockets, {}
        return star

    def close(self) -> None:
        """Hang up on all."""
        for sock in (*self._sockets.values(), *self._refused):
            sock.close()


def _callers(
    listener: socket.socket, deadline_s: float, hall: _Hall
) -> Iterator[tuple[socket.socket, dict[str, Any]]]:
    """Everybody who comes and says hello, until all have come or it is time. Others are hung up on.

    Who has said hello waits for the answer and has no more to say: a connection that can be read has been closed.
    """
    unheard: dict[socket.socket, bytearray] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        try:
            while not hall.is_full:
                until_s = deadline_s if hall.refusal is None else min(deadline_s, hall.refused_since_s + _REFUSAL_S)
                left_s = until_s - time.monotonic()
                if left_s <= 0:
                    return
                for key, _ in selector.select(left_s):
                    if key.fileobj is listener:
                        sock, _ = listener.accept()
                        sock.setblocking(False)
                        unheard[sock] = bytearray()
                        selector.register(sock, selectors.EVENT_READ)
                        continue
                    sock = key.fileobj  # type: ignore[assignment]
                    if sock not in unheard:
                        selector.unregister(sock)
                        hall.unseat(sock)
                        continue
                    heard = unheard[sock]
                    more = _receive(sock)
                    heard += more
                    whole, hello = _parse(heard)
                    if whole or not more:
                        del unheard[sock]
                        if hello is None:
                            selector.unregister(sock)
                    if hello is not None:
                        sock.settimeout(max(0.1, deadline_s - time.monotonic()))
                        yield no_delay(sock), hello
                    elif whole or not more:
                        sock.close()
        finally:
            for sock in unheard:
                sock.close()


def _receive(sock: socket.socket) -> bytes:
    try:
        return sock.recv(65536)
    except OSError:
        return b""


def _parse(heard: bytearray) -> tuple[bool, dict[str, Any] | None]:
    """(nothing more is to come, the message); None for one that is not whole or not ours."""
    if len(heard) < _LENGTH.size:
        return False, None
    (length,) = _LENGTH.unpack_from(heard)
    if length > _MAX_BYTES:
        return True, None
    if len(heard) < _LENGTH.size + length:
        return False, None
    try:
        message = json.loads(heard[_LENGTH.size : _LENGTH.size + length])
    except ValueError:
        return True, None
    return True, message if isinstance(message, dict) else None


def _visit(hello: dict[str, Any], host: str, port: int, timeout_s: float, deadline_s: float) -> Links:
    """Every other rank's part."""
    with contextlib.ExitStack() as stack:
        star = _reach(host, port, timeout_s, deadline_s)
        stack.callback(star.close)
        mine = star.getsockname()[0]
        door = Door(mine)
        stack.callback(door.close)
        hello["place"] = dataclasses.asdict(door.place(mine))
        reply = _ask(star, hello, f"{host}:{port}", timeout_s, deadline_s)
        if "error" in reply:
            raise _ERRORS.get(reply["error"], TicketError)(reply["message"], reply["rank"])
        places = {rank: Place(**place) for rank, place in enumerate(reply["places"])}
        places[0] = dataclasses.replace(places[0], host=star.getpeername()[0])
        peers = door.connect(hello["rank"], places, reply["job"], deadline_s)
        stack.pop_all()
        door.close()
        return Links(peers, {0: star})


def _reach(host: str, port: int, timeout_s: float, deadline_s: float) -> socket.socket:
    """A connection to rank 0, tried again until it is there: ranks start in any order."""
    while True:
        left_s = deadline_s - time.monotonic()
        try:
            return no_delay(socket.create_connection((host, port), max(0.01, left_s)))
        except OSError as err:
            if left_s <= _RETRY_S:
                raise TicketError(
                    f"rank 0 cannot be reached at {host}:{port} within {timeout_s:g} s ({err}); check the address, and "
                    "that rank 0 runs",
                    0,
                ) from None
            time.sleep(_RETRY_S)


def _ask(star: socket.socket, hello: dict[str, Any], where: str, timeout_s: float, deadline_s: float) -> dict[str, Any]:
    """Say hello and return the answer, which comes when all ranks are there."""
    heard = bytearray()
    try:
        star.settimeout(max(0.01, deadline_s - time.monotonic()))
        _send(star, hello)
        while True:
            star.settimeout(max(0.01, deadline_s - time.monotonic()))
            more = star.recv(65536)
            heard += more
            whole, reply = _parse(heard)
            if reply is not None:
                return reply
            if whole or not more:
                raise TicketError(f"rank 0 at {where} has hung up without an answer; see what it says itself", 0)
    except TimeoutError:
        raise TicketTimeout(f"rank 0 at {where} did not have all ranks within {timeout_s:g} s", 0) from None
    except OSError as err:
        raise TicketError(f"rank 0 at {where} has hung up ({err}); see what it says itself", 0) from None


def _send(sock: socket.socket, message: dict[str, Any]) -> None:
    data = json.dumps(message).encode()
    sock.sendall(_LENGTH.pack(len(data)) + data)


def _compare(digests: Mapping[int, Mapping[str, str]]) -> TicketMismatch | None:
    """All that is not the same on all ranks, with the ranks that say so."""
    problems, culprit = [], None
    for name in dict.fromkeys(name for of_rank in digests.values() for name in of_rank):
        by_value: dict[str, list[int]] = {}
        for rank, of_rank in digests.items():
            by_value.setdefault(of_rank.get(name, "(nothing)"), []).append(rank)
        if len(by_value) > 1:
            culprit = min(ranks[0] for ranks in by_value.values() if ranks[0] > 0) if culprit is None else culprit
            problems.append(
                " but ".join(
                    f"{name}={value} on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
                    for value, ranks in by_value.items()
                )
            )
    if not problems:
        return None
    return TicketMismatch(f"{'; '.join(problems)}; start all ranks with the same model, settings and version", culprit)


def _listen(host: str, port: int) -> tuple[socket.socket, str]:
    """At the address itself, or on all interfaces where it is not one of this machine's (a service's name)."""
    try:
        try:
            return socket.create_server((host, port), family=family_of(host), backlog=128), host
        except OSError as err:
            if err.errno != errno.EADDRNOTAVAIL:
                raise
            return socket.create_server(("", port), backlog=128), ""
    except OSError as err:
        raise TicketError(
            f"rank 0 cannot listen at {host}:{port} ({err}); choose a free port, and give rank=0 to one process only", 0
        ) from None
