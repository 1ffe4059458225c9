"""What is handed over lies with its rank; the idle arrays beside it take no program."""

from __future__ import annotations

import jax
import numpy as np

from widemesh.serving.compile_counter import CompileCounter
from widemesh.serving.transfer import InProcessTransfer
from widemesh.sharding import make_mesh, named_sharding
from widemesh.sharding.own_ranks import OwnRanks


def test_a_rank_gets_its_part_and_nothing_compiles(compiles: CompileCounter) -> None:
    mesh = make_mesh(jax.devices()[:2])
    transfer, sharding = InProcessTransfer(mesh, OwnRanks.of(mesh)), named_sharding(mesh, ("expert", None))
    handed = jax.device_put(np.arange(6, dtype=np.int32).reshape(2, 3), jax.devices()[2])
    jax.clear_caches()  # a program that made the idle arrays would show
    before = compiles.total
    for rank in (0, 1, -1):  # the idle array of rank 0 is first wanted here for rank 1
        arrived = transfer.send(handed, rank, sharding)  # type: ignore[arg-type,type-var] # a tree of one array
        want = np.zeros((2, 2, 3), np.int32)
        if rank >= 0:
            want[rank] = handed
        np.testing.assert_array_equal(np.asarray(arrived).reshape(2, 2, 3), want)  # type: ignore[call-overload]
    assert compiles.total == before
    assert transfer.moved_bytes == 2 * 24
