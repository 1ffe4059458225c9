"""The invariance harness: one random workload under different settings must give the same tokens.

A workload is a list of operations: submit a request (greedy or seeded, some with penalties or stop ids, many with a
prefix of an earlier prompt), abort one, or wait for one. An engine runs it and reports every request's tokens. Page
accounts are checked after every turn of the engine's loop, and nothing may compile.

    reference = run(engine_a, Workload.draw(seed, operations))
    compare(reference, run(engine_b, the same workload))

compares token by token: a request that was aborted must hold a beginning of the other's tokens. Tokens may part only
where the model itself was about to choose otherwise (`near_ties`), and only for few requests.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from widemesh.serving import Engine, FinishReason, SamplingParams
from widemesh.serving.loop import EngineLoop
from widemesh.serving.scheduling import ScheduledRequest

# Sums in another order move router and index scores by 1e-6 at most; about one pair of 300 requests has such a tie.
_TIE = 1e-5
_MOST_TIES = 2


@dataclasses.dataclass(frozen=True)
class Submit:
    """A new request."""

    name: str
    prompt: np.ndarray
    sampling: SamplingParams


@dataclasses.dataclass(frozen=True)
class Abort:
    """End an earlier request, wherever it is."""

    name: str


@dataclasses.dataclass(frozen=True)
class Wait:
    """Go on once an earlier request has ended."""

    name: str


Operation = Submit | Abort | Wait


@dataclasses.dataclass(frozen=True)
class Workload:
    """Operations in order."""

    seed: int
    operations: tuple[Operation, ...]

    @classmethod
    def draw(
        cls, seed: int, operations: int, *, vocab: int, longest_prompt: int, longest_output: int, image_id: int
    ) -> Workload:
        """Random operations. About one prompt in two begins like an earlier one, cut anywhere."""
        rng = np.random.default_rng(seed)
        done: list[Operation] = []
        prompts: list[np.ndarray] = []
        names: list[str] = []
        while len(done) < operations:
            kind = rng.choice(3, p=(0.6, 0.15, 0.25)) if names else 0
            if kind == 0:
                name = f"r{len(names)}"
                prompt = rng.integers(3, vocab, rng.integers(1, longest_prompt + 1)).astype(np.int32)
                if prompts and rng.random() < 0.5:
                    earlier = prompts[rng.integers(len(prompts))]
                    shared = rng.integers(1, len(earlier) + 1)
                    prompt = np.concatenate([earlier[:shared], prompt])[:longest_prompt]
                prompt = np.where(prompt == image_id, 3, prompt).astype(np.int32)
                prompts.append(prompt)
                names.append(name)
                done.append(Submit(name, prompt, _sampling(rng, longest_output)))
            else:
                name = names[rng.integers(max(0, len(names) - 8), len(names))]
                done.append(Abort(name) if kind == 1 else Wait(name))
        return cls(seed, tuple(done))


def _sampling(rng: np.random.Generator, longest: int) -> SamplingParams:
    """Greedy for one request in two; the others seeded, with every setting that shapes a distribution now and then."""
    common: dict[str, Any] = {"max_tokens": int(rng.integers(1, longest + 1)), "ignore_eos": bool(rng.random() < 0.7)}
    if rng.random() < 0.2:
        common["stop_token_ids"] = tuple(int(i) for i in rng.integers(3, 100, 3))
    if rng.random() < 0.2:
        common["repetition_penalty"] = float(rng.uniform(1.0, 1.5))
    if rng.random() < 0.2:
        common["frequency_penalty"] = float(rng.uniform(0.0, 1.0))
    if rng.random() < 0.5:
        return SamplingParams(temperature=0.0, **common)
    if rng.random() < 0.3:
        common["top_k"] = int(rng.integers(1, 40))
    if rng.random() < 0.3:
        common["top_p"] = float(rng.uniform(0.5, 1.0))
    if rng.random() < 0.2:
        common["min_p"] = float(rng.uniform(0.0, 0.2))
    return SamplingParams(temperature=float(rng.uniform(0.5, 1.2)), seed=int(rng.integers(2**31)), **common)


@dataclasses.dataclass
class Outcome:
    """What one request came to."""

    tokens: list[int]
    reason: FinishReason | None = None


def run(engine: Engine, workload: Workload) -> dict[str, Outcome]:
    """Run all operations and wait for what is left. Checks accounts after every turn, and that nothing compiles."""
    loop = engine._loop
    scheduler, turn, problems = loop._scheduler, loop._turn, []

    def checked() -> None:
        turn()
        try:
            scheduler.check()
        except AssertionError as err:
            problems.append(repr(err))
            raise

    loop._turn = checked  # type: ignore[method-assign]
    compiled = engine.metrics._compiles.after_warm_up
    guarded = _guard(engine.device)
    try:
        outcomes = asyncio.run(_run(engine, workload))
    finally:
        del loop._turn
        for name in guarded:
            delattr(engine.device, name)
    assert isinstance(loop, EngineLoop) and not problems, problems
    assert engine.is_alive and engine.num_running == engine.num_waiting == 0
    assert engine.metrics._compiles.after_warm_up == compiled
    for pool in (*scheduler.prefill.pools, *scheduler.decode.pools):
        assert pool.num_used == 0
    return outcomes


def known_tokens(workload: Workload, outcomes: dict[str, Outcome]) -> list[np.ndarray]:
    """The tokens of every request, prompt and output: what an engine with drafts may be given to draft."""
    asked = [one for one in workload.operations if isinstance(one, Submit)]
    return [np.concatenate([one.prompt, outcomes[one.name].tokens]).astype(np.int32) for one in asked]


def _guard(device: Any) -> tuple[str, ...]:
    """Make every host array that goes to the device read-only: on a CPU its buffer may be the device's, so writing to
    it later would change a step under way. Returns the names of the methods that were wrapped."""
    names = ("prefill_pages", "prefill_step", "load", "decode_pages", "join", "set_tally", "decode_step")

    def wrap(method: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            for value in (*args, *kwargs.values()):
                _freeze(value)
            return method(*args, **kwargs)

        return call

    for name in names:
        setattr(device, name, wrap(getattr(device, name)))
    return names


def _freeze(value: Any) -> None:
    if isinstance(value, np.ndarray):
        value.setflags(write=False)
    elif isinstance(value, list | tuple):
        for part in value:
            _freeze(part)
    elif dataclasses.is_dataclass(value) and not isinstance(value, ScheduledRequest):
        for field in dataclasses.fields(value):
            _freeze(getattr(value, field.name))


async def _run(engine: Engine, workload: Workload) -> dict[str, Outcome]:
    outcomes: dict[str, Outcome] = {}
    readers: dict[str, asyncio.Task[None]] = {}

    async def read(name: str, operation: Submit) -> None:
        async for delta in engine.stream(operation.prompt, operation.sampling, request_id=name):
            outcomes[name].tokens += delta.token_ids.tolist()
            outcomes[name].reason = delta.finish_reason

    for operation in workload.operations:
        match operation:
            case Submit(name):
                outcomes[name] = Outcome([])
                readers[name] = asyncio.create_task(read(name, operation))
                await asyncio.sleep(0)
            case Abort(name):
                engine.abort(name)
            case Wait(name):
                await readers[name]
    await asyncio.gather(*readers.values())
    return outcomes


def compare(
    workload: Workload, first: dict[str, Outcome], second: dict[str, Outcome],
    closest_choice: Callable[[np.ndarray], Any],
) -> int:
    """Assert equal tokens; returns how many tokens were compared. `closest_choice` judges where they part."""
    compared = ties = 0
    for operation in workload.operations:
        if not isinstance(operation, Submit):
            continue
        own, other = first[operation.name], second[operation.name]
        said = f"{operation.name} of seed {workload.seed}: {operation.sampling}, prompt of {len(operation.prompt)}"
        assert FinishReason.ERROR not in (own.reason, other.reason), said
        is_aborted = FinishReason.ABORT in (own.reason, other.reason)
        pairs = zip(own.tokens, other.tokens, strict=False)
        parted = next((i for i, (one, two) in enumerate(pairs) if one != two), None)
        if parted is None and len(own.tokens) != len(other.tokens) and not is_aborted:
            parted = min(len(own.tokens), len(other.tokens))
        if parted is not None:
            choice = closest_choice(np.concatenate([operation.prompt, own.tokens[:parted]]))
            ties += 1
            assert choice.margin < _TIE and ties <= _MOST_TIES, f"{said}: {own} {other}; closest: {choice}"
        else:
            assert is_aborted or own.reason == other.reason, said
        compared += min(len(own.tokens), len(other.tokens)) if parted is None else parted
    return compared
