"""One rank of `widemesh bench ticket`: `python -m ...ticket_ranks KIND RANK SIZE ADDRESS COUNT STEP_MS`.

Prints a JSON object. KIND `ticket` imports no jax; `gloo` is the same vector through jax's all-reduce.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from widemesh.sharding.ticket import WAVE_FIELDS, Field, NetTicket, TicketSchema

_WARM_UP = 50
# Twelve fields, about what an engine agrees on: the merge of each kind that it uses.
_SCHEMA = TicketSchema(
    (
        Field("step", "equal"),
        Field("epoch", "equal"),
        Field("rows", "max"),
        Field("live", "sum"),
        Field("loads", "max"),
        Field("joins", "max"),
        Field("table_entries", "max"),
        Field("want_drafts", "any"),
        Field("is_ready", "all"),
        Field("fault", "max"),
        *WAVE_FIELDS,
    )
)


def time_ticket(rank: int, size: int, address: str, count: int, step_s: float) -> dict[str, Any]:
    """Medians of a whole exchange, and of the wait that is left when a step of `step_s` lies between its ends."""
    ticket = NetTicket.join(_SCHEMA, rank=rank, size=size, address=address, timeout_s=30.0)
    values = {field.name: 1 for field in _SCHEMA.fields}

    def exchange() -> None:
        merged = ticket.post(values).wait()
        assert merged.value("live") == size

    us = _median_us(exchange, count)
    messages = ticket.num_messages / ticket.num_exchanges
    waits = []
    for _ in range(count):
        pending = ticket.post(values)
        time.sleep(step_s)
        waits.append(pending.wait().wait_s)
    rounds = ticket.num_rounds
    ticket.close()
    return {"us": us, "us_wait": statistics.median(waits) * 1e6, "messages": messages, "rounds": rounds}


def time_gloo(rank: int, size: int, address: str, count: int) -> dict[str, Any]:
    """Median of a jitted psum of as many int32 over as many processes, from dispatch to a result that is ready."""
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, size, rank)
    mesh = Mesh(np.array(jax.devices()), ("rank",))
    assert mesh.size == size
    row = NamedSharding(mesh, PartitionSpec("rank"))
    vector = jax.make_array_from_process_local_data(row, np.ones((1, len(_SCHEMA.fields)), np.int32))
    total = jax.jit(
        jax.shard_map(
            lambda part: jax.lax.psum(part, "rank"), mesh=mesh, in_specs=row.spec, out_specs=PartitionSpec()
        )
    )
    assert int(np.asarray(total(vector).addressable_data(0))[0, 0]) == size
    us = _median_us(lambda: jax.block_until_ready(total(vector)), count)
    jax.distributed.shutdown()
    return {"us": us}


def _median_us(call: Callable[[], Any], count: int) -> float:
    for _ in range(_WARM_UP):
        call()
    took_s = []
    for _ in range(count):
        start_s = time.perf_counter()
        call()
        took_s.append(time.perf_counter() - start_s)
    return statistics.median(took_s) * 1e6


def main(args: list[str]) -> None:
    """Entry point of one process."""
    kind, rank, size, address, count, step_ms = args
    if kind == "ticket":
        found = time_ticket(int(rank), int(size), address, int(count), float(step_ms) / 1e3)
    else:
        found = time_gloo(int(rank), int(size), address, int(count))
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
