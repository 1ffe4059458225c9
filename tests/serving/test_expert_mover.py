"""The mover on a decode mesh: weights and maps after migrations are those of an engine that was loaded that way."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from widemesh.eplb import EplbConfig, LayerMigration, plan_migration
from widemesh.eplb.mover import Mover
from widemesh.model.checkpoint import Checkpoint
from widemesh.model.forward import load_engram_hash
from widemesh.model.step import ReplicaMaps
from widemesh.serving import EngineConfig
from widemesh.serving.compile_counter import CompileCounter
from widemesh.serving.device import DeviceEngine
from widemesh.serving.expert_load import ExpertLoad
from widemesh.serving.expert_mover import ExpertMover, with_experts
from widemesh.sharding import make_meshes
from widemesh.sharding.migrate import Staging

RANKS, WINDOW = 4, 3


def open_device(checkpoint: Path, **settings: Any) -> DeviceEngine:
    """A device engine over the checkpoint with 4 more slots than experts. It has compiled nothing yet."""
    config = EngineConfig(
        model=str(checkpoint), numerics="plain", max_model_len=32, max_num_seqs=4, page_size=4,
        max_num_batched_tokens=16, replay_prefix="exact", replay_tail="full", enable_eplb=True,
        eplb=EplbConfig(num_redundant_experts=4, window_size=WINDOW, slice_rows=2), **settings,
    )  # fmt: skip
    opened = Checkpoint.open(checkpoint)
    meshes = make_meshes(config.prefill_devices, config.decode_devices, config.tensor_parallel_size)
    return DeviceEngine(config, opened, load_engram_hash(opened.config, str(checkpoint)), meshes)


@pytest.fixture(scope="module")
def device(checkpoint: Path) -> DeviceEngine:
    return open_device(checkpoint, prefill_devices=1, decode_devices=RANKS)


@pytest.fixture(scope="module")
def mover(device: DeviceEngine) -> ExpertMover:
    found = ExpertMover(device)
    found.warm_up()
    return found


def any_placement(device: DeviceEngine, seed: int) -> np.ndarray:
    """Every expert somewhere in every layer, other slots empty or a copy that no rank has twice."""
    rng, layout = np.random.default_rng(seed), device.decode.target.layout
    owner = np.full((layout.num_layers, layout.num_slots), -1, np.int32)
    for layer in owner:
        order = rng.permutation(layout.num_slots)
        layer[order[: layout.num_experts]] = np.arange(layout.num_experts)
        for slot in order[layout.num_experts :]:
            expert, rank = rng.integers(layout.num_experts), slot // layout.slots_per_rank
            if expert not in layer.reshape(layout.ranks, -1)[rank] and (layer == expert).sum() < layout.max_copies:
                layer[slot] = expert
    return owner


def stage(mover: ExpertMover, migration: LayerMigration) -> int:
    """All slices of a layer, and how many rows are bad then."""
    mover.begin(migration.layer)
    for part in migration.slices(mover.rows):
        mover.copy(migration.layer, part)
    return mover.verify(migration).bad_rows()


def migrate(mover: ExpertMover, device: DeviceEngine, wanted: np.ndarray) -> int:
    """From the placement that serves to `wanted`; the number of rows that crossed."""
    state = device.decode
    plan = plan_migration(state.target.slot_owner, wanted, state.target.layout)
    for migration in plan.layers:
        assert stage(mover, migration) == 0
        owner = state.target.slot_owner.copy()
        owner[migration.layer] = migration.slot_owner
        mover.commit(migration, owner)
    return plan.num_transfers


def check_as_loaded(device: DeviceEngine, checkpoint: Path) -> None:
    """Parameters and maps are those that a start with this placement has, but for slots without an expert."""
    state, opened = device.decode, Checkpoint.open(checkpoint)
    wanted = nnx.to_flat_state(state.place(opened.read, opened.stored))
    for (path, found), (_, loaded) in zip(nnx.to_flat_state(state.parameters), wanted, strict=True):
        one, other = found.get_value(), loaded.get_value()
        assert one.sharding == other.sharding
        one, other = np.asarray(one), np.asarray(other)
        if "experts" in path:
            filled = state.target.slot_owner[path[1]] >= 0
            one, other = one[filled], other[filled]
        assert one.tobytes() == other.tobytes(), path


@jax.jit
def a_step(parameters: nnx.State[Any, Any], replicas: ReplicaMaps) -> jax.Array:
    """A program that takes what every decode step takes of a mesh, for a fraction of its compile time."""
    return sum(jnp.sum(leaf.ravel()[:1]) for leaf in jax.tree.leaves((parameters, replicas)))


def test_it_is_a_mover(mover: ExpertMover, device: DeviceEngine) -> None:
    _: Mover = mover
    model = device.model_config
    assert mover.row_bytes == 3 * model.hidden_size * model.moe_intermediate_size * 4
    assert mover.staging_bytes == device.decode.target.layout.slots_per_rank * (mover.row_bytes + 4)
    assert mover.rows == 2


def test_weights_and_maps_are_as_loaded(
    mover: ExpertMover, device: DeviceEngine, checkpoint: Path, compiles: CompileCounter
) -> None:
    state, moved = device.decode, 0
    a_step(state.parameters, state.target.replicas)
    compiles.mark_warm()
    for seed in range(2):
        wanted = any_placement(device, seed)
        moved += migrate(mover, device, wanted)
        assert np.array_equal(state.target.slot_owner, wanted)
        a_step(state.parameters, state.target.replicas)  # knows what a commit has made
    assert compiles.after_warm_up == 0 and moved > 50
    check_as_loaded(device, checkpoint)


def test_each_device_of_a_rank_moves_its_part(checkpoint: Path) -> None:
    device = open_device(checkpoint, prefill_devices=2, decode_devices=4, tensor_parallel_size=2)
    mover = ExpertMover(device)
    assert migrate(mover, device, any_placement(device, 1)) > 20
    check_as_loaded(device, checkpoint)
    assert mover.staging_bytes == device.decode.target.layout.slots_per_rank * (mover.row_bytes // 2 + 4)


def test_a_flipped_bit_is_counted_and_a_new_start_heals_it(mover: ExpertMover, device: DeviceEngine) -> None:
    wanted = any_placement(device, 7)
    migration = plan_migration(device.decode.target.slot_owner, wanted, device.decode.target.layout).layers[0]
    assert stage(mover, migration) == 0
    staging = mover._staging
    assert staging is not None
    rows = np.array(staging.rows["w2"])
    rows.view(np.uint32)[migration.transfers[0, 1], 5, 7] ^= 1 << 9
    corrupt = {**staging.rows, "w2": jax.device_put(rows, staging.rows["w2"].sharding)}
    mover._staging = Staging(rows=corrupt, checksums=staging.checksums)
    assert mover.verify(migration).bad_rows() == 1
    assert stage(mover, migration) == 0


def test_rows_staged_before_a_new_beginning_do_not_pass(mover: ExpertMover, device: DeviceEngine) -> None:
    """Neither another migration of the layer nor a restart of the same one takes them for its own."""
    state = device.decode
    migration = plan_migration(state.target.slot_owner, any_placement(device, 11), state.target.layout).layers[0]
    (first, *rest), total = migration.slices(mover.rows), len(migration.transfers)
    assert rest and stage(mover, migration) == 0
    mover.begin(migration.layer)
    assert mover.verify(migration).bad_rows() == total
    mover.copy(migration.layer, first)
    assert mover.verify(migration).bad_rows() == total - first.num_rows
    for part in rest:
        mover.copy(migration.layer, part)
    assert mover.verify(migration).bad_rows() == 0
    with pytest.raises(ValueError, match=f"layer {migration.layer + 1} has not begun"):
        mover.copy(migration.layer + 1, first)


def test_a_slow_commit_does_not_meet_the_next_layers_rows(
    mover: ExpertMover, device: DeviceEngine, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next layer's copies are dispatched while the commit still waits to read the staging area."""
    state, hand = device.decode, mover._hand
    slow = jax.jit(_after_a_while, out_shardings=state.replicated)
    wanted, owner, overtaken = any_placement(device, 9), state.target.slot_owner.copy(), 0
    plan = plan_migration(owner, wanted, state.target.layout)
    slow(plan.layers[0].commit).block_until_ready()  # compiled
    for migration in plan.layers:
        mover.begin(migration.layer)
        for part in migration.slices(mover.rows):
            mover.copy(migration.layer, part)
        owner = owner.copy()
        owner[migration.layer] = migration.slot_owner
        with monkeypatch.context() as patch:
            patch.setattr(mover, "_hand", lambda index: slow(hand(index)))
            mover.commit(migration, owner)
        made = mover._live(migration.layer)["w1"]
        overtaken += not made.is_ready()
    assert overtaken > len(plan.layers) // 2
    check_as_loaded(device, checkpoint)


def _after_a_while(index: jax.Array) -> jax.Array:
    """The same, some 50 ms later."""
    busy = jax.lax.fori_loop(0, 60, lambda _, x: jnp.tanh(x @ x), jnp.eye(256))
    return index + (busy[0, 0] > 2).astype(jnp.int32)


def fail_to_place(*_: Any) -> Any:
    raise RuntimeError("no room for maps")


def test_a_call_that_raises_changes_nothing(
    mover: ExpertMover, device: DeviceEngine, checkpoint: Path, monkeypatch: pytest.MonkeyPatch,
    compiles: CompileCounter,
) -> None:  # fmt: skip
    state, wanted = device.decode, any_placement(device, 8)
    before, owner = state.parameters, state.target.slot_owner
    migration = plan_migration(owner, wanted, state.target.layout).layers[0]
    (part, *_) = migration.slices(mover.rows)
    compiles.mark_warm()
    mover.begin(migration.layer)

    def fail(*given: Any) -> Any:
        for array in jax.tree.leaves(given[1]):
            array.delete()  # as a donation would
        raise RuntimeError("out of memory")

    programs = mover._programs
    with monkeypatch.context() as patch:
        patch.setattr(mover, "_programs", SimpleNamespace(copy=lambda rows: fail, commit=fail, stage=programs.stage))
        with pytest.raises(RuntimeError, match="out of memory"):
            mover.copy(migration.layer, part)
    with pytest.raises(ValueError, match="a slice has 3 rows where the programs take 2"):
        mover.copy(migration.layer, next(iter(migration.slices(3))))
    assert state.parameters is before and state.target.slot_owner is owner
    assert stage(mover, migration) == 0  # in another staging area
    maps = state.target.replicas
    with monkeypatch.context() as patch:
        patch.setattr("widemesh.serving.placed_experts.place_everywhere", fail_to_place)
        with pytest.raises(RuntimeError, match="no room for maps"):
            mover.commit(migration, wanted)
    assert state.parameters is before and state.target.slot_owner is owner and state.target.replicas is maps
    assert compiles.after_warm_up == 0
    check_as_loaded(device, checkpoint)


def test_readings_are_of_the_window_and_of_the_newest_step(
    mover: ExpertMover, device: DeviceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout, rng = device.decode.target.layout, np.random.default_rng(0)
    shape = (layout.num_layers, layout.slots_per_rank)
    ring = rng.integers(0, 50, (RANKS, WINDOW, *shape)).astype(np.int32)
    last = rng.integers(0, 50, (RANKS, *shape)).astype(np.int32)
    rows = np.full(RANKS, 2, np.int32)
    load = device.decode.put(ExpertLoad(ring, rows, last))  # type: ignore[arg-type]
    monkeypatch.setattr(device, "expert_loads", (load,))
    window, step = mover.read_window(), mover.read_step()
    for reading, counted in ((window, ring[:, :2]), (step, last[:, None])):
        jax.block_until_ready(reading.summary)
        assert reading.is_ready()
        found = reading.value()
        assert found.load_by_slot.dtype == np.int64
        by_slot = counted.sum(axis=1).swapaxes(0, 1).reshape(layout.num_layers, -1)
        np.testing.assert_array_equal(found.load_by_slot, by_slot)
        by_rank = counted.sum(axis=-1)
        assert found.balancedness == pytest.approx(by_rank.mean(axis=0).sum() / by_rank.max(axis=0).sum())
    monkeypatch.setattr(device, "expert_loads", jax.tree.map(jnp.zeros_like, device.expert_loads))
    assert mover.read_window().value().balancedness == 0.0


def test_only_one_layers_arrays_are_others(device: DeviceEngine) -> None:
    before = device.decode.parameters
    made = {"w1": jnp.zeros(1), "w3": jnp.ones(1), "w2": jnp.ones(2)}
    held = {path: variable.get_value() for path, variable in nnx.to_flat_state(before)}
    after = dict(nnx.to_flat_state(with_experts(before, 2, made)))
    path = ("layers", 2, "ffn", "experts")
    for where, variable in after.items():
        wanted = made[where[-1]] if where[:-1] == path else held[where]
        assert variable.get_value() is wanted
    assert jax.tree.structure(with_experts(before, 2, made)) == jax.tree.structure(before)
    assert all(variable.get_value() is held[where] for where, variable in nnx.to_flat_state(before))
