"""Reshuffles forced at random moments while requests come and go, with every placement checked on the devices.

As a program, in a process with more virtual devices than the tests have,

    python reshuffle_runs.py FOLDER RESHUFFLES

prints one JSON object: what each of `SETTINGS` came to, with a model that it writes to FOLDER. Requests are a fixed
list without an end, all greedy; an engine takes as many of them as it needs until its reshuffles are over, and the one
without EPLB as many as any of the others.

All of them speculate. The draft's random weights guess no token, so the engines with EPLB get other drafts in their
place where the first requests' tokens, which the one without EPLB has drawn before, suggest some (`Guesses`).
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from expert_tags import Tags, any_placement, experts_of
from flax import nnx
from reshuffle_model import MODEL, write_model

from widemesh.eplb import EplbConfig
from widemesh.model.transformer import Transformer
from widemesh.serving import Engine, EngineConfig, SamplingParams
from widemesh.serving.device import DeviceEngine
from widemesh.serving.expert_control import EplbBusy, ExpertControl
from widemesh.serving.expert_models import DRAFT, TARGET

RANKS = 8
DEVICES = RANKS + 1  # with one for prefill
# A rank has two slots, and pages for one request of any length: with two, some are preempted.
COMMON: dict[str, Any] = {
    "numerics": "plain", "max_model_len": 64, "max_num_seqs": 2 * RANKS, "max_num_batched_tokens": 32, "page_size": 4,
    "num_pages": 17, "reserve_output_tokens": 1, "replay_prefix": "exact", "replay_tail": "full",
    "prefill_devices": 1, "decode_devices": RANKS, "num_speculative_tokens": 2,
}  # fmt: skip
# By name: the redundant experts of target and draft (None: no EPLB), and whether rows are summed in the order of
# experts.
SETTINGS: dict[str, tuple[tuple[int, int] | None, bool]] = {
    "off": (None, True), "0": ((0, 8), True), "8": ((8, 0), True), "32": ((32, 16), True),
    "8, sums in any order": ((8, 8), False),
}  # fmt: skip
# So many requests with at most so many of them under way, by turns: idle ranks, full slots, and one after the other.
LEVELS = np.repeat((3, 24, 9, 1, 16), (3, 30, 8, 2, 15))
LEAST = 40  # requests of an engine, enough for full slots
LIMIT_S = 1200  # for one engine


def request(index: int) -> tuple[np.ndarray, SamplingParams]:
    """One of the list, the same in every engine."""
    rng = np.random.default_rng((17, index))
    prompt = rng.integers(3, 400, rng.integers(1, 31)).astype(np.int32)
    return prompt, SamplingParams(temperature=0.0, max_tokens=int(rng.integers(4, 33)), ignore_eos=True)


class Guesses:
    """Drafts for requests that have been seen before: what followed a token at this position in the last of them.

    Requests that are at one position with the same token share a place, so some guesses are wrong.
    """

    def __init__(self, tokens: list[list[int]]):
        shape = COMMON["max_model_len"], MODEL.vocab_size, COMMON["num_speculative_tokens"]
        self._found = np.full(shape, -1, np.int32)
        for index, drawn in enumerate(tokens):
            before = len(request(index)[0])
            for number, token in enumerate(drawn):
                follow = drawn[number + 1 :][: self._found.shape[-1]]
                self._found[before + number, token, : len(follow)] = follow

    def put_in(self) -> None:
        """In every program that is traced from now on; where there is none, the draft's own proposal stays."""
        every, found = Transformer.propose, self._found

        def propose(model: Transformer, cache: Any, step: Any) -> Any:
            proposal, cache = every(model, cache, step)
            known = jnp.asarray(found)[step.rows.start, step.rows.tokens[:, 0]]
            tokens = jnp.where(known < 0, proposal.tokens, known)
            return dataclasses.replace(proposal, tokens=tokens), cache

        Transformer.propose = propose  # type: ignore[method-assign]


class Watch:
    """Looks at what serves: after every commit at the devices, and at every decode dispatch."""

    def __init__(self, engine: Engine):
        self._tags = Tags(engine.config.model, engine.config.num_speculative_tokens)
        self._state, self._reshufflers = engine.device.decode, engine._reshufflers
        self.dispatches = self.migrating_dispatches = self.migrating_both = self.versions = 0
        self.commits = [0, 0]  # of each model, as in what follows
        self.problems: list[str] = self._tags.problems(self._state)
        self._seen = self._serving()  # its rows and maps have been looked at
        self._last_maps: Any = None
        self._wrap_decode(engine)
        for model in (TARGET, DRAFT):
            self._wrap_commit(model)

    def _serving(self) -> dict[tuple[str, int, int], Any]:
        return _arrays(self._state.parameters, tuple(placed.replicas for placed in self._state.experts))

    def _wrap_commit(self, model: int) -> None:
        mover = self._reshufflers[model]._mover
        commit = mover.commit

        def committed(migration: Any, slot_owner: np.ndarray) -> None:
            before, layer = self._seen, migration.layer
            commit(migration, slot_owner)
            self.commits[model] += 1
            self.problems += self._tags.problems_of(self._state, model, [layer])
            self._seen = self._serving()
            changed = {name for name, array in self._seen.items() if array is not before[name]}
            wanted = {("maps", model, 0), *((name, model, layer) for name in ("w1", "w2", "w3"))}
            if changed != wanted:
                self.problems.append(f"the commit of {model}, {layer} has changed {changed}")

        mover.commit = committed  # type: ignore[method-assign]

    def _wrap_decode(self, engine: Engine) -> None:
        decode = engine.device._decode

        def dispatched(parameters: Any, *rest: Any) -> Any:
            *_, replicas, _ = rest
            if any(array is not self._seen[name] for name, array in _arrays(parameters, replicas).items()):
                self.problems.append("a step was given weights and maps of two placements")
            moving = [reshuffler.phase == "migrating" for reshuffler in self._reshufflers]
            self.dispatches += 1
            self.migrating_dispatches += any(moving)
            self.migrating_both += all(moving)
            self.versions += self._last_maps is None or any(a is not b for a, b in zip(
                replicas, self._last_maps, strict=True))  # fmt: skip
            self._last_maps = replicas
            return decode(parameters, *rest)

        engine.device._decode = dispatched


def _arrays(parameters: nnx.State[Any, Any], replicas: tuple[Any, ...]) -> dict[tuple[str, int, int], Any]:
    """By kind, model and layer: the experts' matrices of every layer, and the maps of each model."""
    found = {("maps", model, 0): maps for model, maps in enumerate(replicas)}
    for model in (TARGET, DRAFT):
        for layer, one in enumerate(experts_of(parameters, model)):
            found |= {(name, model, layer): one[name].get_value() for name in ("w1", "w2", "w3")}
    return found


@dataclasses.dataclass
class Forced:
    """How reshuffles came about, of both models together."""

    imported: int = 0
    asked: int = 0
    refused: int = 0  # imports while experts were moving


def force(engine: Engine, count: int, rng: np.random.Generator, found: Forced) -> None:
    """Until so many have been committed of each model: imports of random placements and early plans, by turns.

    They come at random moments, to one model or to both at once, as the first ones do.
    """
    end_s, turn = time.monotonic() + LIMIT_S, 0
    models = (engine.experts, engine.draft_experts)
    while True:
        statuses = [model.status() for model in models]
        if all(one.rebalances["committed"] >= count for one in statuses):
            break
        if time.monotonic() > end_s or not engine.is_alive:
            raise TimeoutError(str([(one.rebalances, one.phase, one.last_failure) for one in statuses]))
        time.sleep(rng.exponential(0.03))
        turn += 1
        for model in models if turn == 1 else (models[:1], models[1:], models)[rng.integers(3)]:
            _force_one(model, turn, rng, found)
    for model in models:
        model.pause()
    while any(model.status().phase != "idle" for model in models):
        time.sleep(0.01)


def _force_one(experts: ExpertControl, turn: int, rng: np.random.Generator, found: Forced) -> None:
    if turn % 3 == 0:
        experts.rebalance(int(rng.integers(1, 7)))
        found.asked += 1
        return
    status = experts.status()
    try:
        experts.import_placement(any_placement(status.layout, status.slot_owner, rng))
        found.imported += 1
    except EplbBusy:
        found.refused += 1


async def serve(
    engine: Engine, tokens: list[list[int]], count: int, is_over: threading.Event | None = None
) -> None:
    """Add tokens of the list's next requests: up to `count` of all, and those that begin until it is over."""
    running: set[asyncio.Task[None]] = set()

    async def read(index: int) -> None:
        prompt, sampling = request(index)
        async for delta in engine.stream(prompt, sampling):
            tokens[index] += delta.token_ids.tolist()

    while len(tokens) < count or (is_over is not None and not is_over.is_set()):
        level = LEVELS[len(tokens) % len(LEVELS)]
        while len(running) >= level:
            _, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        tokens.append([])
        running.add(asyncio.create_task(read(len(tokens) - 1)))
        await asyncio.sleep(0)
    await asyncio.gather(*running)


def skip_scores() -> None:
    """Compile no programs for prompts' log-probabilities, a third of a start: no request here asks for any."""
    every = DeviceEngine._warm_up_runs
    DeviceEngine._warm_up_runs = lambda self: (  # type: ignore[method-assign]
        (name, run) for name, run in every(self) if not name.startswith("log-probabilities")
    )  # fmt: skip


def open_engine(folder: Path, name: str) -> Engine:
    """With small windows and plans for any gain; reshuffles that nobody forces are seldom."""
    redundant, is_invariant = SETTINGS[name]
    more: dict[str, Any] = {}
    if redundant is not None:
        shared = {"min_gain": 0.0, "log_balancedness_interval": 7}
        more = {
            "enable_eplb": True,
            "eplb": EplbConfig(num_redundant_experts=redundant[TARGET], window_size=8, step_interval=60, slice_rows=2,
                               **shared),
            "draft_eplb": EplbConfig(num_redundant_experts=redundant[DRAFT], window_size=6, step_interval=50, **shared),
        }  # fmt: skip
    return Engine(EngineConfig(model=str(folder), batch_invariant=is_invariant, **COMMON, **more))


def run(folder: Path, name: str, reshuffles: int) -> dict[str, Any]:
    """One engine whose experts move."""
    start_s, cpu_s = time.monotonic(), time.process_time()
    with open_engine(folder, name) as engine:
        open_s = time.monotonic() - start_s
        watch, forced, is_over, failure = Watch(engine), Forced(), threading.Event(), []

        def thread() -> None:
            try:
                force(engine, reshuffles, np.random.default_rng((23, *SETTINGS[name][0])), forced)
            except BaseException as err:
                failure.append(err)
            finally:
                is_over.set()

        forcing, tokens = threading.Thread(target=thread), []
        forcing.start()
        asyncio.run(serve(engine, tokens, LEAST, is_over))
        forcing.join()
        if failure:
            raise failure[0]
        statuses = (engine.experts.status(), engine.draft_experts.status())
        return {
            "models": [
                {"rebalances": dict(one.rebalances), "last_failure": one.last_failure, "commits": commits,
                 "moved_rows": one.moved_rows, "least_rows": one.least_rows}
                for one, commits in zip(statuses, watch.commits, strict=True)
            ],
            "dispatches": watch.dispatches, "migrating_dispatches": watch.migrating_dispatches,
            "migrating_both": watch.migrating_both, "versions": watch.versions,
            "problems": watch.problems + watch._tags.problems(engine.device.decode), **dataclasses.asdict(forced),
            "tokens": tokens, "compiles": engine.metrics._compiles.after_warm_up,
            "preemptions": engine._loop._scheduler.num_preemptions,
            "accepted": engine.metrics.speculation.accepted_tokens,
            "drafts": engine.metrics.speculation.tried_tokens, "open_s": round(open_s, 1),
            "wall_s": round(time.monotonic() - start_s, 1), "cpu_s": round(time.process_time() - cpu_s, 1),
        }  # fmt: skip


def main(folder: Path, reshuffles: int, names: list[str]) -> dict[str, Any]:
    """All settings, and the prompts of all requests. The model is written to the folder."""
    skip_scores()
    write_model(folder)
    tokens: list[list[int]] = []
    results: dict[str, Any] = {"off": {"tokens": tokens}}
    start_s, cpu_s = time.monotonic(), time.process_time()
    with open_engine(folder, "off") as off:
        counter = off.metrics._compiles  # of this process: also of the other engines' programs
        asyncio.run(serve(off, tokens, LEAST))
        compiles = counter.after_warm_up
        print(f"off: {time.monotonic() - start_s:.1f} s, {time.process_time() - cpu_s:.1f} s of CPU time",
              file=sys.stderr, flush=True)  # fmt: skip
        Guesses(tokens).put_in()
        for name in names:
            results[name] = run(folder, name, reshuffles)
            brief = {key: value for key, value in results[name].items() if key != "tokens"}
            print(f"{name}: {len(results[name]['tokens'])} requests, {brief}", file=sys.stderr, flush=True)
        compiled = counter.after_warm_up
        asyncio.run(serve(off, tokens, max(len(one["tokens"]) for one in results.values())))
        results["off"]["compiles"] = compiles + counter.after_warm_up - compiled
    return results | {"prompts": [request(index)[0].tolist() for index in range(len(tokens))]}


if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES}"
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:] or list(SETTINGS)[1:])))
