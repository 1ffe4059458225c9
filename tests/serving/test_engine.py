"""The engine end to end: right tokens, alone and together; limits, cancellation, refusals, shutdown."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from widemesh.model.cache import Cache, ring_rows
from widemesh.model.checkpoint import CheckpointError
from widemesh.model.config import ConfigError
from widemesh.model.forward import ForwardModel
from widemesh.model.numerics import NUMERICS
from widemesh.serving import (
    Engine,
    EngineConfig,
    EngineError,
    FinishReason,
    RequestError,
    SamplingParams,
    Status,
)
from widemesh.serving.compile_counter import CompileCounter
from widemesh.serving.device import DecodeStep, DeviceEngine
from widemesh.serving.programs import NOT_FINITE

# Around a chunk (8 rows), a group (2 tokens), the window (16) and its ring (32), and one token.
LENGTHS = (1, 2, 3, 8, 9, 10, 17, 34, 41)
GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)


def prompt(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, length]).integers(3, 500, length).astype(np.int32)


@pytest.fixture(scope="module")
def alone(engine: Engine) -> dict[int, np.ndarray]:
    """Greedy tokens of each length, run one at a time."""
    return {length: engine.generate(prompt(length), GREEDY)[0].token_ids for length in LENGTHS}


def test_meshes_are_disjoint(engine: Engine) -> None:
    """On the arrays themselves: no device holds state of both meshes."""
    prefill = {d for a in jax.tree.leaves(engine.device.prefill.cache) for d in a.devices()}
    decode = {d for a in jax.tree.leaves(engine.device.decode.cache) for d in a.devices()}
    weights = {d for a in jax.tree.leaves(engine.device.prefill.parameters) for d in a.devices()}
    assert (len(prefill), len(decode)) == (2, 4)
    assert weights == prefill
    assert not prefill & decode


def test_experts_are_spread_over_ranks(engine: Engine) -> None:
    state = engine.device.decode.parameters
    w1 = state["layers"][0]["ffn"]["experts"]["w1"].get_value()
    assert w1.shape[0] == 16
    assert {shard.data.shape[0] for shard in w1.addressable_shards} == {4}


def test_greedy_equals_the_whole_forward(engine: Engine, checkpoint: Path, alone: dict[int, np.ndarray]) -> None:
    """Each token is the arg max of a full forward over everything before it."""
    model = ForwardModel.load(checkpoint, NUMERICS["plain"])
    for length, tokens in alone.items():
        whole = np.zeros(64, np.int32)  # one length, one program; what follows a token does not change its logits
        whole[: length + 9] = np.concatenate([prompt(length), tokens[:-1]])
        logits = model.logits(whole)[length - 1 : length + 9]
        np.testing.assert_array_equal(logits.argmax(-1), tokens, err_msg=f"prompt of {length}")


def test_batch_equals_alone(engine: Engine, alone: dict[int, np.ndarray]) -> None:
    """More requests than slots, all lengths at once, in two orders."""
    for order in (LENGTHS, LENGTHS[::-1]):
        together = engine.generate([prompt(length) for length in order], GREEDY)
        for length, done in zip(order, together, strict=True):
            np.testing.assert_array_equal(done.token_ids, alone[length], err_msg=f"prompt of {length}")
            assert (done.prompt_tokens, done.finish_reason) == (length, FinishReason.LENGTH)


def test_seeded_sampling_ignores_batch_mates(engine: Engine) -> None:
    """A seeded request draws the same tokens alone, among greedy ones, and among filtered ones."""
    seeded = SamplingParams(temperature=1.0, top_k=40, top_p=0.9, seed=7, max_tokens=8, ignore_eos=True)
    wanted = engine.generate(prompt(9), seeded)[0].token_ids
    for mate in (GREEDY, SamplingParams(temperature=0.7, top_k=3, max_tokens=5), SamplingParams(max_tokens=6)):
        both = engine.generate([prompt(17), prompt(9)], [mate, seeded])
        np.testing.assert_array_equal(both[1].token_ids, wanted)


def test_fresh_seeds_differ(engine: Engine) -> None:
    free = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)
    first, second = (engine.generate(prompt(9), free)[0].token_ids.tolist() for _ in range(2))
    assert first != second


def test_top_k_of_one_is_greedy(engine: Engine, alone: dict[int, np.ndarray]) -> None:
    one = SamplingParams(temperature=1.5, top_k=1, max_tokens=10, ignore_eos=True)
    np.testing.assert_array_equal(engine.generate(prompt(10), one)[0].token_ids, alone[10])


def test_stop_tokens(engine: Engine, alone: dict[int, np.ndarray]) -> None:
    """The first stop token ends the request and is reported; its text is not part of the completion."""
    tokens = alone[9].tolist()
    stop = tokens[4]
    at = tokens.index(stop)
    done = engine.generate(prompt(9), SamplingParams(temperature=0.0, stop_token_ids=(stop,), ignore_eos=True))[0]
    assert done.token_ids.tolist() == tokens[: at + 1]
    assert (done.finish_reason, done.matched_token_id) == (FinishReason.STOP, stop)
    assert done.text == engine.tokenizer.decode(tokens[:at])


def test_eos_ends_a_request(engine: Engine, alone: dict[int, np.ndarray], monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = alone[9].tolist()
    config = engine.model_config
    monkeypatch.setitem(config.__dict__, "eos_token_ids", (tokens[2],))
    try:
        done = engine.generate(prompt(9), SamplingParams(temperature=0.0))[0]
    finally:
        monkeypatch.undo()
    assert done.token_ids.tolist() == tokens[: tokens.index(tokens[2]) + 1]
    assert done.finish_reason is FinishReason.STOP


def test_length_limit_clips_max_tokens(engine: Engine) -> None:
    length = engine.config.max_model_len - 3
    done = engine.generate(prompt(length), SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True))[0]
    assert (len(done.token_ids), done.finish_reason) == (3, FinishReason.LENGTH)


def test_transferred_bytes_are_counted(engine: Engine) -> None:
    """One hand-over of 64 tokens: windows, entries, index keys and open groups, in f32."""
    config = engine.model_config
    before = engine.transfer_bytes
    engine.generate(prompt(20), GREEDY)
    row = config.head_dim + config.index_head_dim
    sources = sum(
        64 // r.ratio * row + (r.ratio - 1) * 2 * config.head_dim for r in config.roles if r.owns_kv
    )
    window = config.num_hidden_layers * ring_rows(config) * config.head_dim
    assert engine.transfer_bytes - before == 4 * (window + sources)


def test_one_token_prompt_moves_nothing(engine: Engine) -> None:
    before = engine.transfer_bytes
    engine.generate(prompt(1), GREEDY)
    assert engine.transfer_bytes == before


def test_nothing_compiles_after_warm_up(engine: Engine, compiles: CompileCounter) -> None:
    """Not even where JAX has forgotten what it had compiled, as it does beside thousands of other programs."""
    jax.clear_caches()
    settings = [
        GREEDY, SamplingParams(max_tokens=3), SamplingParams(top_k=5, top_p=0.5, seed=1, max_tokens=4),
        SamplingParams(max_tokens=4, logprobs=3, presence_penalty=0.5), SamplingParams(max_tokens=2, prompt_logprobs=2),
    ]  # fmt: skip
    lengths = LENGTHS * len(settings)
    engine.generate([prompt(length, seed=3) for length in lengths],
                    [settings[i // len(LENGTHS)] for i in range(len(lengths))])  # fmt: skip
    assert compiles.total == 0
    jax.jit(lambda x: x * 3 + 1)(np.arange(7))  # it does count
    assert compiles.total == 1


def test_stream_and_cancel(engine: Engine, alone: dict[int, np.ndarray]) -> None:
    """Cancelling one stream frees its slot at once and changes nothing for the other."""

    async def run() -> list[int]:
        doomed = engine.stream(prompt(34), SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True))
        kept = engine.stream(prompt(17), GREEDY)
        got: list[int] = []
        counts: list[int] = []
        await anext(doomed)
        await doomed.aclose()
        async for delta in kept:
            got.extend(delta.token_ids.tolist())
            counts.append(delta.completion_tokens)
        assert counts == list(range(1, 11))
        assert delta.finish_reason is FinishReason.LENGTH
        return got

    assert asyncio.run(run()) == alone[17].tolist()
    assert wait_idle(engine)


def test_cancelled_task_aborts(engine: Engine) -> None:
    async def run() -> None:
        async def consume() -> None:
            async for _ in engine.stream(prompt(9), SamplingParams(max_tokens=80, ignore_eos=True), request_id="gone"):
                started.set()

        started = asyncio.Event()
        task = asyncio.create_task(consume())
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert wait_idle(engine)
    engine.generate(prompt(3), GREEDY)  # the id is free again, and so are the slots


def test_abort_ends_with_abort(engine: Engine) -> None:
    """In a slot and in the queue alike; unknown ids and a second abort are ignored."""

    async def run() -> list[FinishReason | None]:
        long = SamplingParams(max_tokens=80, ignore_eos=True, temperature=0.0)
        streams = [engine.stream(prompt(9, seed=i), long, request_id=f"r{i}") for i in range(6)]
        await anext(streams[0])
        for i in range(6):
            engine.abort(f"r{i}")
            engine.abort(f"r{i}")
        engine.abort("unknown")
        return [[d async for d in s][-1].finish_reason for s in streams]

    assert asyncio.run(run()) == [FinishReason.ABORT] * 6
    assert wait_idle(engine)


def test_request_id_in_flight_is_refused(engine: Engine) -> None:
    async def run() -> None:
        first = engine.stream(prompt(9), SamplingParams(max_tokens=50, ignore_eos=True), request_id="same")
        with pytest.raises(RequestError, match="request_id='same' is already in flight") as caught:
            engine.stream(prompt(9), request_id="same")
        assert caught.value.status is Status.ALREADY_EXISTS
        await first.aclose()

    asyncio.run(run())
    assert wait_idle(engine)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([], "prompt='' is empty"),
        ([5, 512], "prompt=512 is outside the vocabulary; use ids from 0 to 511"),
        ([-1], "prompt=-1 is outside the vocabulary"),
        ([5, 510], "prompt=510 is the image placeholder"),
        (list(range(3, 99)), "prompt='96 tokens' leaves no room for output within max_model_len=96"),
        ([1.5, 2.0], "must be text or a list of token ids"),
    ],
)
def test_bad_prompts(engine: Engine, bad: list, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        engine.generate([bad], GREEDY)
    assert caught.value.status is Status.INVALID_ARGUMENT
    assert wait_idle(engine)


def test_one_bad_prompt_leaves_nothing_running(engine: Engine) -> None:
    with pytest.raises(RequestError, match="outside the vocabulary"):
        engine.generate([[5, 6, 7], [9999]], SamplingParams(max_tokens=80))
    assert wait_idle(engine)


@pytest.mark.parametrize(
    ("limit", "message"),
    [
        ({"max_num_queued_reqs": 0}, "max_num_queued_reqs=0 requests are waiting already"),
        ({"max_num_queued_tokens": 8}, "max_num_queued_tokens=8 would be passed by 9 tokens on top of 0"),
    ],
)
def test_a_full_queue_refuses_at_once(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, limit: dict[str, int], message: str
) -> None:
    scheduler = engine._loop._scheduler
    monkeypatch.setattr(scheduler, "config", dataclasses.replace(scheduler.config, **limit))
    with pytest.raises(RequestError, match=message) as refused:
        engine.generate(prompt(9), GREEDY)
    assert refused.value.status is Status.UNAVAILABLE
    assert engine.num_running == engine.num_waiting == 0


def test_a_queue_without_room_for_all_samples_takes_none(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = engine._loop._scheduler
    monkeypatch.setattr(scheduler, "config", dataclasses.replace(scheduler.config, max_num_queued_reqs=3))
    with pytest.raises(RequestError, match="max_num_queued_reqs=3 requests are waiting already"):
        engine.generate(prompt(9), SamplingParams(n=5, max_tokens=80, ignore_eos=True))
    assert engine.num_running == engine.num_waiting == 0 and not engine._in_flight and not engine._sample_of


def test_a_stream_ends_only_its_own_request(engine: Engine, alone: dict[int, np.ndarray]) -> None:
    """One that has ended in the engine may be unread still when its name is used again."""

    async def run() -> np.ndarray:
        old = engine.stream(prompt(3), GREEDY, request_id="same")
        while engine._in_flight:  # it ends; nobody reads
            await asyncio.sleep(0.01)
        new = engine.stream(prompt(9), GREEDY, request_id="same")
        await old.aclose()
        deltas = [delta async for delta in new]
        assert deltas[-1].finish_reason is FinishReason.LENGTH
        return np.concatenate([delta.token_ids for delta in deltas])

    np.testing.assert_array_equal(asyncio.run(run()), alone[9])


def test_a_name_is_free_when_a_stop_string_was_found(engine: Engine, alone: dict[int, np.ndarray]) -> None:
    long = SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True)
    text = engine.generate(prompt(9), long)[0].text

    async def run() -> list[FinishReason | None]:
        ends = []
        for _ in range(3):
            stream = engine.stream(prompt(9), dataclasses.replace(long, stop=(text[2:5],)), request_id="same")
            ends.append([delta async for delta in stream][-1].finish_reason)
        return ends

    assert asyncio.run(run()) == [FinishReason.STOP] * 3
    assert wait_idle(engine)
    assert not engine._in_flight and not engine._sample_of and not engine._loop._live


def test_a_stream_may_be_dropped_while_any_lock_is_held(engine: Engine) -> None:
    """A garbage collection runs its destructor anywhere, also inside `post` or on the engine's thread."""

    async def run() -> None:
        stream = engine.stream(prompt(9), SamplingParams(max_tokens=80, ignore_eos=True))
        await anext(stream)
        streams = [stream]
        del stream
        dropped = threading.Event()

        def drop() -> None:
            with engine._lock, engine._loop._lock:
                streams.clear()
            dropped.set()

        threading.Thread(target=drop, daemon=True).start()
        assert await asyncio.to_thread(dropped.wait, 10)

    asyncio.run(run())
    assert wait_idle(engine)


def test_stop_token_outside_vocabulary(engine: Engine) -> None:
    with pytest.raises(RequestError, match="stop_token_ids=512 must be below 512"):
        engine.generate(prompt(3), SamplingParams(stop_token_ids=(512,)))


def test_text_prompts(engine: Engine) -> None:
    """Text gets the tokenizer's BOS and comes back as text."""
    done = engine.generate("a prompt", GREEDY)[0]
    ids = [engine.model_config.bos_token_id, *engine.tokenizer.encode("a prompt").ids]
    assert done.prompt_tokens == len(ids)
    np.testing.assert_array_equal(done.token_ids, engine.generate(np.array(ids), GREEDY)[0].token_ids)


def test_generate_inside_a_running_loop(engine: Engine, alone: dict[int, np.ndarray]) -> None:
    async def run() -> np.ndarray:
        return engine.generate(prompt(9), GREEDY)[0].token_ids

    np.testing.assert_array_equal(asyncio.run(run()), alone[9])


def test_many_threads(engine: Engine, alone: dict[int, np.ndarray]) -> None:
    results: dict[int, np.ndarray] = {}

    def one(length: int) -> None:
        results[length] = engine.generate(prompt(length), GREEDY)[0].token_ids

    threads = [threading.Thread(target=one, args=(length,)) for length in LENGTHS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for length in LENGTHS:
        np.testing.assert_array_equal(results[length], alone[length])


def test_close_ends_streams_and_is_idempotent(engine_config: EngineConfig) -> None:
    engine = Engine(engine_config)

    async def run() -> FinishReason | None:
        stream = engine.stream(prompt(9), SamplingParams(max_tokens=80, ignore_eos=True))
        await anext(stream)
        await asyncio.to_thread(engine.close)
        return [delta async for delta in stream][-1].finish_reason

    assert asyncio.run(run()) is FinishReason.ABORT
    engine.close()
    assert not engine.is_alive
    with pytest.raises(EngineError, match="closed"):
        engine.generate(prompt(3), GREEDY)


def filled_with_nan(cache: Cache) -> Cache:
    """The same tables over pages and rings whose every value is NaN: 0xFF in all formats."""
    def fill(array: jax.Array) -> jax.Array:
        value = np.nan if array.dtype == np.float32 else 255
        return jax.device_put(np.full(array.shape, value, array.dtype), array.sharding)

    return dataclasses.replace(cache, pages=fill(cache.pages), layers=jax.tree.map(fill, cache.layers))


def test_what_an_earlier_request_left_behind_is_never_read(engine: Engine, alone: dict[int, np.ndarray]) -> None:
    """Every slot and page of both meshes full of NaN: requests of all lengths give the same tokens as ever."""
    engine._loop._scheduler.flush_prefix_cache()
    for state in (engine.device.prefill, engine.device.decode):
        state.cache = filled_with_nan(state.cache)
    for length, done in zip(LENGTHS, engine.generate([prompt(length) for length in LENGTHS], GREEDY), strict=True):
        np.testing.assert_array_equal(done.token_ids, alone[length], err_msg=f"prompt of {length}")


def test_a_defect_ends_requests_with_an_error(engine_config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """No caller waits for ever on a broken engine."""
    with Engine(engine_config) as engine:
        def fail(*_: object) -> None:
            raise RuntimeError("device lost")

        monkeypatch.setattr(DeviceEngine, "decode_step", fail)
        done = engine.generate([prompt(3), prompt(4)], GREEDY)
        assert [one.finish_reason for one in done] == [FinishReason.ERROR] * 2
        assert not engine.is_alive
        with pytest.raises(EngineError):
            engine.generate(prompt(3), GREEDY)


def test_a_request_with_nan_logits_fails_alone(
    engine: Engine, alone: dict[int, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    join, wait, slots = engine.device.join, DecodeStep.wait, []

    def see_join(slot, row):
        if row.position == 33:  # the prompt of 34 tokens
            slots.append(slot)
        join(slot, row)

    def spoil(step):
        result = wait(step)
        return dataclasses.replace(result, end=result.end | NOT_FINITE * np.isin(np.arange(4), slots))

    monkeypatch.setattr(engine.device, "join", see_join)
    monkeypatch.setattr(DecodeStep, "wait", spoil)
    bad, good = engine.generate([prompt(34), prompt(17)], GREEDY)
    assert len(slots) == 1
    assert (bad.finish_reason, len(bad.token_ids)) == (FinishReason.ERROR, 0)
    np.testing.assert_array_equal(good.token_ids, alone[17])


def test_too_few_devices(checkpoint: Path) -> None:
    """One sentence with the setting to use when JAX was started with too few."""
    code = (
        "import jax; jax.devices()\n"
        "from widemesh.serving import Engine, EngineConfig\n"
        "from widemesh.sharding import MeshError\n"
        f"try: Engine(EngineConfig(model={str(checkpoint)!r}))\n"
        "except MeshError as err: print(err)\n"
    )
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=3"}
    out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout
    assert "need 6 devices but JAX has 3" in out
    assert "XLA_FLAGS=--xla_force_host_platform_device_count=6 before JAX is first used" in out


def test_bad_folders(tmp_path: Path, checkpoint: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        Engine(EngineConfig(model=str(tmp_path / "nothing")))
    with pytest.raises(ConfigError, match="max_model_len=9999999 exceeds the model's max_position_embeddings"):
        Engine(EngineConfig(model=str(checkpoint), max_model_len=9999999))


def wait_idle(engine: Engine, timeout_s: float = 10.0) -> bool:
    """Whether no request holds a slot or waits within the time."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if engine.num_running == engine.num_waiting == 0:
            return True
        time.sleep(0.01)
    return False


def test_an_engine_that_cannot_open_tells_the_other_processes(engine_config, monkeypatch) -> None:
    """They wait for it in a collective, and would for ever."""
    told: list[BaseException] = []
    monkeypatch.setattr("widemesh.serving.job.Job.fail", lambda job, failure: told.append(failure))

    def full(*_: object) -> None:
        raise MemoryError("no room for the weights")

    monkeypatch.setattr(Engine, "_open_device", full)
    with pytest.raises(MemoryError, match="no room for the weights"):
        Engine(engine_config)
    assert [str(failure) for failure in told] == ["no room for the weights"]
