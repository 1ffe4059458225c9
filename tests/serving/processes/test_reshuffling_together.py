"""Two processes move the experts of their common decode mesh: to the same placements, without changing a token.

Those of the target and those of its draft, each by itself.
"""

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
from widemesh.serving.expert_models import MODEL_NAMES
from widemesh.serving.grpc.experts_client import ExpertsClient


def _above(name: str) -> Any:
    """A module of the folder above; tests are imported without a path of their own."""
    spec = importlib.util.spec_from_file_location(f"widemesh_test_{name}", Path(__file__).parents[1] / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules.setdefault(spec.name, importlib.util.module_from_spec(spec))
    spec.loader.exec_module(module)
    return module


tags, models = _above("expert_tags"), _above("reshuffle_model")

SETTINGS = {
    "enable_eplb": True, "batch_invariant": True, "eplb.num_redundant_experts": 4, "eplb.window_size": 8,
    "eplb.step_interval": 100_000, "eplb.min_gain": 0, "eplb.slice_rows": 2, "num_speculative_tokens": 2,
    "draft_eplb.num_redundant_experts": 2, "draft_eplb.window_size": 6, "draft_eplb.step_interval": 100_000,
    "draft_eplb.min_gain": 0,
}  # fmt: skip
WAIT_S = 60


def until(is_true: Callable[[], bool], what: Callable[[], object]) -> None:
    end_s = time.monotonic() + WAIT_S
    while not is_true():
        assert time.monotonic() < end_s, what()
        time.sleep(0.02)


def test_both_move_together(
    run_job: Callable[..., Any], ask: Callable[..., Iterator[Any]], prompts, tmp_path: Path
) -> None:
    settings = SETTINGS | {"model": models.write_model(tmp_path / "model", models.SHORT_WITH_DRAFT)}
    with run_job(settings, settings) as served:
        clients = {model: [ExpertsClient(port=one.port, model=model) for one in served] for model in MODEL_NAMES}

        def answer(index: int) -> list[int]:
            port = served[index % 3 % 2].port  # two of three to the first process
            return [token for message in ask(port, prompts[index].tolist(), max_tokens=20)
                    for token in message.chunk.token_ids]  # fmt: skip

        def answers() -> list[list[int]]:
            with ThreadPoolExecutor(len(prompts)) as pool:
                return list(pool.map(answer, range(len(prompts))))

        def statuses(model: str) -> list[ExpertStatus]:
            return [one.status() for one in clients[model]]

        def ended(model: str, count: int) -> bool:
            """So many rebalances have been committed in both processes, which are idle, at the same placement."""
            both = statuses(model)
            return (all(one.phase == "idle" and one.rebalances["committed"] == count for one in both)
                    and len({one.placement_hash for one in both}) == 1)  # fmt: skip

        wanted, wrong, is_over, rounds = answers(), [], threading.Event(), 0
        assert all(ended(model, 0) for model in MODEL_NAMES)

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
            for turn, model in enumerate(MODEL_NAMES):
                experts, other = clients[model], MODEL_NAMES[1 - turn]
                before, untouched = statuses(model), statuses(other)[0].placement_hash
                both_hold = tags.any_placement(before[0].layout, before[0].slot_owner, rng)
                placement = dump_placement(both_hold, before[0].layout)
                wanted_hash = experts[turn].import_placement(placement)
                seen = rounds
                until(lambda seen=seen: rounds > seen + 1, lambda: (rounds, wrong))
                # One process alone has it: nobody moves.
                for rank, (one, then) in enumerate(zip(statuses(model), before, strict=True)):
                    waits = ("waiting", wanted_hash) if rank == turn else ("idle", 0)
                    assert (one.phase, one.imported_hash, one.placement_hash) == (*waits, then.placement_hash)
                assert experts[1 - turn].import_placement(placement) == wanted_hash
                until(lambda model=model: ended(model, 1), lambda model=model: statuses(model))
                assert statuses(model)[0].placement_hash == wanted_hash
                assert {one.placement_hash for one in statuses(other)} == {untouched}
                experts[turn].rebalance(4)  # from random to even
                until(lambda model=model: ended(model, 2), lambda model=model: statuses(model))
        finally:
            is_over.set()
            loading.join(WAIT_S)
        assert rounds > 4 and not wrong
        assert answers() == wanted
        for model, experts in clients.items():
            for one in statuses(model):
                assert one.rebalances["abandoned"] == 0 and one.moved_rows == one.least_rows > 0
                np.testing.assert_array_equal(one.slot_owner, statuses(model)[0].slot_owner)
            for client in experts:
                client.__exit__()
        assert not any("Traceback" in one.log() for one in served)
