"""What an engine holds is what the plan says, to the byte, on every device."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

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
    arrays = {"parameters": held.parameters, "rotary tables": held.rope, "expert maps": held.replicas,
              "page pool": held.cache, **others}  # fmt: skip
    parts["parameters"] += parts.pop("Engram tables")
    parts["page pool"] += sum(parts.pop(name) for name in CACHE - {"page pool"})
    for device in held.programs.mesh.devices.flat:
        assert {name: held_bytes(tree, device) for name, tree in arrays.items()} == parts


def test_state_and_parameters(engine: Engine) -> None:
    plan, device = plan_memory(engine.model_config, engine.config), engine.device
    check(plan.prefill, device.prefill)
    check(plan.decode, device.decode, **{"penalty tallies": device._tally, "expert load": device.expert_load})
    layout = device.decode.cache.layout
    assert layout.page_bytes == plan.page_bytes == plan.bytes_per_token * engine.config.page_size


def test_with_moving_experts(engine_config: EngineConfig) -> None:
    """The arrays of an engine that has compiled nothing."""
    eplb = EplbConfig(num_redundant_experts=8, window_size=20, step_interval=60, slice_rows=3)
    config = dataclasses.replace(engine_config, enable_eplb=True, eplb=eplb)
    checkpoint = Checkpoint.open(config.model)
    engram_hash = load_engram_hash(checkpoint.config, config.model)
    meshes = make_meshes(config.prefill_devices, config.decode_devices)
    device, plan = DeviceEngine(config, checkpoint, engram_hash, meshes), plan_memory(checkpoint.config, config)
    programs = migration_programs(device.decode.programs)
    staging = programs.stage()
    check(plan.prefill, device.prefill)
    check(plan.decode, device.decode, **{"penalty tallies": device._tally, "expert load": device.expert_load,
                                         "expert staging": staging})  # fmt: skip
    planned = {part.name: part.num_bytes for part in plan.decode.parts}
    assert planned["expert commit"] == held_bytes(staging.rows, meshes.decode.devices.flat[0])
    ends = jax.ShapeDtypeStruct((device.decode.ranks, eplb.slice_rows), jnp.int32)
    given = programs.layer, programs.abstract_staging, ends, ends, jnp.int32(0)
    copy = programs.copy(eplb.slice_rows).lower(*given).compile()
    assert 1 <= copy.memory_analysis().temp_size_in_bytes / planned["expert slice"] < 1.01
