"""Drafts change no token, whichever of them are accepted; and what surrounds them: limits, slots, caches, figures.

Every row draws by the noise of its own position, and a draft counts only where the row before has drawn it. So with a
temperature too the draws are exactly those without drafts: equal tokens are tested, and no distribution needs to be.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import importlib.util
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from widemesh.model.cache import Cache
from widemesh.model.checkpoint import write_checkpoint
from widemesh.model.checkpoint.errors import CheckpointError
from widemesh.model.config import ConfigError
from widemesh.model.forward import ForwardModel
from widemesh.model.numerics import numerics_named
from widemesh.model.presets import TINY_MESH
from widemesh.model.random_weights import random_tensors
from widemesh.model.tiny_tokenizer import tiny_tokenizer
from widemesh.serving import Engine, EngineConfig, FinishReason, SamplingParams
from widemesh.serving.decode_arguments import DecodeArguments
from widemesh.serving.device import DeviceEngine
from widemesh.serving.request import Completion


def _beside(name: str):
    """A module beside this file; tests are imported without a path of their own."""
    spec = importlib.util.spec_from_file_location(f"widemesh_test_{name}", Path(__file__).parent / f"{name}.py")
    module = sys.modules.setdefault(spec.name, importlib.util.module_from_spec(spec))
    spec.loader.exec_module(module)
    return module


harness, near_ties, injected = _beside("invariance"), _beside("near_ties"), _beside("injected_drafts")

# Few layers, since every engine compiles them: Engram and ratio 2, ratio 1 with candidates, and one of the draft.
MODEL = dataclasses.replace(
    TINY_MESH, num_hidden_layers=2, compress_ratios=(2, 1, 0), kv_source_layer_ids=(0, 1),
    index_source_layer_ids=(0, 1), candidate_source_layer_id=1, engram_layer_ids=(0,), engram_num_embeddings=(1618,),
    num_nextn_predict_layers=1, dspark_target_layer_ids=(0, 1), num_speculative_tokens=5,
)  # fmt: skip
SETTINGS: dict[str, Any] = {
    "numerics": "plain", "max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 16, "page_size": 4,
    "prefill_devices": 1, "decode_devices": 1, "replay_prefix": "exact", "replay_tail": "full",
}  # fmt: skip
# By the number of drafts. Pages for two of the longest requests: with one draft, some of four are preempted.
VARIANTS: dict[int, dict[str, Any]] = {
    1: {"num_pages": 21, "reserve_output_tokens": 1}, 2: {}, 3: {"decode_devices": 2}, 5: {},
    4: {"prefill_devices": 2, "decode_devices": 4, "tensor_parallel_size": 2, "exchange": "ragged"},
}  # fmt: skip
OPERATIONS = 50  # of each random workload
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=2)
SEEDED = dataclasses.replace(GREEDY, temperature=1.0, seed=5)
EOS = MODEL.eos_token_ids[0]
FEATURES: dict[str, SamplingParams] = {
    "greedy": GREEDY,
    "seeded": SEEDED,
    "filters": dataclasses.replace(SEEDED, top_k=9, top_p=0.8, min_p=0.01),
    "repetition": dataclasses.replace(SEEDED, repetition_penalty=1.7),
    # Two tokens that tower over the rest take turns, by what each row knows of those before it.
    "frequency": dataclasses.replace(GREEDY, frequency_penalty=1.5, logit_bias={60: 90.0, 61: 90.5}),
    "presence": dataclasses.replace(SEEDED, presence_penalty=2.0, logit_bias={60: 5.0, 61: 5.0}),
    "bias": dataclasses.replace(SEEDED, logit_bias={7: 5.0, 11: -100.0}),
    "min_tokens": dataclasses.replace(SEEDED, ignore_eos=False, min_tokens=8, logit_bias={EOS: 100.0}),
    "samples": dataclasses.replace(SEEDED, n=3),
    "regex": dataclasses.replace(SEEDED, regex="[ab]{3}c+d{4}"),
    "string": dataclasses.replace(SEEDED, stop=("zzzz",)),
}


def prompt(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, length]).integers(3, 500, length).astype(np.int32)


PROMPTS = [prompt(length, i) for i, length in enumerate((9, 1, 12, 17, 3, 8, 2, 20, 5, 11, 6))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("speculation")
    tokenizer, tokenizer_config = tiny_tokenizer(MODEL)
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(tokenizer_config), encoding="utf-8")
    write_checkpoint(path, MODEL, random_tensors(MODEL, 0), form="quantized")
    return path


@pytest.fixture(scope="module", autouse=True)
def no_scores() -> Iterator[None]:
    """Engines leave out the program for log-probabilities of prompts, which nobody asks for here: it compiles long."""
    runs = DeviceEngine._warm_up_runs
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeviceEngine, "_warm_up_runs", lambda device: (
            (name, run) for name, run in runs(device) if not name.startswith("log-probabilities")
        ))  # fmt: skip
        yield


@pytest.fixture(scope="module")
def workloads() -> list[Any]:
    """One that is always the same and one that is new every time."""
    fresh = int(os.environ["WIDEMESH_TEST_SEED"])  # printed in the header of the run
    sizes = {"vocab": 500, "longest_prompt": 30, "longest_output": 20, "image_id": MODEL.image_token_id}
    return [harness.Workload.draw(seed, OPERATIONS, **sizes) for seed in (7, fresh)]


@pytest.fixture(scope="module")
def reference(folder: Path, workloads: list[Any]) -> tuple[list[Completion], list[Any]]:
    """What an engine without drafts answers to every feature, and to the workloads."""
    with Engine(EngineConfig(model=str(folder), **SETTINGS)) as engine:
        done = engine.generate(list(PROMPTS), list(FEATURES.values()))
        outcomes = [harness.run(engine, workload) for workload in workloads]
        figures = engine.metrics.speculation
        assert (figures.drafts, figures.tried_tokens, figures.accepted.tolist()) == (0, 0, [])
    return done, outcomes


@pytest.fixture(scope="module")
def wanted(reference: tuple[list[Completion], list[Any]]) -> list[Completion]:
    """The features' part of it."""
    return reference[0]


@pytest.fixture(
    scope="module", params=[1, 5, *(pytest.param(drafts, marks=pytest.mark.slow) for drafts in (2, 3, 4))]
)
def engine(request: pytest.FixtureRequest, folder: Path, wanted: list[Completion]) -> Iterator[Engine]:
    """One with drafts that tests choose. They leave it idle; accounts of pages are checked after every turn.

    It comes after `wanted`, since compiles are counted for the process.
    """
    settings = SETTINGS | VARIANTS[request.param] | {"num_speculative_tokens": request.param}
    with injected.injecting():
        engine = Engine(EngineConfig(model=str(folder), **settings))
    loop, problems = engine._loop, []
    turn, check = loop._turn, loop._scheduler.check

    def checked() -> None:
        turn()
        try:
            check()
        except AssertionError as err:
            problems.append(repr(err))
            raise

    loop._turn = checked  # type: ignore[method-assign]
    with engine:
        yield engine
        assert not problems and engine.is_alive and engine.num_running == engine.num_waiting == 0
        for pool in (*loop._scheduler.prefill.pools, *loop._scheduler.decode.pools):
            assert pool.num_used == 0
    assert engine.metrics._compiles.after_warm_up == 0


@dataclasses.dataclass
class Growth:
    """How much an engine's figures on drafts have grown since this was made."""

    engine: Engine

    def __post_init__(self) -> None:
        figures = self.engine.metrics.speculation
        self._before = figures.drafts, figures.tried_tokens, figures.accepted

    @property
    def figures(self) -> tuple[int, int, list[int]]:
        """Drafts, draft tokens, accepted ones by place."""
        now, (drafts, tokens, accepted) = self.engine.metrics.speculation, self._before
        before = np.resize(accepted, len(now.accepted)) if len(accepted) else 0
        return now.drafts - drafts, now.tried_tokens - tokens, (now.accepted - before).tolist()


def known(done: Sequence[Completion], prompts: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Prompts and outputs, as tokens to draft."""
    return [np.concatenate([ids, one.token_ids]) for ids, one in zip(prompts, done, strict=True)]


def prompts_of(done: Sequence[Completion]) -> list[np.ndarray]:
    """The prompts of the features' completions."""
    samples = [ids for ids, one in zip(PROMPTS, FEATURES.values(), strict=True) for _ in range(one.n)]
    assert len(samples) == len(done)
    return samples


def check_equal(done: Completion, want: Completion) -> None:
    """The same tokens, end, text and log-probabilities."""
    assert done.token_ids.tolist() == want.token_ids.tolist()
    assert (done.text, done.finish_reason, done.matched_token_id, done.matched_stop) == (
        want.text, want.finish_reason, want.matched_token_id, want.matched_stop)  # fmt: skip
    assert done.logprobs is not None and want.logprobs is not None
    np.testing.assert_allclose(done.logprobs.chosen, want.logprobs.chosen, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(done.logprobs.top, want.logprobs.top, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(done.logprobs.ranks, want.logprobs.ranks)
    np.testing.assert_array_equal(done.logprobs.top_ids, want.logprobs.top_ids)


# --- tokens -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [0.0, 0.3])
def test_all_features_give_the_tokens_without_drafts(engine: Engine, wanted: list[Completion], wrong: float) -> None:
    """All right, or some wrong; with one draft and few pages some requests are preempted on the way."""
    injected.set_drafts(engine, known(wanted, prompts_of(wanted)), wrong=wrong, seed=3)
    growth, preempted = Growth(engine), engine._loop._scheduler.num_preemptions
    with injected.watching(engine) as watch:
        done = engine.generate(list(PROMPTS), list(FEATURES.values()))
    for want, one in zip(wanted, done, strict=True):
        check_equal(one, want)
    drafts, tokens, accepted = growth.figures
    assert len(accepted) == engine.config.num_speculative_tokens and drafts > 20
    assert accepted == sorted(accepted, reverse=True)
    assert sum(accepted) == watch.delivered - watch.gains  # of a step that a preemption has overtaken nothing counts
    # Less than all also when all are right: samples share a prompt, whose drafts are those of one.
    assert 0 < sum(accepted) < tokens
    if engine.config.num_pages:
        assert engine._loop._scheduler.num_preemptions > preempted
    assert {*watch.first_steps()} == {(0, 1)}


def test_random_work_gives_the_tokens_without_drafts(
    engine: Engine, folder: Path, workloads: list[Any], reference: tuple[list[Completion], list[Any]]
) -> None:
    """Requests of all kinds that come, are aborted, wait for each other and share prefixes (`invariance`)."""
    growth, checked = Growth(engine), engine._loop._turn
    for workload, outcomes in zip(workloads, reference[1], strict=True):
        injected.set_drafts(engine, harness.known_tokens(workload, outcomes), wrong=0.1, seed=workload.seed)
        found = harness.run(engine, workload)
        engine._loop._turn = checked  # type: ignore[method-assign]
        judge = functools.partial(closest_choice, folder)
        assert harness.compare(workload, outcomes, found, judge) > OPERATIONS // 2
    _, tokens, accepted = growth.figures
    assert min(accepted) > 0 and sum(accepted) < 0.95 * tokens


def closest_choice(folder: Path, token_ids: np.ndarray) -> Any:
    """Where two runs part: how close the model came to choosing otherwise."""
    return near_ties.closest_choice(ForwardModel.load(folder, numerics_named("plain", "cpu")), token_ids)


def test_the_model_s_own_drafts_are_tried(engine: Engine, wanted: list[Completion]) -> None:
    """Random ones, and then those of a chain between rows that outweighs all else and leads to one token."""
    injected.use_own_drafts(engine)
    growth = Growth(engine)
    for want, one in zip(wanted, engine.generate(list(PROMPTS), list(FEATURES.values())), strict=True):
        check_equal(one, want)
    assert growth.figures[1] > 100 and sum(growth.figures[2]) < 10
    names = [f"mtp.0.markov_head.{part}.weight" for part in ("embed", "head")]
    before = {name: tensor for name, tensor in random_tensors(MODEL, 0) if name in names}
    rows = {name: np.zeros_like(tensor) for name, tensor in before.items()}
    rows[names[0]][:], rows[names[1]][17] = 1.0, 10.0
    engine.update_weights(rows)
    growth, count = Growth(engine), engine.config.num_speculative_tokens
    one = dataclasses.replace(SEEDED, logit_bias={17: 100.0}, max_tokens=1 + 2 * (1 + count))
    assert engine.generate(PROMPTS[0], one)[0].token_ids.tolist() == [17] * (1 + 2 * (1 + count))
    assert growth.figures == (2, 2 * count, [2] * count)
    engine.update_weights(before)


def test_a_constrained_request_tries_none(engine: Engine, wanted: list[Completion]) -> None:
    """It runs one row and waits for what it drew, beside one that goes on with its drafts."""
    place = list(FEATURES).index("regex")
    want = wanted[place + 2]  # behind two more samples
    injected.set_drafts(engine, [np.concatenate([PROMPTS[place], want.token_ids])])
    growth = Growth(engine)
    check_equal(engine.generate(PROMPTS[place], FEATURES["regex"])[0], want)
    assert growth.figures == (0, 0, [0] * engine.config.num_speculative_tokens)


def test_a_stop_id_ends_a_request_among_accepted_drafts(engine: Engine, wanted: list[Completion]) -> None:
    """Nothing behind it is delivered, whichever row of a step draws it, and drafts behind it do not count."""
    tokens, count = wanted[1].token_ids, engine.config.num_speculative_tokens
    injected.set_drafts(engine, [np.concatenate([PROMPTS[1], tokens])])
    places = [at for at in range(1, 2 + 2 * count) if tokens[at] not in tokens[:at]]
    assert len(places) > count
    for at in places:
        growth = Growth(engine)
        (done,) = engine.generate(PROMPTS[1], dataclasses.replace(SEEDED, stop_token_ids=(int(tokens[at]),)))
        assert done.token_ids.tolist() == tokens[: at + 1].tolist()
        assert (done.finish_reason, done.matched_token_id) == (FinishReason.STOP, tokens[at])
        assert done.logprobs is not None and len(done.logprobs.chosen) == at + 1
        steps, last = divmod(at - 1, count + 1)  # the first token comes without drafts; then whole steps; then this one
        assert growth.figures[::2] == (steps + 1, [steps + (last > place) for place in range(count)])


# --- limits -----------------------------------------------------------------------------------------------------------


def mark_pages(engine: Engine) -> None:
    """Fill all pages of both meshes with one byte, and forget what was in them."""
    engine._loop._scheduler.flush_prefix_cache()
    for state in (engine.device.prefill, engine.device.decode):
        marked = np.full(state.cache.pages.shape, 0xA5, np.uint8)
        state.cache = dataclasses.replace(state.cache, pages=jax.device_put(marked, state.cache.pages.sharding))


def test_limits_are_kept_and_no_page_beyond_is_touched(engine: Engine, wanted: list[Completion]) -> None:
    """At max_model_len and at max_tokens, with drafts that would go on. What nobody holds keeps what is in it."""
    limit, count = engine.config.max_model_len, engine.config.num_speculative_tokens
    long = [prompt(limit - room) for room in range(1, 4 + count)]
    unlimited = dataclasses.replace(GREEDY, max_tokens=None)
    decode = engine.device.decode
    (whole,) = engine.generate(long[-1], unlimited)
    everything = np.concatenate([long[-1], whole.token_ids])
    injected.set_drafts(engine, [everything, np.concatenate([PROMPTS[1], wanted[1].token_ids])])
    for ids in (everything[:-room] for room in range(1, 3 + count)):
        engine._loop.call(lambda: mark_pages(engine))
        (done,) = engine.generate(ids, unlimited)
        assert done.token_ids.tolist() == everything[len(ids) :].tolist()
        assert done.finish_reason is FinishReason.LENGTH
        pages, table = engine._loop.call(lambda: (np.array(decode.cache.pages), np.array(decode.cache.table)))
        touched = np.flatnonzero((pages != 0xA5).any(axis=1))
        own = table[0, : -(-(limit - 1) // engine.config.page_size)]
        assert {*touched.tolist()} == {*own.tolist()}
        last = (limit - 1) % engine.config.page_size  # rows of the last page; the last token of all is never computed
        source = decode.cache.layout.sources[1]
        rows = pages[own[-1], source.row_offset :][: source.rows * source.row.num_bytes].reshape(source.rows, -1)
        assert (rows[:last] != 0xA5).any(axis=1).all() and (rows[last:] == 0xA5).all()
    for most in range(1, 3 + 2 * count):
        (done,) = engine.generate(PROMPTS[1], dataclasses.replace(SEEDED, max_tokens=most))
        assert done.token_ids.tolist() == wanted[1].token_ids[:most].tolist()
        assert done.finish_reason is FinishReason.LENGTH


# --- caches -----------------------------------------------------------------------------------------------------------


def state_of(cache: Cache, tokens: int) -> dict[str, np.ndarray]:
    """What slot 0 keeps of its first `tokens` tokens, by position, as f32."""
    found: dict[str, np.ndarray] = {}
    table, pages = np.asarray(cache.table)[0], np.asarray(cache.pages)
    for number, source in enumerate(cache.layout.sources):
        own = pages[table[: -(-tokens // (source.rows * source.ratio))]]
        for name, offset, vector in (("rows", source.row_offset, source.row), ("keys", source.key_offset, source.key)):
            part = own[:, offset : offset + source.rows * vector.num_bytes].reshape(-1, vector.num_bytes)
            found[f"{name} of source {number}"] = part[: tokens // source.ratio].view(np.float32)
    newest = np.arange(max(0, tokens - MODEL.sliding_window), tokens)
    for number, layer in enumerate(cache.layers):
        ring = np.asarray(layer.window)[0]
        found[f"window of layer {number}"] = ring[newest % len(ring)].view(np.float32)
        for open_group in layer.open_group:
            values = np.asarray(open_group)[0]
            if tokens % 2 and len(values):  # else no group is open
                found[f"open group of layer {number}"] = values[(tokens - 1) % len(values)]
    return found


@pytest.mark.parametrize("wrong", [0.0, 0.4, 1.0])
def test_caches_are_those_without_drafts(engine: Engine, wanted: list[Completion], wrong: float) -> None:
    """At every position that counts, the context of the draft included; at odd and at even lengths."""
    whole = np.concatenate([PROMPTS[3], wanted[3].token_ids])
    for most in range(12, 16):
        states = []
        for drafted in ([], [whole]):
            engine._loop.call(engine._loop._scheduler.flush_prefix_cache)
            injected.set_drafts(engine, drafted, wrong=wrong, seed=most)
            one = dataclasses.replace(FEATURES["repetition"], max_tokens=most)
            assert engine.generate(PROMPTS[3], one)[0].token_ids.tolist() == wanted[3].token_ids[:most].tolist()
            tokens = len(PROMPTS[3]) + most - 1
            states.append(engine._loop.call(lambda n=tokens: state_of(engine.device.decode.cache, n)))
        without, with_drafts = states
        assert len(without) == 4 + 3 + tokens % 2 and without.keys() == with_drafts.keys()
        for name, values in without.items():
            assert np.abs(values).max() > 0.01
            np.testing.assert_allclose(with_drafts[name], values, rtol=1e-4, atol=1e-5, err_msg=f"{most}: {name}")


# --- slots ------------------------------------------------------------------------------------------------------------


def test_slots_that_sit_out_steps_keep_their_drafts(
    engine: Engine, wanted: list[Completion], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Held back at random, they go on where they were: neither old drafts nor the sign for none is taken for tokens."""
    injected.set_drafts(engine, known(wanted, prompts_of(wanted)), wrong=0.3, seed=4)
    rng, slots, hold = np.random.default_rng(0), engine.config.max_num_seqs, DecodeArguments.hold

    def some(arguments: DecodeArguments) -> np.ndarray:
        needed = hold.fget(arguments)
        held = rng.random(slots) < 0.4
        return held if needed is None else held | needed

    monkeypatch.setattr(DecodeArguments, "hold", property(some))
    growth = Growth(engine)
    for want, one in zip(wanted, engine.generate(list(PROMPTS), list(FEATURES.values())), strict=True):
        check_equal(one, want)
    drafts, tokens, accepted = growth.figures
    assert drafts > 20 and 0 < sum(accepted) < tokens


def test_a_cancelled_request_leaves_its_slot_no_drafts(engine: Engine, wanted: list[Completion]) -> None:
    """Whoever comes next into it begins without any, while the other slots go on with theirs."""
    injected.set_drafts(engine, known(wanted, prompts_of(wanted)))
    long = dataclasses.replace(SEEDED, max_tokens=None)

    async def run() -> list[list[int]]:
        async def read(place: int) -> list[int]:
            stream = engine.stream(PROMPTS[place], dataclasses.replace(SEEDED, seed=5))
            return [token async for delta in stream for token in delta.token_ids.tolist()]

        found = []
        for _ in range(3):
            doomed = [engine.stream(PROMPTS[1], long) for _ in range(4)]
            for stream in doomed:
                await anext(stream)
            await doomed[0].aclose()
            await doomed[2].aclose()
            found += await asyncio.gather(read(1), read(1))
            for stream in doomed:
                await stream.aclose()
        return found

    growth = Growth(engine)
    with injected.watching(engine) as watch:
        found = asyncio.run(run())
    assert sum(growth.figures[2]) == watch.delivered - watch.gains
    assert found == [wanted[1].token_ids.tolist()] * 6
    assert len(watch.joins) >= 18 and {*watch.first_steps()} == {(0, 1)}


def test_tokens_of_a_step_come_in_one_delta(engine: Engine, wanted: list[Completion]) -> None:
    count = engine.config.num_speculative_tokens
    injected.set_drafts(engine, [np.concatenate([PROMPTS[1], wanted[1].token_ids])])

    async def run() -> list[tuple[int, int]]:
        one = dataclasses.replace(SEEDED, max_tokens=1 + 2 * (1 + count))
        return [(len(delta.token_ids), delta.completion_tokens) async for delta in engine.stream(PROMPTS[1], one)]

    deltas = asyncio.run(run())
    assert sum(size for size, _ in deltas) == deltas[-1][1] == 1 + 2 * (1 + count)
    assert {end for _, end in deltas} <= {1, 2 + count, 3 + 2 * count}  # a slow reader gets several steps at once


# --- figures ----------------------------------------------------------------------------------------------------------


def test_figures_of_a_request_are_exact(engine: Engine, wanted: list[Completion]) -> None:
    """With right drafts: a token, then whole steps; the last step tries no more than there is room for."""
    count, ids = engine.config.num_speculative_tokens, np.concatenate([PROMPTS[1], wanted[1].token_ids])
    for steps, rest in ((2, 0), (1, 1), (2, count)):  # tokens past the whole steps
        injected.set_drafts(engine, [ids])
        growth = Growth(engine)
        engine.generate(PROMPTS[1], dataclasses.replace(SEEDED, max_tokens=1 + steps * (1 + count) + rest))
        tried = max(0, rest - 1)  # one row alone is no draft
        accepted = [steps + (tried > place) for place in range(count)]
        assert growth.figures == (steps + (tried > 0), steps * count + tried, accepted)
    injected.set_drafts(engine, [])
    growth = Growth(engine)
    engine.generate(PROMPTS[1], SEEDED)
    assert growth.figures == (0, 0, [0] * count)  # where there is no draft none was tried


# --- programs ---------------------------------------------------------------------------------------------------------


def test_nothing_compiles_after_warm_up(engine: Engine, wanted: list[Completion], compiles) -> None:
    """Not even where JAX has forgotten what it had compiled."""
    injected.set_drafts(engine, known(wanted, prompts_of(wanted)), wrong=0.2)
    jax.clear_caches()
    before = compiles.total
    engine.generate(list(PROMPTS), list(FEATURES.values()))
    assert compiles.total == before and engine.metrics._compiles.after_warm_up == 0


# --- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"num_speculative_tokens": -1}, "num_speculative_tokens=-1 must not be negative; use 0 to leave the draft"),
        ({"num_speculative_tokens": 3, "decode_steps": 2},
         "decode_steps=2 cannot be used with num_speculative_tokens=3; use decode_steps=1"),
    ],
)  # fmt: skip
def test_settings_that_do_not_go_together(setting: dict[str, int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        EngineConfig(**setting)


def test_rows_of_a_step() -> None:
    assert [EngineConfig(num_speculative_tokens=count).decode_rows for count in (0, 1, 5)] == [1, 2, 6]
    assert EngineConfig(num_speculative_tokens=5, page_size=64).scheduler.pages_per_slot == 17
    assert EngineConfig(decode_steps=4).decode_rows == 4


@pytest.mark.parametrize(
    ("setting", "change", "words"),
    [
        ({"decode_devices": 3, "max_num_seqs": 6, "prefill_devices": 1}, {"n_routed_experts": 6},
         "decode_devices=3 must divide the model's dspark_n_routed_experts=8; use decode_devices=2 or 4"),
        ({"replay_tail": "bounded"}, {}, "replay_tail='bounded' cannot be used with a draft that reads layer 0, which "
         "lies below layer 1; use replay_tail='full'"),
    ],
)  # fmt: skip
def test_settings_that_do_not_suit_a_draft(setting: dict[str, Any], change: dict[str, int], words: str) -> None:
    """Of the same model without its draft nothing is to be said."""
    model, common = dataclasses.replace(MODEL, **change), {"replay_tail": "full"} | setting
    EngineConfig(**common).check_model(model.with_draft(0))
    with pytest.raises(ConfigError, match=words):
        EngineConfig(num_speculative_tokens=2, **common).check_model(model)


def test_more_drafts_than_a_model_has(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="num_speculative_tokens=6 exceeds dspark_block_size=5"):
        Engine(EngineConfig(model=str(folder), num_speculative_tokens=6))
