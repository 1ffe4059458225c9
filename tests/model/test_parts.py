"""Layers in parts over `tp` are the whole ones, also where activations are quantised or rounded in between."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from widemesh.model.attention import Attention
from widemesh.model.engram import Engram
from widemesh.model.moe import MoE
from widemesh.model.presets import TINY_MESH
from widemesh.model.step import StepContext
from widemesh.sharding import AllGatherExchange, LocalExchange, TensorParallel, make_mesh, partition_spec

ROWS = 24
ROUNDING = ["w8a8", "reference"]


def filled(module: nnx.Module) -> tuple[nnx.GraphDef, nnx.State]:
    """Graph and random parameters."""
    rng = np.random.default_rng(0)
    graph, state = nnx.split(module)
    flat = [(path, p.replace(rng.normal(size=p.get_value().shape).astype(np.float32) / p.get_value().shape[-1] ** 0.5))
            for path, p in nnx.to_flat_state(state)]  # fmt: skip
    return graph, nnx.from_flat_state(flat)


def run_whole_and_in_parts(module, run, step: StepContext, *args, ep: int = 1, tp: int = 4):
    """`run(module, step, *args)` on one device and on a mesh; arguments [B, ...] lie over `ep`, as the rows do."""
    graph, state = filled(module)
    spec = PartitionSpec("ep")
    specs = jax.tree.map(lambda p: p.replace(partition_spec(p.axes)), state,
                         is_leaf=lambda node: isinstance(node, nnx.Variable))  # fmt: skip

    def on(state, rows, *args, settings):
        return run(nnx.merge(graph, state), StepContext(rows, step.rope, settings), *args)

    exchange = AllGatherExchange() if ep > 1 else LocalExchange()
    parts = dataclasses.replace(step.settings, tp=TensorParallel(size=tp), exchange=exchange)
    whole = jax.jit(lambda *a: on(*a, settings=step.settings))(state, step.rows, *args)
    mapped = jax.shard_map(lambda *a: on(*a, settings=parts), mesh=make_mesh(jax.devices()[: ep * tp], tp),
                           in_specs=(specs, *[spec] * (1 + len(args))), out_specs=spec, check_vma=False)  # fmt: skip
    return np.asarray(whole, np.float32), np.asarray(jax.jit(mapped)(state, step.rows, *args), np.float32)


def check(whole, parts, numerics):
    """Sums in another order; where they are rounded to bfloat16, few of them to a neighbour."""
    scale = np.abs(whole).max()
    if numerics != "reference":
        np.testing.assert_allclose(parts, whole, rtol=1e-5, atol=1e-6 * scale)
        return
    np.testing.assert_allclose(parts, whole, rtol=2**-7, atol=2**-9 * scale)
    assert (parts == whole).mean() > 0.98


def activations(*shape):
    return np.random.default_rng(1).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize(
    ("numerics", "implementation", "ep", "tp"),
    [("plain", "dense", 1, 4), ("w8a8", "grouped", 2, 2), ("reference", "dense", 1, 4), ("reference", "grouped", 2, 2)],
)
def test_experts(context, numerics, implementation, ep, tp):
    """Most rows go to the same experts, so that the grouped form has rows left over, not as many on every rank."""
    step = context(TINY_MESH, np.zeros((2, 80)), numerics=numerics)
    step = dataclasses.replace(
        step, settings=dataclasses.replace(step.settings, moe_implementation=implementation)
    )
    x = activations(2, 80, TINY_MESH.hidden_size)
    x[:, :65] = x[0, 0]
    check(*run_whole_and_in_parts(MoE(TINY_MESH), lambda moe, step, x: moe(x, step), step, x, ep=ep, tp=tp), numerics)


@pytest.mark.parametrize("numerics", ROUNDING)
def test_output_projection_of_some_heads(context, numerics):
    """The input of the second product is quantised in blocks that no cut divides."""
    step = context(TINY_MESH, np.zeros((1, ROWS)), numerics=numerics)
    heads = activations(1, ROWS, TINY_MESH.num_attention_heads, TINY_MESH.head_dim)

    def run(attention, step, heads):
        held = attention.attn_sink.get_value().shape[0]
        first = held * jax.lax.axis_index("tp") if step.settings.tp.size > 1 else 0
        return attention.project(jax.lax.dynamic_slice_in_dim(heads, first, held, axis=2), step)

    check(*run_whole_and_in_parts(Attention(TINY_MESH, TINY_MESH.roles[0]), run, step, heads), numerics)


@pytest.mark.parametrize("numerics", ROUNDING)
def test_engram_columns(context, numerics):
    """Rows are put together before they are quantised, outputs after each has been rounded."""
    step = context(TINY_MESH, np.zeros((1, ROWS)), numerics=numerics)
    ids = np.random.default_rng(2).integers(0, 1618, step.rows.engram_rows.shape).astype(np.int32)
    step = dataclasses.replace(step, rows=dataclasses.replace(step.rows, engram_rows=ids))
    streams = activations(1, ROWS, TINY_MESH.hc_mult, TINY_MESH.hidden_size)
    check(*run_whole_and_in_parts(Engram(TINY_MESH, 1), lambda engram, step, x: engram(x, step), step, streams),
          numerics)  # fmt: skip
