"""The plan counts the arrays that are really made, to the byte, and the released model's figures come out of it."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from widemesh.eplb import EplbConfig, build_maps, initial_placement
from widemesh.eplb.window import NEXT_ROW
from widemesh.model.cache import init_cache, page_layout
from widemesh.model.config import ConfigError
from widemesh.model.loading import place_parameters, read_parameters, split_model
from widemesh.model.numerics import numerics_named
from widemesh.model.presets import FLASH, PRESETS
from widemesh.model.random_weights import random_tensors
from widemesh.model.rope import RopeTables
from widemesh.model.step import ReplicaMaps, Rows, StepContext, StepSettings, selection_form
from widemesh.serving.config import EngineConfig
from widemesh.serving.expert_load import ExpertLoad, LoadRecorder
from widemesh.serving.memory_plan import MeshMemory, format_bytes, plan_memory, rank_cache
from widemesh.serving.sampling import init_tally
from widemesh.sharding import make_mesh

TINY = [name for name in PRESETS if name.startswith("tiny-")]
STATE = ("page pool", "window rings", "compressor rings", "page tables")


def nbytes(tree):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def parts(mesh: MeshMemory):
    return {part.name: part.num_bytes for part in mesh.parts}


def test_released_figures():
    plan = plan_memory(FLASH, EngineConfig(numerics="kvq"))
    assert (plan.bytes_per_token, plan.page_bytes) == (890, 56960)
    assert plan.window_bytes_per_slot == 40 * 160 * 528 == 3379200
    assert plan.window_bytes_needed == 40 * 128 * 528 == 2703360
    shown = plan.to_json()
    assert type(shown["bytes_per_token"]) is int and shown["page_bytes"] == 56960


@pytest.mark.parametrize("page_size", [2, 16, 64, 256])
@pytest.mark.parametrize(("numerics", "per_token"), [("kvq", 890), ("w8a8", 890), ("plain", 4 * (512 + 128) * 5 // 2)])
def test_a_released_token_costs_the_same_in_pages_of_any_size(page_size, numerics, per_token):
    plan = plan_memory(FLASH, EngineConfig(numerics=numerics, page_size=page_size))
    assert plan.bytes_per_token == per_token and plan.page_bytes == page_size * per_token


def test_a_released_pool_grows_by_whole_pages_and_nothing_else():
    small, large = (plan_memory(FLASH, EngineConfig(num_pages=pages)) for pages in (1000, 1001))
    assert small.prefill == large.prefill
    assert parts(large.decode) == parts(small.decode) | {"page pool": 1001 * 56960}
    assert large.total_bytes - small.total_bytes == 4 * 56960


@pytest.mark.parametrize(("preset", "numerics"), list(itertools.product(TINY, ["kvq", "plain"])))
def test_state_is_what_a_built_cache_holds(preset, numerics):
    model = PRESETS[preset]
    config = EngineConfig(numerics=numerics, page_size=16, max_model_len=100, max_num_seqs=6, decode_devices=2,
                          num_pages=33, num_prefill_pages=21)  # fmt: skip
    plan, sizes = plan_memory(model, config), config.scheduler
    layout = page_layout(model, numerics_named(numerics), 16)
    for mesh, slots, pages in ((plan.prefill, 1, 21), (plan.decode, 3, 33)):
        cache = init_cache(model, layout, slots=slots, pages=pages, table_pages=sizes.pages_per_slot)
        found = parts(mesh)
        assert sum(found[name] for name in STATE) == nbytes(cache)
        assert found["page pool"] == cache.pages.nbytes == pages * plan.page_bytes
        assert found["window rings"] == nbytes([layer.window for layer in cache.layers])
        assert found["window rings"] == slots * plan.window_bytes_per_slot
        assert found["compressor rings"] == nbytes([layer.open_group for layer in cache.layers]) > 0
        assert found["page tables"] == cache.table.nbytes == slots * 7 * 4
        read = sum(layer.window[0, : model.sliding_window].nbytes for layer in cache.layers)
        assert read == plan.window_bytes_needed < plan.window_bytes_per_slot
    assert "penalty tallies" not in parts(plan.prefill)
    assert parts(plan.decode)["penalty tallies"] == nbytes(init_tally(3, model.vocab_size))


@pytest.mark.parametrize("ranks", [1, 2])
def test_parameters_and_tables_are_what_a_rank_gets(ranks):
    model = PRESETS["tiny-structure"]  # 4 experts
    plan = plan_memory(model, EngineConfig(max_model_len=100, prefill_devices=ranks, decode_devices=1))
    slots = model.n_routed_experts // ranks
    shapes = expert_shapes(model)
    owner = np.arange(slots, dtype=np.int32)  # what one rank holds
    state = place_parameters(read_parameters(model, shapes.__getitem__, owner), make_mesh(jax.devices()[:1]))
    found = parts(plan.prefill)
    whole_tables = 4 * sum(model.engram_num_embeddings) * model.engram_head_dim
    assert found["parameters"] == nbytes(state) - whole_tables
    rows = [-(-rows // ranks) for rows in model.engram_num_embeddings]
    assert found["Engram tables"] == 4 * sum(rows) * model.engram_head_dim
    assert found["rotary tables"] == nbytes(RopeTables.build(model, 128))


def test_released_parameters_as_they_are_stored():
    """45.9 GB on each of 8 ranks: 36.1 of experts, 7.2 of other layer weights, 2.6 of embedding and head.

    The Engram tables are 202.8 GB in all, an eighth on each.
    """
    config = EngineConfig(numerics="serving", prefill_devices=8, decode_devices=8)
    plan = plan_memory(FLASH, config, platform="gpu")
    found = parts(plan.decode)
    experts = 40 * 48 * 18_800_640
    assert found["parameters"] == 45_945_119_168 and found["parameters"] - experts == 9_847_890_368
    assert found["Engram tables"] == (48_000_771 + 48_002_086) * 264
    assert plan.bytes_per_token == 890  # packed pages, as with kvq
    f32 = parts(plan_memory(FLASH, config, platform="cpu").decode)
    assert f32 == parts(plan_memory(FLASH, dataclasses.replace(config, numerics="kvq")).decode)
    assert f32["parameters"] > 6 * found["parameters"]
    assert plan.decode.kind_bytes("step") < 2**30


def expert_shapes(model):
    """A zero for every tensor of a checkpoint, by name."""
    return {name: np.zeros(tensor.shape, np.float32) for name, tensor in random_tensors(model, 0)}


def test_step_arrays_grow_with_rows_times_the_longest_request():
    config = EngineConfig(max_model_len=1023, page_size=64, max_num_batched_tokens=256, prefill_devices=2,
                          max_num_seqs=8, decode_devices=4)  # fmt: skip
    plan = plan_memory(FLASH, config)
    prefill, decode = parts(plan.prefill), parts(plan.decode)
    assert prefill["index scores"] == 128 * 1024 * 4  # rows x entries at ratio 1 x 4 B
    assert decode["index scores"] == 2 * 1024 * 4  # one row of each of 2 slots
    assert prefill["candidate masks"] == 3 * 128 * 1024
    assert prefill["logits"] == 128 * FLASH.vocab_size * 4 and decode["logits"] == 2 * FLASH.vocab_size * 4
    longer = plan_memory(FLASH, dataclasses.replace(config, max_model_len=4 * 1024 - 1))
    wider = plan_memory(FLASH, dataclasses.replace(config, max_num_batched_tokens=512))
    assert parts(longer.prefill)["index scores"] == 4 * prefill["index scores"]
    assert parts(longer.decode)["index scores"] == 4 * decode["index scores"]
    assert parts(wider.prefill)["index scores"] == 2 * prefill["index scores"]
    assert parts(wider.decode)["index scores"] == decode["index scores"]


def test_the_longest_released_prompt_is_planned_without_allocating():
    plan = plan_memory(FLASH, EngineConfig(max_model_len=1048576, num_pages=10**9))
    assert parts(plan.decode)["page pool"] == 10**9 * 56960
    # The table has room for the newest token too, hence one page more.
    assert parts(plan.prefill)["index scores"] == 128 * (1048576 + 64) * 4


def test_any_number_of_slots_is_planned_without_allocating():
    model = PRESETS["tiny-mesh"]
    plan = plan_memory(model, EngineConfig(max_num_seqs=10**12, decode_devices=4))
    assert parts(plan.decode)["penalty tallies"] == 10**12 // 4 * (model.vocab_size * 4 + model.vocab_size // 8)


@pytest.mark.parametrize("redundant", [0, 8, 32])
def test_what_moving_experts_takes(redundant):
    """A layer's rows of a rank twice, those of a slice, the slots of redundant experts in every layer, and the ring.

    In float32, with a checksum of four bytes for a row that is on its way.
    """
    model, ranks = PRESETS["tiny-mesh"], 8
    slots, row_bytes = (16 + redundant) // ranks, 3 * model.hidden_size * model.moe_intermediate_size * 4
    eplb = EplbConfig(num_redundant_experts=redundant, window_size=50, slice_rows=2)
    with_it = EngineConfig(decode_devices=ranks, enable_eplb=True, eplb=eplb)
    without = dataclasses.replace(with_it, enable_eplb=False, eplb=EplbConfig())
    found, before = (plan_memory(model, config, "cpu") for config in (with_it, without))
    assert found.prefill == before.prefill
    on, off = parts(found.decode), parts(before.decode)
    layers, copies = model.num_hidden_layers, min(redundant + 1, 8)
    assert model.n_routed_experts == 16
    assert {name: on[name] - off.get(name, 0) for name in on if on[name] != off.get(name)} == {
        "expert staging": slots * (row_bytes + 4), "expert commit": slots * row_bytes,
        "expert slice": (1 + ranks) * 2 * (row_bytes + 4),  # those that a rank sends, and those of all ranks
        "expert load": layers * (51 * slots - 2 * 2) * 4,  # the ring and the newest step; one row is always there
    } | ({
        "parameters": layers * (slots - 2) * row_bytes, "expert maps": layers * 16 * (copies - 1) * 4,
    } if redundant else {})  # fmt: skip
    assert on.keys() - off.keys() == {"expert staging", "expert slice", "expert commit"}


@pytest.mark.parametrize("redundant", [0, 8, 16])
def test_what_moving_the_drafts_experts_takes(redundant):
    """As of the target's, with its own settings and numbers: 8 experts in each of 3 layers."""
    model, ranks = PRESETS["tiny-mesh"], 8
    slots, row_bytes = (8 + redundant) // ranks, 3 * model.hidden_size * model.moe_intermediate_size * 4
    both = EngineConfig(decode_devices=ranks, num_speculative_tokens=2, enable_eplb=True, eplb=EplbConfig(
        num_redundant_experts=8, window_size=50), draft_eplb=EplbConfig(num_redundant_experts=redundant, window_size=20,
                                                                        slice_rows=1))  # fmt: skip
    without = dataclasses.replace(both, enable_eplb=False, eplb=EplbConfig(), draft_eplb=EplbConfig())
    alone = dataclasses.replace(both, num_speculative_tokens=0, draft_eplb=EplbConfig())
    of_both, before, of_target, of_none = (
        parts(plan_memory(model, config, "cpu").decode)
        for config in (both, without, alone, dataclasses.replace(without, num_speculative_tokens=0))
    )
    layers, copies = model.num_nextn_predict_layers, min(redundant + 1, 8)
    assert (layers, model.dspark_n_routed_experts) == (3, 8)
    grown = {name: of_both[name] - before.get(name, 0) for name in of_both}
    target = {name: of_target[name] - of_none.get(name, 0) for name in of_target}
    assert {name: size - target.get(name, 0) for name, size in grown.items() if size != target.get(name, 0)} == {
        "draft expert staging": slots * (row_bytes + 4), "draft expert commit": slots * row_bytes,
        "draft expert slice": (1 + ranks) * (row_bytes + 4),
        "expert load": layers * (21 * slots - 2) * 4,
    } | ({
        "parameters": layers * (slots - 1) * row_bytes, "expert maps": layers * 8 * (copies - 1) * 4,
    } if redundant else {})  # fmt: skip


def test_a_slice_needs_less_where_there_is_a_collective():
    """Of two released rows of 18.8 MB each: those that a rank sends and those that it receives."""
    config = EngineConfig(numerics="serving", prefill_devices=8, decode_devices=8, enable_eplb=True,
                          eplb=EplbConfig(slice_rows=2))  # fmt: skip
    assert parts(plan_memory(FLASH, config, "gpu").decode)["expert slice"] == 2 * 2 * (18_800_640 + 4)


@pytest.mark.parametrize(("rows", "slots"), [(256, 1), (1, 8)])
def test_the_compiler_needs_about_what_the_plan_says_of_a_step(rows, slots):
    """A model of three layers, so that it compiles in seconds; 2000 tokens."""
    model = dataclasses.replace(
        PRESETS["tiny-structure"], num_hidden_layers=3, compress_ratios=(0, 1, 1, 0, 0), kv_source_layer_ids=(1,),
        index_source_layer_ids=(1, 2), candidate_source_layer_id=1, engram_layer_ids=(), engram_num_embeddings=(),
    )  # fmt: skip
    config = EngineConfig(max_model_len=2000, max_num_batched_tokens=rows, prefill_devices=1, max_num_seqs=slots,
                          decode_devices=1)  # fmt: skip
    sizes, plan = config.scheduler, plan_memory(model, config)
    mesh, pages = (plan.prefill, sizes.prefill_pages) if rows > 1 else (plan.decode, sizes.decode_pages)
    cache, (graph, state) = rank_cache(model, config, slots=slots, pages=pages), split_model(model)
    numerics, positions = numerics_named(config.numerics), sizes.pages_per_slot * config.page_size
    settings = StepSettings(numerics=numerics, selection=selection_form(rows, numerics), start_bound=positions - 1)

    def step(parameters, cache, load, batch, rope, replicas):
        recorder, transformer = LoadRecorder(), nnx.merge(graph, parameters)
        context = StepContext(batch, rope, settings, recorder, replicas=replicas)
        hidden, cache = transformer(cache, context)
        load = None if load is None else load.after(recorder.load(), jnp.int32(NEXT_ROW))
        return transformer.logits(hidden, context), cache, load

    layout = config.expert_layouts(model)[0]
    maps = build_maps(initial_placement(layout), layout.num_experts, layout.max_copies)
    replicas = ReplicaMaps(maps.expert_slots, maps.copies)
    load = ExpertLoad.zeros(1, config.load_windows[0], layout.num_layers, layout.num_slots) if rows == 1 else None

    rope = RopeTables.build(model, positions)
    one, many = np.zeros(slots, np.int32), np.zeros((slots, rows), np.int32)
    batch = Rows.of(many, one, one, np.zeros((slots, rows, 0, model.num_engram_columns), np.int32))
    program = jax.jit(step, donate_argnums=(1, 2), keep_unused=True)
    used = program.lower(state, cache, load, batch, rope, replicas).compile().memory_analysis()
    kept = mesh.kind_bytes("parameters") + mesh.kind_bytes("state") - parts(mesh).get("penalty tallies", 0)
    assert kept == used.argument_size_in_bytes - nbytes(batch)
    assert 0.5 < used.temp_size_in_bytes / mesh.kind_bytes("step") < 1.3


def test_totals_are_sums_of_the_parts():
    plan = plan_memory(PRESETS["tiny-mesh"], EngineConfig(prefill_devices=2, decode_devices=4))
    shown = plan.to_json()
    assert shown["ranks"] == {"prefill": 2, "decode": 4}
    for mesh in plan.meshes:
        assert shown["totals"][mesh.name] == mesh.ranks * sum(shown["per_rank"][mesh.name].values())
        assert mesh.rank_bytes == sum(mesh.kind_bytes(kind) for kind in ("parameters", "state", "step"))
    assert shown["totals"]["all"] == shown["totals"]["prefill"] + shown["totals"]["decode"] == plan.total_bytes


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"page_size": 3}, "page_size=3 must hold whole groups of every compress ratio; use a multiple of 2"),
        ({"prefill_devices": 3}, "prefill_devices=3 must divide the model's n_routed_experts=16; use prefill_devices=2 "
         "or 4"),
        ({"prefill_devices": 6, "tensor_parallel_size": 2}, "prefill_devices=6 / tensor_parallel_size=2 must divide "
         "the model's n_routed_experts=16; use prefill_devices=4 or 8"),
        ({"decode_devices": 32, "max_num_seqs": 32}, "decode_devices=32 must divide the model's n_routed_experts=16; "
         "use decode_devices=16$"),
        ({"decode_devices": 32, "max_num_seqs": 32, "enable_eplb": True}, "num_redundant_experts=0 does not suit "
         "num_experts=16 on 32 ranks with at most 8 copies of each; use 16, 48, 80 or 112$"),
        ({"enable_eplb": True, "eplb": EplbConfig(num_redundant_experts=4, slice_rows=6)}, "slice_rows=6 is more than "
         "the 5 expert slots that a rank has in a layer; use 1 to 5$"),
        ({"max_model_len": 5000}, "max_model_len=5000 exceeds the model's max_position_embeddings=4096; use at most"),
    ],
)
def test_settings_that_the_model_cannot_have_are_refused(settings, sentence):
    model, config = PRESETS["tiny-mesh"], EngineConfig(**settings)
    for check in (config.check_model, lambda model: plan_memory(model, config)):
        with pytest.raises(ConfigError, match=sentence):
            check(model)


def test_a_bounded_tail_needs_its_engram_layers_below_the_cut():
    """Rows that the tail leaves out would miss an Engram layer above it."""
    model = PRESETS["tiny-mesh"]
    above = model.replay_cut + 1
    model = dataclasses.replace(model, engram_layer_ids=(1, above))
    with pytest.raises(ConfigError, match=f"Engram layer {above} lies above layer {model.replay_cut}; use replay_tail"):
        EngineConfig().check_model(model)
    EngineConfig(replay_tail="full").check_model(model)


def test_tokens_drawn_by_one_dispatch_take_no_ring_rows():
    """They are accepted one by one: nothing ever goes back over them."""
    model = PRESETS["tiny-mesh"]
    plans = [plan_memory(model, EngineConfig(decode_steps=steps)) for steps in (1, 40)]
    assert plans[0].window_bytes_per_slot == plans[1].window_bytes_per_slot


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (3 << 30, "3.0 GiB"), (1 << 50, "1024.0 TiB"),
     (1048575, "1.0 MiB"), (1048524, "1023.9 KiB"), ((1 << 40) - 1, "1.0 TiB")],
)
def test_units(num_bytes, text):
    assert format_bytes(num_bytes) == text
