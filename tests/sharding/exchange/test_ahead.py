"""The ragged exchange with the collective itself, compiled for GPUs that are not there: CPUs only run its stand-in."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from widemesh.pallas_kernels.gpu.aot import compile_ahead
from widemesh.pallas_kernels.gpu.toolchain import has_plugin
from widemesh.pallas_kernels.gpu.topology import topology
from widemesh.sharding import make_mesh
from widemesh.sharding.exchange import make_exchange

RANKS, T, K, D, HELD = 4, 8, 2, 64, 4


@pytest.fixture(autouse=True)
def nothing_stored():
    """A program that was stored can only be read back where its devices are."""
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    yield
    jax.config.update("jax_enable_compilation_cache", before)


@pytest.mark.skipif(not has_plugin(), reason="needs pip install 'widemesh[aot]'")
def test_one_gather_of_counts_and_a_ragged_step_each_way() -> None:
    mesh = make_mesh(topology("B200", RANKS))
    platform = mesh.devices.flat[0].platform
    exchange = make_exchange("ragged", axis="ep", platform=platform)

    def layer(x, slots, weights):
        sent = exchange.dispatch(x, slots, weights, HELD, slots)
        y = sent.x.astype(jnp.float32)[:, None] * sent.weights[:, :, None]
        return exchange.combine(jnp.sum(y, axis=1), sent), exchange.combine_pairs(y, sent)

    spec = PartitionSpec("ep")
    run = jax.jit(jax.shard_map(layer, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    shapes = [((RANKS * T, D), jnp.bfloat16), ((RANKS * T, K), jnp.int32), ((RANKS * T, K), jnp.float32)]
    arguments = tuple(jax.ShapeDtypeStruct(*one, sharding=NamedSharding(mesh, spec)) for one in shapes)
    found = {one.kind: one.runs for one in compile_ahead(run, arguments, "B200").collectives}
    assert found == {"all-gather": 1, "ragged-all-to-all": 3}
