"""An engine without requests sleeps, and whatever comes wakes it."""

from __future__ import annotations

import importlib.util
import itertools
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from widemesh.eplb.agreed import Report
from widemesh.serving.agreement import Agreement, step_schema
from widemesh.serving.config import EngineConfig
from widemesh.serving.loop import EngineLoop
from widemesh.serving.metrics import EngineMetrics
from widemesh.serving.scheduling import ReplayRule, Scheduler
from widemesh.sharding.ticket import LocalTicket

_spec = importlib.util.spec_from_file_location(
    "widemesh_stub_device", Path(__file__).parent / "processes" / "stub_device.py"
)
assert _spec is not None and _spec.loader is not None
_module = sys.modules.setdefault(_spec.name, importlib.util.module_from_spec(_spec))
_spec.loader.exec_module(_module)

SIZES = EngineConfig(max_model_len=32, max_num_seqs=4, page_size=4, prefill_devices=2, decode_devices=2)


class Reshuffler:
    """Has something to do at some looks and not at others; `looks` says at which."""

    def __init__(self, looks):
        self._looks = looks
        self.num_steps = 0

    @property
    def wants_step(self):
        return next(self._looks)

    def report(self):
        return Report()

    def act(self, agreed, *, decodes):
        self.num_steps += 1
        return 0

    def close(self):
        pass


def open_loop(reshuffler):
    metrics = EngineMetrics(model_name="m", max_model_len=32, compiles=SimpleNamespace(after_warm_up=0), traffic={})
    rule = ReplayRule(config=SIZES.replay, window=8, num_layers=2, max_ratio=2)
    agreement = Agreement(LocalTicket(step_schema(4, ("target",))), lambda *_: None)
    return EngineLoop(SIZES, Scheduler(SIZES.scheduler, rule), _module.StubDevice(SIZES), lambda _: None, metrics,
                      agreement, reshufflers=(reshuffler,))  # fmt: skip


def answer(loop, function):
    """What the engine's thread answers; fails if it does not."""
    found = []
    thread = threading.Thread(target=lambda: found.append(loop.call(function)), daemon=True)
    thread.start()
    thread.join(20)
    assert found, "the engine's thread does not answer"
    return found[0]


@pytest.mark.parametrize("looks", [(True, False), (False, True), (True, False, False), (False,)])
def test_what_one_look_finds_and_the_next_does_not(looks):
    """Looking takes in what is ready, so that a second look may find less: the thread must not sleep unknown to all."""
    reshuffler = Reshuffler(itertools.cycle(looks))
    loop = open_loop(reshuffler)
    for number in range(100):
        assert answer(loop, lambda number=number: number) == number
    loop.stop()
    assert not loop.is_running
    assert (reshuffler.num_steps > 0) == any(looks)
