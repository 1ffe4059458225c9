"""What single ranks do in the tests of exchanges and of the rendezvous. Imports no jax and no pytest."""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import socket
import time
from typing import Any

import numpy as np

from widemesh.sharding.ticket import Field, Merged, NetTicket, TicketError, TicketSchema, links

SCHEMA = TicketSchema(
    (
        Field("step", "equal"),
        Field("top", "max"),
        Field("low", "min"),
        Field("total", "sum"),
        Field("every", "all"),
        Field("some", "any"),
    )
)


def mine(rank: int, step: int) -> dict[str, int]:
    """A rank's values: different in every rank and step, also negative."""
    value = (rank * 7919 + step * 104729) % 1000 - 500
    return {"step": step, "top": value, "low": value * 3, "total": value + 2**30, "every": value, "some": value > 450}


def seen(merged: Merged) -> list[Any]:
    """All that a merged ticket says."""
    names = [field.name for field in SCHEMA.fields]
    return [[merged.value(name) for name in names], [merged.by_rank(name).tolist() for name in names]]


def expected(size: int, step: int) -> list[Any]:
    """The same from all ranks' values."""
    rows = [mine(rank, step) for rank in range(size)]
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    columns |= {name: [int(bool(value)) for value in columns[name]] for name in ("every", "some")}
    merge = {"step": max, "top": max, "low": min, "total": sum, "every": min, "some": max}
    return [[merge[name](column) for name, column in columns.items()], list(columns.values())]


def failure(error: TicketError, start_s: float) -> dict[str, Any]:
    """An error as the tests look at it."""
    return {"error": type(error).__name__, "message": str(error), "rank": error.rank, "s": time.monotonic() - start_s}


def keep_to_tcp(rank: int) -> None:
    """Let this process pass for one on a machine of its own."""
    place = links.Door.place
    links.Door.place = lambda door, host: dataclasses.replace(place(door, host), machine=str(rank))  # type: ignore


def every_size(rank: int, size: int, address: str, ports: list[int], steps: int) -> list[Any]:
    """Groups of 1, 2, ... `size` ranks, one after the other; of each what this rank saw."""
    saw = []
    for count, port in enumerate(ports, start=1):
        if rank >= count:
            saw.append(None)
            continue
        ticket = NetTicket.join(SCHEMA, rank=rank, size=count, address=f"127.0.0.1:{port}")
        is_right = all(seen(ticket.post(mine(rank, step)).wait()) == expected(count, step) for step in range(steps))
        saw.append([is_right, ticket.num_rounds, ticket.num_messages])
        ticket.close()
    return saw


def at_random_times(rank: int, size: int, address: str, steps: int, tcp: bool) -> list[bool]:
    """Ranks that dawdle before and after posting, so that parts of the next exchange are there before this one's."""
    if tcp:
        keep_to_tcp(rank)
    ticket, draw = NetTicket.join(SCHEMA, rank=rank, size=size, address=address), random.Random(rank)
    is_right = []
    for step in range(steps):
        if draw.random() < 0.4:
            time.sleep(draw.random() * 0.01)
        pending = ticket.post(np.array(list(mine(rank, step).values()), np.int32))
        if draw.random() < 0.4:
            time.sleep(draw.random() * 0.01)
        merged = pending.wait()
        is_right.append(seen(merged) == expected(size, step) and pending.wait() is merged)
    ticket.close()
    return is_right


def with_a_late_rank(rank: int, size: int, address: str, late: int) -> list[Any]:
    """`last_rank` and `wait_s` of an exchange that one rank begins 0.2 s after the others."""
    ticket = NetTicket.join(SCHEMA, rank=rank, size=size, address=address)
    ticket.post(mine(rank, 0)).wait()
    if rank == late:
        time.sleep(0.2)
    merged = ticket.post(mine(rank, 1)).wait()
    ticket.close()
    return [merged.last_rank, merged.wait_s]


def until_it_fails(
    rank: int, size: int, address: str, culprit: int, act: str, timeout_s: float, tcp: bool
) -> dict[str, Any]:
    """Exchanges until one raises; in the fourth `culprit` does what `act` says."""
    if tcp:
        keep_to_tcp(rank)
    ticket = NetTicket.join(SCHEMA, rank=rank, size=size, address=address, timeout_s=timeout_s)
    start_s = time.monotonic()
    try:
        for step in range(10):
            if step == 3 and rank == culprit:
                if act == "die":
                    os.kill(os.getpid(), signal.SIGKILL)
                elif act == "stop":
                    os.kill(os.getpid(), signal.SIGSTOP)
                elif act == "stall":
                    time.sleep(timeout_s * 3)
                elif act == "leave":
                    ticket.close()
                    return {"error": None}
                elif act == "skip a step":
                    step = 4
                elif act == "skip a wave":
                    ticket.end_wave()
                elif act == "abort":
                    ticket.abort("no more devices", rank)
            start_s = time.monotonic()
            ticket.post(mine(rank, step)).wait()
    except TicketError as error:
        found = failure(error, start_s)
        try:
            ticket.post(mine(rank, 0))
        except TicketError as again:
            found["again"] = again is error
        time.sleep(0.3)  # so that nobody hears of the failure from this process's end
        ticket.close()
        return found
    return {"error": None}


def join(rank: int, size: int, address: str, said: list[dict[str, Any]], delays_s: list[float]) -> dict[str, Any]:
    """Join with what `said` has for this process, after a while; exchange once."""
    time.sleep(delays_s[rank])
    start_s = time.monotonic()
    try:
        ticket = NetTicket.join(SCHEMA, **{"address": address, "rank": rank, "size": size, **said[rank]})
        ticket.post(mine(rank, 0)).wait()
        ticket.close()
    except TicketError as error:
        return failure(error, start_s)
    return {"error": None}


def join_again(rank: int, size: int, address: str, comes_back: bool) -> dict[str, Any]:
    """Rank 1 is killed when it has come, as a process of its own, and may be started again; the last comes after."""
    if rank != 1:
        return join(rank, size, address, [{"join_timeout_s": 2.0}] * size, [0.0, 0.0, 1.2])
    first = os.fork()
    if first == 0:
        join(1, size, address, [{}] * size, [0.0] * size)
        os._exit(1)
    time.sleep(0.6)
    os.kill(first, signal.SIGKILL)
    os.waitpid(first, 0)
    return join(1, size, address, [{}] * size, [0.0] * size) if comes_back else {"error": None}


def join_with_strangers_at_the_door(rank: int, size: int, address: str) -> dict[str, Any]:
    """Before any peer, some connect to each rank's own port and say nothing, nonsense, or half of what a peer says."""
    connect, strangers = links.Door.connect, []

    def after_strangers(door: links.Door, *args: Any) -> Any:
        for words in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0", b""):
            strangers.append(socket.create_connection(("127.0.0.1", door.place("").port)))
            strangers[-1].sendall(words)
        strangers.pop().close()
        return connect(door, *args)

    links.Door.connect = after_strangers  # type: ignore[method-assign]
    start_s = time.monotonic()
    return join(rank, size, address, [{}] * size, [0.0] * size) | {"s": time.monotonic() - start_s}


def join_among_strangers(rank: int, size: int, address: str) -> dict[str, Any]:
    """The last rank is none: it connects to rank 0, says nothing or nonsense, and stays."""
    if rank < size - 1:
        return join(rank, size - 1, address, [{}] * size, [0.0, *[0.3] * (size - 1)])
    host, port = address.split(":")
    callers = []
    for words in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\2[]", b"\0\0\0\5{\"a\":"):
        while True:
            try:
                caller = socket.create_connection((host, int(port)))
                break
            except ConnectionRefusedError:
                time.sleep(0.01)
        caller.sendall(words)
        callers.append(caller)
    time.sleep(1.0)
    return {"error": None}


NEEDS = TicketSchema(
    (
        Field("step", "equal"),
        Field("loads", "max"),
        Field("rows", "max"),
        Field("want_drafts", "any"),
        Field("is_ready", "all"),
        Field("has_work", "any"),
    )
)


def dispatch_by_the_ticket(
    rank: int, size: int, address: str, steps: int, idle: int, full: int, never_ready: int
) -> dict[str, Any]:
    """The programs that a rank would dispatch, from merged tickets alone, with needs that differ on every rank.

    A request of each rank is resolved at another step; `idle` has none at all; `full` has no room for drafts;
    `never_ready` blocks whatever wants all ranks.
    """
    ticket, draw, programs = NetTicket.join(NEEDS, rank=rank, size=size, address=address), random.Random(rank), []
    not_ready: set[int] = set()
    busy: list[int] = []
    for step in range(steps):
        is_idle = rank == idle
        values = {
            "step": step,
            "loads": int(not is_idle and step % (rank + 2) == 0),
            "rows": 0 if is_idle else draw.randrange(1, 9),
            "want_drafts": int(not is_idle and rank != full and step % 3 == 0),
            "is_ready": int(rank != never_ready),
            "has_work": int(not is_idle),
        }
        merged = ticket.post(values).wait()
        programs += ["load"] * merged.value("loads")
        programs.append(f"decode {merged.value('rows')}")
        programs += ["draft"] * merged.value("want_drafts")
        programs += ["reshuffle"] * merged.value("is_ready")
        not_ready |= set(np.flatnonzero(merged.by_rank("is_ready") == 0).tolist())
        busy.append(int(merged.by_rank("has_work").sum()))
    ticket.close()
    return {"programs": programs, "not_ready": sorted(not_ready), "busy": sorted(set(busy))}
