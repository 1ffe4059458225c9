"""Several processes as one JAX: starting it, first runs of programs, and leaving its coordinator before serving begins.

JAX's coordinator, which runs in process 0, compares notes while meshes and collectives are set up. Each process also
listens to it for bad news, and takes a connection that breaks for some: it ends itself with an abort signal, which
no option of JAX's changes (its callback for that cannot be written in Python). So the others reach the coordinator
through a relay of their own, which does not pass on that it is gone, and a job says itself what has happened, and
ends (`sharding/ticket`'s lifeline is much quicker than JAX's heartbeats). When every program has run, all leave the
coordinator together.

Gloo waits 30 s for the others where a collective runs for the first time, and as long for data in some collectives.
No option of JAX or XLA changes that (https://github.com/jax-ml/jax/issues/40831: its timeout is never set). Compiling
takes longer where processes share few cores, or where the cache of programs is warm for one of them only. So all
compile a program, meet at the coordinator, and run it then (`kept.py`).
"""

from __future__ import annotations

import itertools
from typing import Any

import jax
from jax._src.distributed import global_state  # the only way to JAX's barrier that takes no collective

from widemesh.sharding.relay import Relay

# Of JAX's own watch, while it lasts: it ends a process after half of this at the soonest, later than any ticket.
HEARTBEAT_S = 200
_START_S = 300  # for all processes to come
_LEAVE_S = 600  # for the slowest to have run every program

_MEET_S = 1800  # for the slowest to have compiled one program

_relay: Relay | None = None  # a process has one client of the coordinator's, too
_meetings: itertools.count[int] | None = None  # the number of the next one; None: there is nobody to meet


def start_processes(address: str, *, rank: int, size: int) -> None:
    """Join the others at JAX's coordinator, which rank 0 starts there. Before anything else of JAX runs.

    Afterwards `jax.devices()` are those of all processes. Raises RuntimeError if JAX runs already or nobody answers.
    """
    global _relay, _meetings
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)  # takes SIGTERM for itself, and the server never stops
    if rank:
        _relay = Relay(address, _START_S)
        address = _relay.address
    jax.distributed.initialize(
        address, size, rank, initialization_timeout=_START_S, heartbeat_timeout_seconds=HEARTBEAT_S,
        shutdown_timeout_seconds=_LEAVE_S,
    )  # fmt: skip
    _meetings = itertools.count()


def meet(timeout_s: float = _MEET_S) -> None:
    """Return when all processes have called it as often. After the coordinator is left, or with one process, at once.

    Raises RuntimeError when one does not come in time.
    """
    client: Any = global_state.client  # its type is compiled
    if _meetings is not None:
        client.wait_at_barrier(f"widemesh/{next(_meetings)}", round(timeout_s * 1e3))


def leave_coordinator() -> None:
    """Wait for all processes, then do without the coordinator. Collectives that have run before go on working."""
    global _relay, _meetings
    _meetings = None
    jax.distributed.shutdown()
    if _relay is not None:
        _relay.close()
        _relay = None
