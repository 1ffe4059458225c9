"""Processes that serve one model together, step by step, with devices that keep a tag for each row of weights.

Each process has devices of its own that hold all ranks, as if it saw everything. What a process dispatches must be the
same on all of them, so its devices must be, too: that, and that weights and maps fit, is checked after every step.
"""

from __future__ import annotations

import numpy as np

from widemesh.eplb import (
    Agreed,
    EplbConfig,
    LoadReading,
    Reshuffler,
    balancedness,
    expected_slot_load,
    fold_slots,
    initial_placement,
    make_plan,
    placement_hash,
)
from widemesh.eplb.window import FIRST_ROW, NEXT_ROW

ROW_BYTES = 100
NEVER = 10**9

# What most tests of a rebalance take: windows and intervals of a few steps, half of the experts twice.
CONFIG = EplbConfig(window_size=4, step_interval=12, num_redundant_experts=8, log_balancedness_interval=5)
LAYOUT = CONFIG.layout(num_layers=3, num_experts=16, ranks=8)


class Later:
    """A value that is there after so many looks."""

    def __init__(self, value, looks: int):
        self._value, self._looks = value, looks

    def is_ready(self) -> bool:
        self._looks -= 1
        return self._looks < 0

    def value(self):
        assert self._looks < 0, "read before it was ready"
        if isinstance(self._value, Exception):
            raise self._value
        return self._value

    bad_rows = value


class Planner:
    """Plans at once, and has the plan after some looks. `trouble`: an exception to raise, or a plan to give instead."""

    def __init__(self, layout, config, looks, plans):
        self._layout, self._config, self._looks, self._plans = layout, config, looks, plans
        self.trouble = None
        self._answer = None
        self.is_closed = False

    def start(self, load, current):
        plan = self.trouble
        if plan is None:  # the other processes make the same one
            key = load.tobytes(), current.tobytes()
            plan = self._plans[key] = self._plans.get(key) or make_plan(load, current, self._layout, self._config)
        self._answer = Later(plan, self._looks())

    def poll(self):
        if self._answer is None or not self._answer.is_ready():
            return None
        answer, self._answer = self._answer, None
        return answer.value()

    @property
    def is_idle(self):
        return self._answer is None

    def cancel(self):
        self._answer = None

    def close(self):
        self.is_closed = True


class Devices:
    """All ranks as one process sees them: a row's tag says its layer, its expert and the version of its weights."""

    row_bytes = ROW_BYTES

    def __init__(self, layout, slot_owner, looks, slice_rows):
        self.layout, self._looks, self._slice_rows = layout, looks, slice_rows
        self.slot_owner, self.version = slot_owner, 0
        self.rows = self._tags(slot_owner)
        self.staging = np.full(layout.num_slots, -1)
        self.stamp, self.stamps = 0, np.zeros(layout.num_slots, int)  # of each staged row: that of its beginning
        self.loses = False  # the next copy
        self.calls: list[tuple] = []  # since the last look
        self.raises: set[str] = set()  # calls that fail
        self.corrupts = False  # the next copy
        self.is_stuck = False  # nothing gets ready
        self.ring: list[tuple[int, np.ndarray]] = []

    def _tags(self, slot_owner):
        layer = np.arange(len(slot_owner))[:, None]
        return np.where(slot_owner < 0, -1, slot_owner + 1000 * layer + 10**6 * self.version)

    def check(self):
        """What a program dispatched now would see: in every slot the row of the expert that the map names."""
        wanted = self._tags(self.slot_owner)
        used = self.slot_owner >= 0
        np.testing.assert_array_equal(self.rows[used], wanted[used])

    def replace_weights(self):
        self.version += 1
        self.rows = self._tags(self.slot_owner)

    def record(self, code, slot_load):
        self.last = slot_load
        if code == FIRST_ROW:
            self.ring = []
        if code in (FIRST_ROW, NEXT_ROW):
            self.ring.append((placement_hash(self.slot_owner), slot_load))

    def _begin(self, name, *content):
        self.calls.append((name, *content))
        if name in self.raises:
            raise RuntimeError(f"no {name} today")

    def _later(self, value):
        return Later(value, NEVER if self.is_stuck else self._looks())

    def _load(self, by_slot):
        return self._later(LoadReading(load_by_slot=by_slot, balancedness=balancedness(by_slot, self.layout.ranks)))

    def read_window(self):
        self._begin("read_window", len(self.ring))
        # All of it was counted under the placement that serves, so it can be folded with it.
        assert {placement for placement, _ in self.ring} == {placement_hash(self.slot_owner)}
        return self._load(sum(load for _, load in self.ring))

    def read_step(self):
        self._begin("read_step")
        return self._load(self.last)

    def begin(self, layer):
        self.stamp, self.begun = self.stamp + 1, layer

    def copy(self, layer, part):
        assert layer == self.begun
        self._begin("copy", layer, part.source.tobytes(), part.target.tobytes())
        source, target = (x[part.source >= 0] for x in (part.source, part.target))
        quota = self.layout.slots_per_rank
        assert (source // quota != target // quota).all()
        sends = np.bincount(source // quota, minlength=self.layout.ranks)
        assert sends.max() <= self._slice_rows and part.source.shape[1] == self._slice_rows
        if self.loses:
            self.loses = False
            return
        self.staging[target], self.stamps[target] = self.rows[layer, source], self.stamp
        if self.corrupts:
            self.staging[target[:1]] ^= 1 << 20
            self.corrupts = False

    def verify(self, migration):
        self._begin("verify", migration.layer)
        source, target = migration.transfers.T
        differs = (self.staging[target] != self.rows[migration.layer, source]) | (self.stamps[target] != self.stamp)
        return self._later(int(differs.sum()))

    def commit(self, migration, slot_owner):
        self._begin("commit", migration.layer, placement_hash(slot_owner))
        ranks, quota = self.layout.ranks, self.layout.slots_per_rank
        both = np.concatenate([x.reshape(ranks, quota) for x in (self.rows[migration.layer], self.staging)], axis=1)
        self.rows[migration.layer] = np.take_along_axis(both, migration.commit, 1).reshape(-1)
        self.slot_owner = slot_owner
        changed = np.arange(len(slot_owner)) == migration.layer
        np.testing.assert_array_equal(slot_owner[changed][0], migration.slot_owner)


class Job:
    """N processes with a reshuffler each. `delays`: how many looks anything takes, at most."""

    def __init__(self, layout, config, *, processes=1, seed=0, delays=0, **options):
        self.layout, self.config = layout, config
        self.rng = np.random.default_rng(seed)
        self.now_s, self.step_s = 0.0, 0.01
        self.num_steps = 0
        # Load moves to other experts now and then, so that there is always something to gain.
        self.popularity = self.draw_popularity()
        first = initial_placement(layout)
        rngs = [np.random.default_rng((seed, rank)) for rank in range(processes)]
        looks = [lambda rng=rng: int(rng.integers(delays + 1)) for rng in rngs]
        self.devices = [Devices(layout, first, one, config.slice_rows) for one in looks]
        plans: dict = {}
        self.planners = options.get("planners") or [Planner(layout, config, one, plans) for one in looks]
        after = options.pop("goes_after", [None] * processes)
        self.reshufflers = [
            Reshuffler(options.get("model", "target"), layout, config, first, mover, planner, rank=rank,
                       listener=options.get("listener") if rank == 0 else None, goes_after=after[rank],
                       clock=lambda: self.now_s)
            for rank, (mover, planner) in enumerate(zip(self.devices, self.planners, strict=True))
        ]  # fmt: skip
        self.history: list[tuple] = []  # every call of all steps

    def draw_popularity(self):
        shape = (self.layout.num_layers, self.layout.num_experts)
        return self.rng.permuted(np.tile(1000.0 / np.arange(1, shape[1] + 1), (shape[0], 1)), axis=1)

    @property
    def first(self):
        return self.reshufflers[0]

    def step(self, *, decodes=True, before_act=lambda: None):
        """One step of all processes, and all that must hold after it. Returns the calls that each has made."""
        reports = [one.report() for one in self.reshufflers]
        assert len({report.placement for report in reports}) == 1, "processes serve different placements"
        agreed = Agreed.of(reports)
        self.now_s += self.step_s
        self.num_steps += 1
        before_act()
        codes = [one.act(agreed, decodes=decodes) for one in self.reshufflers]
        assert len(set(codes)) == 1 and len({one.phase for one in self.reshufflers}) == 1
        calls = self.devices[0].calls
        slot_load = np.rint(expected_slot_load(self.popularity, self.first.slot_owner)).astype(np.int64)
        for one, device in zip(self.reshufflers, self.devices, strict=True):
            assert device.calls == calls, "processes dispatch different things"
            assert sum(call[0] in ("copy", "verify") for call in calls) <= 1
            np.testing.assert_array_equal(device.slot_owner, one.slot_owner)
            device.check()
            if decodes:
                device.record(codes[0], slot_load)
        for device in self.devices:
            device.calls = []
        self.history += calls
        return calls

    def run(self, steps, **how):
        for _ in range(steps):
            self.step(**how)

    def run_until(self, is_over, limit=2000, **how):
        """Steps taken."""
        for count in range(limit):
            if is_over():
                return count
            self.step(**how)
        raise AssertionError(f"not over after {limit} steps: {self.first.status()}")

    def ended(self):
        return sum(self.first.status().rebalances.values())

    def run_to_end(self, **how):
        """Until one more rebalance has ended. Returns its result."""
        before = dict(self.first.status().rebalances)
        self.run_until(lambda: self.ended() > sum(before.values()), **how)
        after = self.first.status().rebalances
        for one in self.reshufflers:
            assert one.status().rebalances == after
        (result,) = [name for name in after if after[name] > before[name]]
        return result


def load_by_expert(reshuffler):
    """What the shown load says of each expert."""
    status = reshuffler.status()
    return fold_slots(status.load, status.slot_owner, reshuffler.layout.num_experts)


def random_placement(rng, layout):
    """Any valid one: each expert once, then copies anywhere, two of them on one rank as well."""
    owner = np.full((layout.num_layers, layout.num_slots), -1)
    owner[:, : layout.num_experts] = np.arange(layout.num_experts)
    extra = layout.num_slots - layout.num_experts
    if layout.num_redundant_experts:
        copies = np.tile(np.repeat(np.arange(layout.num_experts), layout.max_copies - 1), (layout.num_layers, 1))
        owner[:, layout.num_experts :] = rng.permuted(copies, axis=1)[:, :extra]
    return rng.permuted(owner, axis=1)


def import_everywhere(job, owner):
    """Into every process at once."""
    for one in job.reshufflers:
        one.import_placement(owner)
