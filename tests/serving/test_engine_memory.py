"""What an engine holds is what the plan says, to the byte, on every device."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from widemesh.eplb import EplbConfig
from widemesh.model.checkpoint import Checkpoint
from widemesh.model.forward import load_engram_hash
from widemesh.serving import Engine, EngineConfig
from widemesh.serving.device import DeviceEngine
from widemesh.serving.expert_mover import migration_programs
from widemesh.serving.memory_plan import MeshMemory, plan_memory
from widemesh.serving.mesh_state import MeshState
from widemesh.sharding import make_meshes

CACHE = {"page pool", "window rings", "compressor rings", "page tables"}


def held_bytes(tree: Any, device: jax.Device) -> int:
    """That the arrays of a tree take on one device."""
    shards = (shard for leaf in jax.tree.leaves(tree) for shard in leaf.addressable_shards)
    return sum(shard.data.nbytes for shard in shards if shard.device == device)


def check(planned: MeshMemory, held: MeshState, **others: Any) -> None:
    """`others`: arrays that are not in `held`, by the name of their part."""
    parts = {part.name: part.num_bytes for part in planned.parts if part.kind != "step"}
    assert planned.ranks == held.ranks and parts.keys() >= CACHE
    arrays = {"parameters": held.parameters, "rotary tables": held.rope, "page pool": held.cache,
              "expert maps": [placed.replicas for placed in held.experts], **others}  # fmt: skip
    parts["parameters"] += parts.pop("Engram tables")
    parts["page pool"] += sum(parts.pop(name) for name in CACHE - {"page pool"})
    for device in held.programs.mesh.devices.flat:
        assert {name: held_bytes(tree, device) for name, tree in arrays.items()} == parts


def test_state_and_parameters(engine: Engine) -> None:
    plan, device = plan_memory(engine.model_config, engine.config), engine.device
    check(plan.prefill, device.prefill)
    check(plan.decode, device.decode, **{"penalty tallies": device._tally, "expert load": device.expert_loads})
    layout = device.decode.cache.layout
    assert layout.page_bytes == plan.page_bytes == plan.bytes_per_token * engine.config.page_size


@pytest.mark.parametrize("drafts", [0, 3])
def test_with_moving_experts(engine_config: EngineConfig, drafts: int) -> None:
    """The arrays of an engine that has compiled nothing, of its draft too."""
    eplb = EplbConfig(num_redundant_experts=8, window_size=20, step_interval=60, slice_rows=3)
    draft_eplb = EplbConfig(num_redundant_experts=4 if drafts else 0, window_size=15, step_interval=60, slice_rows=2)
    config = dataclasses.replace(engine_config, enable_eplb=True, eplb=eplb, draft_eplb=draft_eplb,
                                 num_speculative_tokens=drafts)  # fmt: skip
    checkpoint = Checkpoint.open(config.model, drafts)
    engram_hash = load_engram_hash(checkpoint.config, config.model)
    meshes = make_meshes(config.prefill_devices, config.decode_devices)
    device, plan = DeviceEngine(config, checkpoint, engram_hash, meshes), plan_memory(checkpoint.config, config)
    names = ("expert", "draft expert")[: len(device.decode.experts)]
    moving = [migration_programs(device.decode.programs, model) for model in range(len(names))]
    staging = {f"{name} staging": programs.stage() for name, programs in zip(names, moving, strict=True)}
    check(plan.prefill, device.prefill)
    check(plan.decode, device.decode, **{"penalty tallies": device._tally, "expert load": device.expert_loads,
                                         **staging})  # fmt: skip
    planned = {part.name: part.num_bytes for part in plan.decode.parts}
    for name, programs, each in zip(names, moving, (eplb, draft_eplb), strict=False):
        rows = staging[f"{name} staging"].rows
        assert planned[f"{name} commit"] == held_bytes(rows, meshes.decode.devices.flat[0])
        ends = jax.ShapeDtypeStruct((device.decode.ranks, each.slice_rows), jnp.int32)
        given = programs.layer, programs.abstract_staging, ends, ends, jnp.int32(0)
        copy = programs.copy(each.slice_rows).lower(*given).compile()
        assert 1 <= copy.memory_analysis().temp_size_in_bytes / planned[f"{name} slice"] < 1.01
    assert ("draft expert staging" in planned) == (drafts > 0) == (len(names) == 2)
