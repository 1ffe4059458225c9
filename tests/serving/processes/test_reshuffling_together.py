"""Two processes move the experts of their common decode mesh: to the same placement, without changing a token."""

from __future__ import annotations

import importlib.util
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from widemesh.eplb.placement_file import dump_placement
from widemesh.serving.expert_control import ExpertStatus
from widemesh.serving.grpc.experts_client import ExpertsClient

_file = Path(__file__).parents[1] / "expert_tags.py"
_spec = importlib.util.spec_from_file_location("widemesh_test_expert_tags", _file)
assert _spec is not None and _spec.loader is not None
tags = sys.modules.setdefault(_spec.name, importlib.util.module_from_spec(_spec))
_spec.loader.exec_module(tags)

SETTINGS = {
    "enable_eplb": True, "batch_invariant": True, "eplb.num_redundant_experts": 4, "eplb.window_size": 8,
    "eplb.step_interval": 100_000, "eplb.min_gain": 0, "eplb.slice_rows": 2,
}  # fmt: skip
WAIT_S = 60


def until(is_true: Callable[[], bool], what: Callable[[], object]) -> None:
    end_s = time.monotonic() + WAIT_S
    while not is_true():
        assert time.monotonic() < end_s, what()
        time.sleep(0.02)


def test_both_move_together(run_job: Callable[..., Any], ask: Callable[..., Iterator[Any]], prompts) -> None:
    with run_job(SETTINGS, SETTINGS) as served:
        experts = [ExpertsClient(port=one.port) for one in served]

        def answer(index: int) -> list[int]:
            port = served[index % 3 % 2].port  # two of three to the first process
            return [token for message in ask(port, prompts[index].tolist(), max_tokens=20)
                    for token in message.chunk.token_ids]  # fmt: skip

        def answers() -> list[list[int]]:
            with ThreadPoolExecutor(len(prompts)) as pool:
                return list(pool.map(answer, range(len(prompts))))

        def statuses() -> list[ExpertStatus]:
            return [one.status() for one in experts]

        def ended(count: int) -> bool:
            """So many rebalances have been committed in both processes, which are idle, at the same placement."""
            both = statuses()
            return (all(one.phase == "idle" and one.rebalances["committed"] == count for one in both)
                    and len({one.placement_hash for one in both}) == 1)  # fmt: skip

        wanted, wrong, is_over, rounds = answers(), [], threading.Event(), 0
        first = statuses()[0]
        assert ended(0)

        def load() -> None:
            nonlocal rounds
            while not is_over.is_set():
                found, rounds = answers(), rounds + 1
                if found != wanted:
                    wrong.append(found)

        loading = threading.Thread(target=load)
        loading.start()
        try:
            rng = np.random.default_rng(0)
            for turn in range(2):
                both_hold = tags.any_placement(first.layout, statuses()[0].slot_owner, rng)
                placement, before = dump_placement(both_hold, first.layout), statuses()
                wanted_hash = experts[turn].import_placement(placement)
                seen = rounds
                until(lambda seen=seen: rounds > seen + 1, statuses)
                # One process alone has it: nobody moves.
                for rank, (one, then) in enumerate(zip(statuses(), before, strict=True)):
                    waits = ("waiting", wanted_hash) if rank == turn else ("idle", 0)
                    assert (one.phase, one.imported_hash, one.placement_hash) == (*waits, then.placement_hash)
                assert experts[1 - turn].import_placement(placement) == wanted_hash
                until(lambda turn=turn: ended(2 * turn + 1), statuses)
                assert statuses()[0].placement_hash == wanted_hash
                experts[turn].rebalance(4)  # from random to even
                until(lambda turn=turn: ended(2 * turn + 2), statuses)
        finally:
            is_over.set()
            loading.join(WAIT_S)
        assert rounds > 4 and not wrong
        assert answers() == wanted
        for one in statuses():
            assert one.rebalances["abandoned"] == 0 and one.moved_rows == one.least_rows > 0
            np.testing.assert_array_equal(one.slot_owner, statuses()[0].slot_owner)
        for client in experts:
            client.__exit__()
        assert not any("Traceback" in one.log() for one in served)
