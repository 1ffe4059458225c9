"""Reshuffles forced at random moments while requests come and go, with every placement checked on the devices.

As a program, in a process with more virtual devices than the tests have,

    python reshuffle_runs.py FOLDER RESHUFFLES

prints one JSON object: what each of `SETTINGS` came to, with a model that it writes to FOLDER. Requests are a fixed
list without an end, all greedy; an engine takes as many of them as it needs until its reshuffles are over, and the one
without EPLB as many as any of the others.
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

import numpy as np
from expert_tags import Tags, any_placement, experts_of
from flax import nnx
from reshuffle_model import write_model

from widemesh.eplb import EplbConfig
from widemesh.serving import Engine, EngineConfig, SamplingParams
from widemesh.serving.device import DeviceEngine
from widemesh.serving.expert_control import EplbBusy

RANKS = 8
DEVICES = RANKS + 1  # with one for prefill
# A rank has three slots, and pages for one request of any length: with three, some are preempted.
COMMON: dict[str, Any] = {
    "numerics": "plain", "max_model_len": 64, "max_num_seqs": 3 * RANKS, "max_num_batched_tokens": 32, "page_size": 4,
    "num_pages": 17, "reserve_output_tokens": 1, "replay_prefix": "exact", "replay_tail": "full",
    "prefill_devices": 1, "decode_devices": RANKS,
}  # fmt: skip
# By name: the redundant experts (None: no EPLB), and whether rows are summed in the order of experts.
SETTINGS: dict[str, tuple[int | None, bool]] = {
    "0": (0, True), "8": (8, True), "32": (32, True), "8, sums in any order": (8, False), "off": (None, True),
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


class Watch:
    """Looks at what serves: after every commit at the devices, and at every decode dispatch."""

    def __init__(self, engine: Engine):
        self._tags, self._state = Tags(engine.config.model), engine.device.decode
        self.commits = self.dispatches = self.migrating_dispatches = self.versions = 0
        self.problems: list[str] = self._tags.problems(self._state)
        self._seen = self._serving()  # its rows and maps have been looked at
        self._last_maps: Any = None
        self._wrap(engine)

    def _serving(self) -> list[Any]:
        return _pair(self._state.parameters, self._state.replicas)

    def _wrap(self, engine: Engine) -> None:
        reshuffler, decode = engine._reshuffler, engine.device._decode
        commit = reshuffler._mover.commit

        def committed(migration: Any, slot_owner: np.ndarray) -> None:
            before, layer = self._seen, migration.layer
            commit(migration, slot_owner)
            self.commits += 1
            self.problems += self._tags.problems(self._state, [layer])
            self._seen = self._serving()
            changed = {i // 3 for i, (a, b) in enumerate(zip(before[:-1], self._seen[:-1], strict=True)) if a is not b}
            if changed != {layer} or before[-1] is self._seen[-1]:
                self.problems.append(f"the commit of layer {layer} has changed layers {changed}")

        def dispatched(parameters: Any, *rest: Any) -> Any:
            *_, replicas, _ = rest
            if any(a is not b for a, b in zip(_pair(parameters, replicas), self._seen, strict=True)):
                self.problems.append("a step was given weights and maps of two placements")
            self.dispatches += 1
            self.migrating_dispatches += reshuffler.phase == "migrating"
            self.versions += replicas is not self._last_maps
            self._last_maps = replicas
            return decode(parameters, *rest)

        reshuffler._mover.commit, engine.device._decode = committed, dispatched


def _pair(parameters: nnx.State[Any, Any], replicas: Any) -> list[Any]:
    """Three arrays of each layer, and the maps."""
    arrays = [one[name].get_value() for one in experts_of(parameters) for name in ("w1", "w2", "w3")]
    return [*arrays, replicas]


@dataclasses.dataclass
class Forced:
    """How reshuffles came about."""

    imported: int = 0
    asked: int = 0
    refused: int = 0  # imports while experts were moving


def force(engine: Engine, count: int, rng: np.random.Generator, found: Forced) -> None:
    """Until so many have been committed: imports of random placements and early plans, by turns at random moments."""
    end_s, experts, turn = time.monotonic() + LIMIT_S, engine.experts, 0
    while (status := experts.status()).rebalances["committed"] < count:
        if time.monotonic() > end_s or not engine.is_alive:
            raise TimeoutError(f"{status.rebalances} of {count}; {status.phase}, {status.last_failure}")
        time.sleep(rng.exponential(0.03))
        turn += 1
        if turn % 3 == 0:
            experts.rebalance(int(rng.integers(1, 8)))
            found.asked += 1
            continue
        try:
            experts.import_placement(any_placement(status.layout, status.slot_owner, rng))
            found.imported += 1
        except EplbBusy:
            found.refused += 1
    experts.pause()
    while experts.status().phase != "idle":
        time.sleep(0.01)


async def serve(engine: Engine, count: int, is_over: threading.Event | None = None) -> list[list[int]]:
    """Tokens of the list's first requests: `count` of them, and those that begin until it is over."""
    running: set[asyncio.Task[None]] = set()
    tokens: list[list[int]] = []

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
    return tokens


def skip_scores() -> None:
    """Compile no programs for prompts' log-probabilities, a third of a start: no request here asks for any."""
    every = DeviceEngine._warm_up_runs
    DeviceEngine._warm_up_runs = lambda self: (  # type: ignore[method-assign]
        (name, run) for name, run in every(self) if not name.startswith("log-probabilities")
    )  # fmt: skip


def open_engine(folder: Path, redundant: int | None, is_invariant: bool) -> Engine:
    """With small windows and plans for any gain; reshuffles that nobody forces are seldom."""
    more: dict[str, Any] = {}
    if redundant is not None:
        more = {"enable_eplb": True, "eplb": EplbConfig(
            num_redundant_experts=redundant, window_size=8, step_interval=60, min_gain=0.0, slice_rows=2,
            log_balancedness_interval=7,
        )}  # fmt: skip
    return Engine(EngineConfig(model=str(folder), batch_invariant=is_invariant, **COMMON, **more))


def run(folder: Path, name: str, reshuffles: int, least: int) -> dict[str, Any]:
    """One engine, with `least` requests at the least."""
    redundant, is_invariant = SETTINGS[name]
    start_s, cpu_s = time.monotonic(), time.process_time()
    with open_engine(folder, redundant, is_invariant) as engine:
        open_s = time.monotonic() - start_s
        found: dict[str, Any] = {}
        if redundant is None:
            tokens = asyncio.run(serve(engine, least))
        else:
            watch, forced, is_over = Watch(engine), Forced(), threading.Event()
            failure: list[BaseException] = []

            def thread() -> None:
                try:
                    force(engine, reshuffles, np.random.default_rng((23, redundant)), forced)
                except BaseException as err:
                    failure.append(err)
                finally:
                    is_over.set()

            forcing = threading.Thread(target=thread)
            forcing.start()
            tokens = asyncio.run(serve(engine, least, is_over))
            forcing.join()
            if failure:
                raise failure[0]
            status = engine.experts.status()
            found = {
                "rebalances": dict(status.rebalances), "last_failure": status.last_failure, "commits": watch.commits,
                "dispatches": watch.dispatches, "migrating_dispatches": watch.migrating_dispatches,
                "versions": watch.versions, "problems": watch.problems, "moved_rows": status.moved_rows,
                "least_rows": status.least_rows, **dataclasses.asdict(forced),
            }  # fmt: skip
        scheduler = engine._loop._scheduler
        return found | {
            "tokens": tokens, "compiles": engine.metrics._compiles.after_warm_up,
            "preemptions": scheduler.num_preemptions, "open_s": round(open_s, 1),
            "wall_s": round(time.monotonic() - start_s, 1), "cpu_s": round(time.process_time() - cpu_s, 1),
        }  # fmt: skip


def main(folder: Path, reshuffles: int, names: list[str]) -> dict[str, Any]:
    """All settings, the one without EPLB last; and the prompts of all requests. The model is written to the folder."""
    skip_scores()
    write_model(folder)
    results: dict[str, Any] = {}
    for name in names:
        taken = max((len(one["tokens"]) for one in results.values()), default=0)
        results[name] = run(folder, name, reshuffles, taken if name == "off" else LEAST)
        brief = {key: value for key, value in results[name].items() if key != "tokens"}
        print(f"{name}: {len(results[name]['tokens'])} requests, {brief}", file=sys.stderr, flush=True)
    most = max(len(one["tokens"]) for one in results.values())
    return results | {"prompts": [request(index)[0].tolist() for index in range(most)]}


if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES}"
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:] or list(SETTINGS))))
