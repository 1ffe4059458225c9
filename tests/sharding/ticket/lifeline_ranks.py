"""What single ranks do in the tests of the lifeline."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

from widemesh.sharding.ticket import Field, Lifeline, NetTicket, TicketError, TicketSchema

SCHEMA = TicketSchema((Field("step", "equal"),))


def watch(
    rank: int, size: int, address: str, culprit: int, act: str, timeout_s: float, engine: str, watch_s: float
) -> dict[str, Any]:
    """All watch; after 0.3 s `culprit` does what `act` says. Engines' threads wait for an exchange, or rest: ranks of
    odd numbers in the ticket's sleep, even ones elsewhere, as if held up on a device."""
    ticket = NetTicket.join(SCHEMA, rank=rank, size=size, address=address, timeout_s=30.0)
    heard: list[Any] = []
    is_heard = threading.Event()

    def on_failure(of: int, reason: str) -> None:
        heard.append([of, reason, time.monotonic() - start_s])
        is_heard.set()

    def on_stop(of: int, reason: str) -> None:
        on_failure(of, f"stop: {reason}")

    lifeline = Lifeline(ticket, on_failure, timeout_s=timeout_s, interval_s=0.1, on_stop=on_stop)
    ticket.post({"step": 0}).wait()
    ticket.end_wave()
    start_s = time.monotonic() + 0.3
    if rank == culprit:
        time.sleep(0.3)
        if act in ("die", "stop"):
            os.kill(os.getpid(), signal.SIGKILL if act == "die" else signal.SIGSTOP)
        elif act == "stop and go on":
            if os.fork() == 0:
                time.sleep(timeout_s * 1.5)
                os.kill(os.getppid(), signal.SIGCONT)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGSTOP)
            is_heard.wait(5)
        elif act == "fail":
            lifeline.fail("out of memory on GPU 3")
        elif act == "blame":
            lifeline.fail("rank 3 did not send its part", 3)
        elif act == "leave":
            lifeline.close()
        elif act == "end":
            lifeline.stop("told to")
            lifeline.close()
        if act in ("fail", "blame", "leave", "end"):
            time.sleep(watch_s)
            return {"heard": heard, "raised": None}
    raised = None
    try:
        if engine == "waits":
            ticket.post({"step": 1}).wait()
        elif rank % 2:
            ticket.sleep(watch_s - 0.5)
            is_heard.wait(0.5)  # no rank ends while another sleeps
        else:
            is_heard.wait(watch_s)
    except TicketError as error:
        raised = [type(error).__name__, error.rank, time.monotonic() - start_s]
    if raised is not None:
        is_heard.wait(watch_s)
    if act != "leave":
        time.sleep(timeout_s if act == "stop and go on" else 0.5)  # a rank that ends at once would be taken for lost
    lifeline.close()
    return {"heard": heard, "raised": raised}
