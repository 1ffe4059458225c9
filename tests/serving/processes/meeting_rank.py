"""One rank of two, of which the second takes long to compile a program with a collective.

    python meeting_rank.py COORDINATOR RANK

Prints "seen" and [when this rank had compiled it, when it ran first (both monotonic s), number of compiles].
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from widemesh.serving.agreement import step_schema
from widemesh.serving.job import Job
from widemesh.serving.process_config import ProcessConfig

LATE_S = 1.5


class Slow:
    """A program that rank 1 takes long to compile, and that notes when it was compiled and when it ran first."""

    def __init__(self, program: Any, rank: int):
        self.program, self.rank = program, rank
        self.compiled_s = self.ran_s = 0.0
        self.trace, self.eval_shape = program.trace, program.eval_shape

    def lower(self, *args: Any) -> Slow:
        """Itself, for `compile`."""
        self.lowered = self.program.lower(*args)
        return self

    def compile(self) -> Callable[..., Any]:
        """The compiled program."""
        time.sleep(LATE_S * self.rank)
        compiled = self.lowered.compile()
        self.compiled_s = time.monotonic()

        def call(*args: Any) -> Any:
            self.ran_s = self.ran_s or time.monotonic()
            return compiled(*args)

        return call


if __name__ == "__main__":
    coordinator, rank = sys.argv[1], int(sys.argv[2])
    job = Job.join(ProcessConfig(coordinator=coordinator, num_processes=2, process_id=rank), step_schema(1), {}, 5.0)
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    from widemesh.sharding import EP_AXIS, make_meshes
    from widemesh.sharding.kept import Kept
    from widemesh.sharding.processes import leave_coordinator, meet, start_processes

    start_processes(job.jax_address, rank=rank, size=2)
    mesh = make_meshes(2, 2, num_processes=2).decode
    spec = PartitionSpec(EP_AXIS)
    add = jax.jit(jax.shard_map(lambda x: jax.lax.psum(x, EP_AXIS), mesh=mesh, in_specs=spec, out_specs=spec))
    ones = jax.make_array_from_callback((2,), NamedSharding(mesh, spec), lambda _: np.ones(1, np.float32))
    compiles = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, _, **__: compiles.append(name) if name.endswith("backend_compile_duration") else None
    )
    slow = Slow(add, rank)
    program: Kept[jax.Array] = Kept(slow, has_collectives=True)
    for _ in range(2):
        assert np.asarray(program(ones).addressable_data(0)).tolist() == [2]
    leave_coordinator()
    meet()  # nobody waits any more
    print("seen", json.dumps([slow.compiled_s, slow.ran_s, len(compiles)]), flush=True)
    job.leave("done")
