"""How the processes of an engine agree on each step: over a ticket, whose merged values say what all of them run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from widemesh.eplb.agreed import Agreed, Report
from widemesh.serving.step_needs import PrefillSize, StepNeeds
from widemesh.sharding.ticket import WAVE_FIELDS, Field, Merged, Pending, Ticket, TicketSchema, WaveControl
from widemesh.sharding.ticket.schema import Merge

JAX_PORT = "jax_port"  # of JAX's coordinator
_FIELDS = (
    Field(JAX_PORT, "max"),  # before the first step, process 0 tells it
    Field("weights_version", "equal"),
    *WAVE_FIELDS,
    Field("stops", "any"),  # this process wants the job to end
    Field("can_update", "all"),  # it holds new weights, and nothing runs on the old ones
    Field("prefill_writes", "max"),
    Field("prefill_rows", "max"),
    Field("prefill_has_tail", "max"),
    Field("scored_rows", "max"),
    Field("joins", "max"),
    Field("tallies", "max"),
    Field("decode_writes", "max"),
    Field("decodes", "max"),
)
# Of each model whose experts move; the names of `Report`.
_EPLB_FIELDS: tuple[tuple[str, Merge], ...] = (
    ("planned", "all"), ("plan_hash", "max"), ("staged", "all"), ("fails", "any"), ("command", "max"),
    ("placement", "equal"),
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """What one process says before a step."""

    needs: StepNeeds
    has_work: bool = True  # something is under way, or could be
    stops: bool = False
    can_update: bool = False
    weights_version: int = 0
    eplb: tuple[Report, ...] = ()  # of each model whose experts move


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """What all processes do. `stopped_by` is the process that ends the job with it; -1 = none does."""

    needs: StepNeeds
    updates_weights: bool
    stopped_by: int = -1
    eplb: tuple[Agreed, ...] = ()


def step_schema(most_loads: int, eplb: tuple[str, ...] = ()) -> TicketSchema:
    """The ticket's fields; a process loads at most so many requests in a step. `eplb`: models whose experts move."""
    moving = (Field(f"{model}_{name}", merge) for model in eplb for name, merge in _EPLB_FIELDS)
    return TicketSchema((*_FIELDS, *moving, *(Field(f"load_{i}", "max") for i in range(most_loads))))


class Agreement:
    """For the engine's thread; `wake` for any. `on_agreed` hears of every exchange: seconds waited, and who came last.

    A single process (`is_alone`) has nobody to ask. Several step together in waves: while one of them has
    work, all take every step, and when none has, all rest until a request comes to one of them.
    """

    def __init__(self, ticket: Ticket, on_agreed: Callable[[float, int], None]):
        self._ticket, self._on_agreed = ticket, on_agreed
        self._waves = WaveControl(ticket)
        names = [field.name for field in ticket.schema.fields]
        self._num_loads = sum(name.startswith("load_") for name in names)
        self._models = [name.removesuffix("_plan_hash") for name in names if name.endswith("_plan_hash")]
        self._is_alone = ticket.size == 1
        self._pending: Pending | None = None

    @property
    def is_alone(self) -> bool:
        """Whether there is one process only."""
        return self._is_alone

    @property
    def is_stepping(self) -> bool:
        """Whether a wave is under way, in which this process must take every step."""
        return self._waves.is_running

    def rest(self, is_due: Callable[[], bool]) -> bool:
        """Return True when there is a step to take, at once if `is_due`; False after a `wake` without one.

        Raises TicketError when a process is lost.
        """
        if not self._is_alone:
            return self._waves.rest(is_due)
        if is_due():
            return True
        self._ticket.sleep()
        return is_due()

    def wake(self) -> None:
        """Make `rest` look again, now or when it is called next."""
        self._ticket.wake()

    def post(self, part: Part) -> None:
        """Send what this process needs. `wait` must follow."""
        self._pending = self._ticket.post(self._vector(part))

    def wait(self) -> Step:
        """What all have agreed on. Raises TicketError when a process is lost or does something else."""
        assert self._pending is not None, "wait without post"
        merged = self._pending.wait()
        self._waves.settle(merged)
        self._on_agreed(merged.wait_s, merged.last_rank)
        return self._step(merged)

    def _vector(self, part: Part) -> np.ndarray:
        needs, wave = part.needs, self._waves.values(part.has_work)
        prefill, loads = needs.prefill, needs.loads
        return np.array(
            [0, part.weights_version, *(wave[field.name] for field in WAVE_FIELDS), part.stops, part.can_update,
             needs.prefill_writes, prefill.rows, prefill.has_tail, prefill.scored_rows, needs.joins, needs.tallies,
             needs.decode_writes, needs.decodes,
             *(getattr(report, name) for report in part.eplb for name, _ in _EPLB_FIELDS),
             *loads, *(0 for _ in range(self._num_loads - len(loads)))],
            np.int32,
        )  # fmt: skip

    def _step(self, merged: Merged) -> Step:
        value = merged.value
        loads = (value(f"load_{i}") for i in range(self._num_loads))
        needs = StepNeeds(
            loads=tuple(pages for pages in loads if pages),
            prefill_writes=value("prefill_writes"),
            prefill=PrefillSize(
                rows=value("prefill_rows"), has_tail=bool(value("prefill_has_tail")), scored_rows=value("scored_rows")
            ),
            joins=value("joins"), tallies=value("tallies"), decode_writes=value("decode_writes"),
            decodes=bool(value("decodes")),
        )  # fmt: skip
        stopped_by = int(np.argmax(merged.by_rank("stops"))) if value("stops") else -1
        return Step(
            needs=needs, updates_weights=bool(value("can_update")), stopped_by=stopped_by,
            eplb=tuple(_agreed(merged, model) for model in self._models),
        )  # fmt: skip


def _agreed(merged: Merged, model: str) -> Agreed:
    fails, planned = (bool(merged.value(f"{model}_{name}")) for name in ("fails", "planned"))
    return Agreed(
        planned=planned, staged=bool(merged.value(f"{model}_staged")), fails=fails,
        failing_rank=int(np.argmax(merged.by_rank(f"{model}_fails"))) if fails else -1,
        plan_hashes=tuple(merged.by_rank(f"{model}_plan_hash").tolist()) if planned else (),
        command=merged.value(f"{model}_command"),
    )  # fmt: skip
