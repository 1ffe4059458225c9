"""What single ranks do in the tests of waves: a loop like an engine's, with requests that take a number of steps."""

from __future__ import annotations

import collections
import multiprocessing
import random
import threading
import time
from typing import Any

from widemesh.sharding.ticket import WAVE_FIELDS, Field, LocalTicket, NetTicket, Ticket, TicketSchema, WaveControl

SCHEMA = TicketSchema((Field("step", "equal"), Field("wave", "equal"), *WAVE_FIELDS))


class Loop:
    """One rank's engine: a queue of requests, each a number of steps long, and the waves in which it serves them."""

    def __init__(self, ticket: Ticket):
        self.ticket, self.waves = ticket, WaveControl(ticket)
        self.queue: collections.deque[int] = collections.deque()
        self.num_served = self.num_rests = 0
        self.after_post = self.after_settle = lambda: None  # called at the moments that races are about

    def submit(self, steps: int = 1) -> None:
        """From any thread."""
        self.queue.append(steps)
        self.ticket.wake()

    def has_work(self) -> bool:
        return bool(self.queue)

    def turn(self, timeout_s: float = 1.0) -> None:
        """One rest, or one exchange and what it allows."""
        waves = self.waves
        if not waves.is_running:
            self.num_rests += 1
            waves.rest(self.has_work, timeout_s)
            return
        pending = self.ticket.post({"step": waves.num_steps, "wave": waves.wave, **waves.values(self.has_work())})
        self.after_post()
        goes_on = waves.settle(pending.wait())
        self.after_settle()
        if goes_on and self.queue:
            self.queue[0] -= 1
            if self.queue[0] == 0:
                self.queue.popleft()
                self.num_served += 1

    def until(self, is_over: Any, limit_s: float = 20.0) -> bool:
        """Turns until something is so and no wave runs; whether that came to be in time."""
        until_s = time.monotonic() + limit_s
        while self.waves.is_running or not is_over():
            if time.monotonic() > until_s:
                return False
            self.turn(0.05)
        return True


def join(rank: int, size: int, address: str) -> Loop:
    return Loop(NetTicket.join(SCHEMA, rank=rank, size=size, address=address) if size > 1 else LocalTicket(SCHEMA))


class Everybody:
    """What all ranks of a test share: made before they are forked."""

    def __init__(self, size: int, requests: int):
        self.barrier = multiprocessing.Barrier(size)
        self.left = multiprocessing.Value("i", requests)


_shared: dict[str, Everybody] = {}


def prepare(size: int, requests: int = 0, **_: Any) -> None:
    """Runs in the launching process."""
    _shared["all"] = Everybody(size, requests)


def fuzz(rank: int, size: int, address: str, requests: int, seed: int) -> dict[str, Any]:
    """Requests at random moments on random ranks, until all are served; then a second in which nobody does anything."""
    everybody = _shared["all"]
    loop, draw = join(rank, size, address), random.Random(seed)
    arrivals = [(draw.randrange(size), draw.random() ** 6 * 0.02, draw.choice((1, 1, 2, 5))) for _ in range(requests)]

    def arrive() -> None:
        for whose, gap_s, steps in arrivals:
            time.sleep(gap_s)
            if whose == rank:
                loop.submit(steps)

    thread = threading.Thread(target=arrive, daemon=True)
    everybody.barrier.wait(20)
    thread.start()
    told = 0

    def is_over() -> bool:
        nonlocal told
        with everybody.left.get_lock():
            everybody.left.value -= loop.num_served - told
            told = loop.num_served
            return everybody.left.value == 0

    is_done = loop.until(is_over)
    thread.join()
    everybody.barrier.wait(20)
    ticket = loop.ticket
    messages, rests, cpu_s = getattr(ticket, "num_messages", 0), loop.num_rests, time.process_time()
    until_s = time.monotonic() + 1.0
    while time.monotonic() < until_s:
        loop.turn(timeout_s=2.0 if size == 1 else until_s - time.monotonic())
    quiet = [getattr(ticket, "num_messages", 0) - messages, loop.num_rests - rests, time.process_time() - cpu_s]
    everybody.barrier.wait(20)
    mine = sum(whose == rank for whose, _, _ in arrivals)
    ticket.close()
    return {
        "is_done": is_done, "served": loop.num_served, "mine": mine, "steps": loop.waves.num_steps,
        "waves": loop.waves.wave, "quiet": quiet,
    }  # fmt: skip


def work_while_leaving(rank: int, size: int, address: str, requests: int, slow: int, quick: int) -> dict[str, Any]:
    """`slow` leaves every wave late, so the call for the next one, by `quick`, comes before it has left this one.

    `quick` gets its requests when it has just said that it has no work (`requests` even) or has just left.
    """
    everybody, loop, submitted = _shared["all"], join(rank, size, address), 0

    def after_post() -> None:
        nonlocal submitted
        if rank == slow:
            time.sleep(0.01)  # its peers have all parts meanwhile, and leave
        if rank == quick and not loop.queue and submitted < requests and submitted % 2 == 0:
            submitted += 1
            loop.queue.append(1)  # no `wake`: it must be seen without

    def after_settle() -> None:
        nonlocal submitted
        if rank == quick and not loop.waves.is_running and submitted < requests and not loop.queue:
            submitted += 1
            loop.queue.append(1)

    loop.after_post, loop.after_settle = after_post, after_settle
    everybody.barrier.wait(20)
    if rank == quick:
        submitted += 1
        loop.submit()
    told = 0

    def is_over() -> bool:
        nonlocal told
        with everybody.left.get_lock():
            everybody.left.value -= loop.num_served - told
            told = loop.num_served
            return everybody.left.value == 0

    is_done = loop.until(is_over, 10.0)
    everybody.barrier.wait(20)
    loop.ticket.close()
    return {"is_done": is_done, "served": loop.num_served, "steps": loop.waves.num_steps, "waves": loop.waves.wave}


def pause_and_resume(rank: int, size: int, address: str) -> list[Any]:
    """Three ranks vote for a pause one after the other, with work that comes before, during and after it."""
    everybody, loop = _shared["all"], join(rank, size, address)
    waves, said = loop.waves, []

    def note(what: str, wave: int) -> None:
        """The state of this rank at rest before a wave, and that it stays so for a while."""
        assert loop.until(lambda: waves.wave >= wave), f"{what}: rank {rank} is at {waves.wave}"
        everybody.barrier.wait(20)
        until_s = time.monotonic() + 0.1
        loop.until(lambda: time.monotonic() > until_s)
        everybody.barrier.wait(20)
        said.append([what, waves.is_paused, waves.wave, waves.num_steps, loop.num_served])

    def act(who: int, what: Any) -> None:
        if rank == who:
            what()

    everybody.barrier.wait(20)
    note("at rest", 1)
    act(1, waves.pause)
    note("one vote", 2)
    act(2, loop.submit)
    note("work is done although one votes", 3)
    act(0, waves.pause)
    note("two votes", 4)
    act(2, waves.pause)
    note("all vote", 5)
    act(0, loop.submit)
    note("work waits", 5)
    act(2, waves.resume)
    note("one takes its vote back", 6)
    act(1, waves.resume)
    note("two take theirs back", 7)
    act(0, waves.resume)
    note("all go on", 8)
    act(1, lambda: (waves.pause(), waves.resume()))
    note("nothing came of it", 8)
    loop.ticket.close()
    return said


def stale_calls(rank: int, size: int, address: str) -> list[Any]:
    """Calls for waves that are over are ignored, at rest and in a pause; rank 1 repeats one that it has made."""
    everybody, loop = _shared["all"], join(rank, size, address)
    waves, ticket = loop.waves, loop.ticket

    def settle(is_there: Any) -> list[Any]:
        assert loop.until(is_there)
        everybody.barrier.wait(20)
        until_s = time.monotonic() + 0.2
        loop.until(lambda: time.monotonic() > until_s)
        everybody.barrier.wait(20)
        return [waves.wave, waves.num_steps, waves.is_paused]

    def call_for_the_last_wave() -> None:
        if rank == 1:
            ticket.wave -= 1
            ticket.begin_wave()
            ticket.wave += 1

    everybody.barrier.wait(20)
    if rank == 0:
        loop.submit()
    said = [settle(lambda: waves.wave == 2)]
    call_for_the_last_wave()
    said.append(settle(lambda: True))
    waves.pause()
    said.append(settle(lambda: waves.is_paused))
    call_for_the_last_wave()
    said.append(settle(lambda: True))
    loop.ticket.close()
    return said
