"""Several processes as one JAX: starting it, and leaving its coordinator before serving begins.

JAX's coordinator compares notes while meshes and collectives are set up. It also watches the processes, and when one
is lost it ends the others with an abort signal, at once if the lost one is process 0. So that a job can say what has
happened and end by itself, all leave the coordinator together once every program has run; from then on a lifeline
(`sharding/ticket`) is the only watch.
"""

from __future__ import annotations

import jax

HEARTBEAT_S = 100  # of JAX's own watch, while it lasts; longer than any ticket's timeout
_START_S = 300  # for all processes to come
_LEAVE_S = 600  # for the slowest to have run every program


def start_processes(address: str, *, rank: int, size: int) -> None:
    """Join the others at JAX's coordinator, which rank 0 starts there. Before anything else of JAX runs.

    Afterwards `jax.devices()` are those of all processes. Raises RuntimeError if JAX runs already or nobody answers.
    """
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)  # takes SIGTERM for itself, and the server never stops
    jax.distributed.initialize(
        address, size, rank, initialization_timeout=_START_S, heartbeat_timeout_seconds=HEARTBEAT_S,
        shutdown_timeout_seconds=_LEAVE_S,
    )  # fmt: skip


def leave_coordinator() -> None:
    """Wait for all processes, then do without the coordinator. Collectives that have run before go on working."""
    jax.distributed.shutdown()
