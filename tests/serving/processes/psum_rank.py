"""One rank of a job without an engine: it meets the others, then its devices sum with theirs for ever.

    python psum_rank.py COORDINATOR SIZE RANK
"""

from __future__ import annotations

import sys
import time

import numpy as np

from widemesh.serving.agreement import step_schema
from widemesh.serving.job import Job
from widemesh.serving.process_config import ProcessConfig

TIMEOUT_S = 5.0  # of silence

if __name__ == "__main__":
    coordinator, size, rank = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    processes = ProcessConfig(coordinator=coordinator, num_processes=size, process_id=rank)
    job = Job.join(processes, step_schema(1), {}, TIMEOUT_S)
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    from widemesh.sharding import EP_AXIS, make_meshes
    from widemesh.sharding.processes import leave_coordinator, start_processes

    start_processes(job.jax_address, rank=rank, size=size)
    mesh = make_meshes(size, size, num_processes=size).decode
    spec = PartitionSpec(EP_AXIS)
    add = jax.jit(jax.shard_map(lambda x: jax.lax.psum(x, EP_AXIS), mesh=mesh, in_specs=spec, out_specs=spec))
    ones = jax.make_array_from_callback((size,), NamedSharding(mesh, spec), lambda _: np.ones(1, np.float32))
    assert np.asarray(add(ones).addressable_data(0)).tolist() == [size]
    leave_coordinator()
    job.has_loaded(TIMEOUT_S)
    print("ready", flush=True)
    try:
        while True:
            np.asarray(add(ones).addressable_data(0))
    except Exception as err:  # as the engine's loop does
        job.fail(err)
    time.sleep(60)  # the job ends the process
