"""What expert slots are sent, as decode steps count it, and the ring that keeps a window of it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from widemesh.eplb import EplbConfig, ExpertLayout, dump_placement, fold_slots, initial_placement
from widemesh.eplb.window import FIRST_ROW, NEXT_ROW, NOT_RECORDED
from widemesh.model.checkpoint import Checkpoint, write_checkpoint
from widemesh.model.config import ConfigError
from widemesh.model.forward import load_engram_hash
from widemesh.model.presets import TINY_MESH
from widemesh.model.random_weights import random_tensors
from widemesh.serving.config import EngineConfig
from widemesh.serving.decode_state import JoinRow
from widemesh.serving.device import DeviceEngine
from widemesh.serving.expert_load import ExpertLoad, LoadSummary
from widemesh.serving.sampling import SamplingRows
from widemesh.serving.scheduling import NO_WRITES, PageWrites
from widemesh.sharding import make_meshes

RANKS, SLOTS = 4, 8
# Rows of each slot: two sit out, of which one lies on a rank that has no other; slot 6 ends after two rows.
GIVEN, ROWS = (4, 2, 1, 4, 0, 0, 4, 3), (4, 2, 1, 4, 0, 0, 2, 3)
MODEL = dataclasses.replace(
    TINY_MESH, num_hidden_layers=2, compress_ratios=(0, 1), kv_source_layer_ids=(1,), index_source_layer_ids=(1,),
    candidate_source_layer_id=1, engram_layer_ids=(), engram_num_embeddings=(), num_nextn_predict_layers=0,
    dspark_target_layer_ids=(),
)  # fmt: skip
EXPERTS, LAYERS, PER_ROW = MODEL.n_routed_experts, MODEL.num_hidden_layers, MODEL.num_experts_per_tok


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    folder = tmp_path_factory.mktemp("model")
    write_checkpoint(folder, MODEL, random_tensors(MODEL, 0), form="quantized")
    return EngineConfig(
        model=str(folder), numerics="plain", max_model_len=16, page_size=4, max_num_seqs=SLOTS, prefill_devices=1,
        decode_devices=RANKS, max_num_batched_tokens=8, enable_eplb=True, eplb=EplbConfig(window_size=3),
    )  # fmt: skip


def device_of(config: EngineConfig, **changes: object) -> DeviceEngine:
    """With a request in every slot that begins with a token of its own."""
    config = dataclasses.replace(config, **changes)  # type: ignore[arg-type]
    checkpoint = Checkpoint.open(config.model)
    meshes = make_meshes(config.prefill_devices, config.decode_devices)
    device = DeviceEngine(config, checkpoint, load_engram_hash(MODEL, config.model), meshes)
    per_rank = SLOTS // RANKS
    for slot in range(SLOTS):
        pages = 1 + 2 * (slot % per_rank) + np.arange(2, dtype=np.int32)
        device.decode_pages(PageWrites.of(slot, 0, pages), 2)
        last = ROWS[slot] if ROWS[slot] < GIVEN[slot] else 15
        device.join(slot, JoinRow(token=50 + 7 * slot, position=0, last=last, tail=np.full(
            device.engram_hash.history_len, -1, np.int32), stop_token_ids=frozenset()))  # fmt: skip
    return device


def step(device: DeviceEngine, rows: list[int], record: int = NOT_RECORDED) -> tuple[np.ndarray, np.ndarray]:
    """Tokens [slots, k] (-1 past a slot's count), and the step's load per slot [L, X]."""
    given = np.array(rows, np.int32), NO_WRITES, SamplingRows.neutral(SLOTS)
    result = device.decode_step(*given, records=(record,)).wait()
    tokens = np.where(np.arange(result.tokens.shape[1]) < result.count[:, None], result.tokens, -1)
    last = np.asarray(device.expert_loads[0].last)  # [R, L, Q]
    return tokens, last.transpose(1, 0, 2).reshape(LAYERS, -1)


@dataclasses.dataclass(frozen=True)
class Run:
    """Four steps of one row each."""

    device: DeviceEngine
    tokens: np.ndarray  # [4, slots, 1]
    loads: np.ndarray  # [4, L, X]


def run(device: DeviceEngine) -> Run:
    records = (FIRST_ROW, NEXT_ROW, NOT_RECORDED, NEXT_ROW)
    found = [step(device, [int(rows > i) for rows in GIVEN], record) for i, record in enumerate(records)]
    return Run(device, *map(np.stack, zip(*found, strict=True)))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def plain(config: EngineConfig) -> Run:
    """Rows gathered, one slot per expert."""
    return run(device_of(config, exchange="all_gather"))


def test_a_step_counts_tokens_times_experts_in_every_layer(plain: Run):
    """Idle slots and slots that have ended count for nothing; every row chooses different experts."""
    for i, load in enumerate(plain.loads):
        rows = sum(one > i for one in ROWS)
        assert load.shape == (LAYERS, EXPERTS) and (load.sum(1) == rows * PER_ROW).all()
        assert load.max() <= rows
        assert ((plain.tokens[i, :, 0] >= 0) == (np.array(ROWS) > i)).all()
    assert not (plain.loads == plain.loads[:, :1]).all()


def test_the_window_holds_what_was_recorded(plain: Run):
    """Steps 0, 1 and 3, read as numpy reads them; and the newest step."""
    programs, load = plain.device.decode.programs, plain.device.expert_loads[0]
    for summary, kept in ((programs.summarise_window()(load), plain.loads[[0, 1, 3]]),
                          (programs.summarise_step()(load), plain.loads[3:])):  # fmt: skip
        by_rank = kept.reshape(-1, LAYERS, RANKS, EXPERTS // RANKS).sum(-1)
        assert (np.asarray(summary.slots) == kept.sum(0)).all()
        assert float(summary.mean) == by_rank.mean(-1).sum() and float(summary.busiest) == by_rank.max(-1).sum()
    assert np.asarray(load.num_rows).tolist() == [3] * RANKS


def test_the_ragged_exchange_counts_the_same(config: EngineConfig, plain: Run):
    found = run(device_of(config, exchange="ragged"))
    assert (found.loads == plain.loads).all() and (found.tokens == plain.tokens).all()


def test_four_rows_a_step_and_copies_of_experts(config: EngineConfig, plain: Run):
    """One dispatch counts what four did, and sums in another order. Copies share an expert's rows."""
    eplb = EplbConfig(num_redundant_experts=16, window_size=3)
    device = device_of(config, decode_steps=4, eplb=eplb, exchange="ragged", batch_invariant=True)
    tokens, load = step(device, list(GIVEN), FIRST_ROW)
    assert (tokens.T[..., None] == plain.tokens).all()
    assert load.shape == (LAYERS, 32) and (load.sum(1) == sum(ROWS) * PER_ROW).all()
    assert (fold_slots(load, device.decode.target.slot_owner, EXPERTS) == plain.loads.sum(0)).all()
    assert (load[:, :16] > 0).any() and (load[:, 16:] > 0).any()
    assert (np.asarray(device.expert_loads[0].ring)[:, 0] == np.asarray(device.expert_loads[0].last)).all()


def test_a_decode_mesh_starts_with_the_placement_of_a_file(config: EngineConfig, plain: Run, tmp_path: Path):
    """Tokens are the same, load lies where the experts do; the prefill mesh keeps its own placement."""
    layout = config.expert_layouts(MODEL)[0]
    owner = np.stack([np.random.default_rng(layer).permutation(EXPERTS) for layer in range(LAYERS)]).astype(np.int32)
    path = tmp_path / "placement.json"
    path.write_text(dump_placement(owner, layout))
    found = run(device_of(config, exchange="all_gather", expert_placement=str(path)))
    assert (found.device.decode.target.slot_owner == owner).all()
    assert (found.device.prefill.target.slot_owner == initial_placement(found.device.prefill.target.layout)).all()
    assert (found.tokens == plain.tokens).all()
    assert (found.loads == np.take_along_axis(plain.loads, owner[None], axis=2)).all()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda owner: owner[:1], "must be"),
        (lambda owner: np.where(owner == 3, 4, owner), "3"),
    ],
    ids=["a layer too few", "an expert too few"],
)
def test_a_placement_that_does_not_suit_the_model_is_refused(config: EngineConfig, tmp_path: Path, change, words: str):
    """Before any weight is read, and without enable_eplb too; the file is named."""
    layout = ExpertLayout(num_layers=LAYERS, num_experts=EXPERTS, ranks=RANKS)
    path = tmp_path / "placement.json"
    path.write_text(dump_placement(change(initial_placement(layout)), layout))
    other = dataclasses.replace(config, enable_eplb=False, expert_placement=str(path))
    with pytest.raises(ConfigError, match=words) as caught:
        other.check_model(MODEL)
    assert str(caught.value).startswith(str(path))


def test_a_placement_with_copies_needs_room_for_them(config: EngineConfig, tmp_path: Path):
    eplb = EplbConfig(num_redundant_experts=8, window_size=3)
    path = tmp_path / "placement.json"
    with_copies = dataclasses.replace(config, eplb=eplb, expert_placement=str(path))
    layout = with_copies.expert_layouts(MODEL)[0]
    path.write_text(dump_placement(initial_placement(layout), layout))
    with_copies.check_model(MODEL)
    words = "for num_redundant_experts=8; it must be 0: use a placement of a model with num_redundant_experts=0"
    with pytest.raises(ConfigError, match=words):
        dataclasses.replace(config, expert_placement=str(path)).check_model(MODEL)


# --- the ring alone ---------------------------------------------------------------------------------------------------


def test_the_ring_begins_anew_and_does_not_wrap():
    """A window of three steps, layers of two slots: two windows, the first with a step too many."""
    after = jax.jit(ExpertLoad.after)
    load, kept = ExpertLoad.zeros(1, 3, 2, 2), []
    records = (FIRST_ROW, NEXT_ROW, NOT_RECORDED, NEXT_ROW, NEXT_ROW, NOT_RECORDED, FIRST_ROW, NEXT_ROW)
    for number, record in enumerate(records):
        counted = jnp.full((2, 2), number + 1, jnp.int32)
        load = after(load, counted, jnp.int32(record))
        assert (np.asarray(load.last) == number + 1).all()
        ring = np.asarray(load.ring)[0]
        assert (ring == ring[:, :1, :1]).all()
        kept.append(ring[: int(load.num_rows[0]), 0, 0].tolist())
    assert kept == [[1], [1, 2], [1, 2], [1, 2, 4], [1, 2, 4], [1, 2, 4], [7], [7, 8]]


def test_without_a_window_only_the_newest_step_is_kept():
    load = ExpertLoad.zeros(1, 0, 2, 3).after(jnp.full((2, 3), 5, jnp.int32), jnp.int32(NOT_RECORDED))
    assert load.ring.shape == (1, 1, 2, 3) and not np.asarray(load.ring).any()
    assert (np.asarray(load.last) == 5).all() and int(load.num_rows[0]) == 0


@pytest.mark.parametrize("num_rows", [0, 2, 5])
def test_a_summary_is_numpys(num_rows: int):
    """Sums over the rows that belong to the window; what lies behind them is of an earlier one."""
    ring = np.random.default_rng(num_rows).integers(0, 1000, (4, 5, 3, 2)).astype(np.int32)
    found = LoadSummary.of(ring, jnp.int32(num_rows))  # type: ignore[arg-type]
    counted = ring[:, :num_rows]
    slots = counted.sum(1).transpose(1, 0, 2).reshape(3, 8)  # slot s on rank s // 2
    assert np.asarray(found.slots).tolist() == slots.tolist()
    by_rank = counted.sum(-1)
    assert float(found.mean) == by_rank.mean(0).sum()
    assert float(found.busiest) == by_rank.max(0).sum() if num_rows else float(found.busiest) == 0
