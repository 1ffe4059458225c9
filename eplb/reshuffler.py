"""Live rebalancing of one model's experts: a state machine on the engine's thread that is told of every step.

    IDLE --the window is full--> PLANNING: the load is read, a plan is made --all have the same plan--> MIGRATING
    IDLE --all have imported the same placement-------------------------------------------------------> MIGRATING
    MIGRATING: slice by slice, comparison, commit when all are staged; layer after layer --> IDLE

Every process of a job runs its own. They stay in step because the phase changes only in `act`, by what all processes
have agreed on for that step and by the number of steps. What one process alone knows (its load has been read, its plan
is made, its rows have arrived, it has failed) goes into its `report`, and has no other effect.

Whatever goes wrong before a commit gives the rebalance up, on all processes at the same step. Layers that were
committed stay: every layer is always served by a whole placement of its own.
"""

from __future__ import annotations

import collections
import enum
import logging
import operator
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Int32

from widemesh.eplb.agreed import PAUSE, RESUME, TRIGGER, Agreed, Report
from widemesh.eplb.balance import fold_slots
from widemesh.eplb.config import EplbConfig
from widemesh.eplb.layer_move import LayerMove, StepClock
from widemesh.eplb.layout import ExpertLayout
from widemesh.eplb.migration import count_arrivals, layers_to_move, plan_layer
from widemesh.eplb.mover import Mover, Reading
from widemesh.eplb.placement import as_placement, check_placement, hash_text, placement_hash
from widemesh.eplb.plan import Plan
from widemesh.eplb.planner import Planner
from widemesh.eplb.reshuffle_figures import ReshuffleFigures
from widemesh.eplb.reshuffle_status import ReshuffleListener, ReshuffleStatus
from widemesh.eplb.window import NOT_RECORDED, LoadWindow
from widemesh.model.config import ConfigError

_ASKED_STEPS = 32  # recorded before a plan that was asked for: enough that a step's chance does not decide

_log = logging.getLogger(__name__)


class ReshuffleBusy(RuntimeError):
    """Experts are moving, or a plan for them is being made."""


class ReshufflePaused(RuntimeError):
    """Rebalancing is paused."""


class Phase(enum.StrEnum):
    """The same on all processes at every step."""

    IDLE = "idle"
    PLANNING = "planning"
    MIGRATING = "migrating"


class _Goal:
    """A placement to go to, planned or (`plan` is None) imported."""

    def __init__(self, slot_owner: Int32[np.ndarray, "L X"], plan: Plan | None):
        self.slot_owner, self.plan = slot_owner, plan
        self.hash = placement_hash(slot_owner)

    def layers(self, current: Int32[np.ndarray, "L X"]) -> list[int]:
        """Those that move, in their order. Raises ValueError if the plan does not name them all."""
        return layers_to_move(current, self.slot_owner, None if self.plan is None else self.plan.layers)


class Reshuffler:
    """Of one model. One thread uses it; nothing here waits.

    For each step: `report`, which all processes exchange, then `act` with what they have agreed on. Everything else
    is called between an `act` and the next `report`, and `discard` also right before an `act`.

    While there are no steps to take, look at `wants_step` again every time the planner has an answer.
    """

    def __init__(
        self,
        model: str,
        layout: ExpertLayout,
        config: EplbConfig,
        slot_owner: Int32[np.ndarray, "L X"],
        mover: Mover,
        planner: Planner,
        *,
        rank: int = 0,
        listener: ReshuffleListener | None = None,
        goes_after: Reshuffler | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """`slot_owner` serves now. `rank` is this process's. No layer sets out while `goes_after` migrates."""
        self.model, self.layout = model, layout
        self.slot_owner = slot_owner
        self.phase = Phase.IDLE
        self._config, self._mover, self._planner, self._rank = config, mover, planner, rank
        self._goes_after, self._clock = goes_after, clock
        self._window = LoadWindow(config)
        self._figures = ReshuffleFigures(
            model, layout, logs=rank == 0, logs_balancedness=rank == 0 and config.log_balancedness,
            row_bytes=mover.row_bytes, listener=listener,
        )  # fmt: skip
        self._hash = placement_hash(slot_owner)
        self._said = Report()  # last, if nothing has come of it yet
        self._failure = ""  # what has gone wrong here since the last step
        self._commands: collections.deque[int] = collections.deque()  # not yet obeyed
        self._asked_steps = 0  # a plan was asked for after so many; 0: none
        self._num_holds = 0
        self._imported: _Goal | None = None  # waits for the other processes
        self._is_step_due = self._is_window_due = False  # loads to be read at the next step
        self._step_reading: Reading | None = None
        self._step_owner = slot_owner  # under which that step ran
        # PLANNING
        self._window_rows = 0
        self._reading: Reading | None = None
        self._reading_steps = StepClock(clock)
        self._planned: _Goal | None = None
        # MIGRATING
        self._goal: _Goal | None = None
        self._todo: collections.deque[int] = collections.deque()  # layers; the one in flight is the first
        self._num_layers = 0
        self._move: LayerMove | None = None
        self._start_s = self._move_start_s = 0.0

    # --- every step -----------------------------------------------------------------------------------------------

    def report(self) -> Report:
        """What this process says before a step."""
        self._poll()
        self._said = self._state()
        return self._said

    def act(self, agreed: Agreed, *, decodes: bool) -> int:
        """Take a step with the other processes, before its decode program is dispatched, if it has one.

        Returns what becomes of that program's load: NOT_RECORDED, FIRST_ROW or NEXT_ROW (`window.py`).
        """
        self._read_loads()
        if agreed.command:
            self._obey(agreed.command)
        if agreed.fails:
            self._give_up(agreed.failing_rank)
        elif self.phase is Phase.MIGRATING:
            if agreed.staged and self._move is not None and self._move.is_staged:  # else weights were just replaced
                self._commit(self._move)
        elif agreed.planned:
            self._set_out(agreed.plan_hashes)
        if agreed.command == PAUSE:  # after that: one that all processes have is under way
            self._withdraw()
        if self.phase is Phase.MIGRATING:
            self._move_on()
        elif self.phase is Phase.IDLE and self._asked_steps:
            self._window.bring_forward(self._asked_steps)
            self._asked_steps = 0
        if not decodes:
            return NOT_RECORDED
        record = self._window.step(is_migrating=self.phase is not Phase.IDLE)
        self._is_step_due = record.is_log_due
        if record.is_trigger:
            self.phase = Phase.PLANNING
            self._is_window_due, self._window_rows = True, record.window_rows
        return record.code

    @property
    def wants_step(self) -> bool:
        """Whether a step would bring something forward, though no request needs one.

        True while there are rows to move or something on its way from the device, and when there is news for the other
        processes. It waits for plans, for other processes and while it is held without steps.
        """
        self._poll()
        state, said = self._state(), self._said
        if state.fails or state.command or (state.staged and not said.staged):
            return True
        if state.planned and (not said.planned or said.plan_hash != state.plan_hash):
            return True
        if self.phase is Phase.PLANNING:
            return self._is_window_due or self._reading is not None
        return self.phase is Phase.MIGRATING and self._may_move and not self._is_staged

    # --- from outside, on the same thread ---------------------------------------------------------------------------

    def request(self, command: int) -> None:
        """Have all processes obey TRIGGER, `trigger_after(...)`, PAUSE or RESUME at the same step, the next one.

        A trigger ends the wait after failures. One that comes while experts move is obeyed after that; another process
        may have paused in the same step, then it comes to nothing. PAUSE also withdraws a placement that waits for
        other processes, on all that have it. Raises ConfigError for more steps than the window has, and for what is no
        command; ReshufflePaused for a trigger while paused.
        """
        try:
            command = operator.index(command)
        except TypeError:
            raise ConfigError(f"command={command!r} must be a whole number; use TRIGGER, PAUSE, RESUME or "
                              "trigger_after(steps)") from None  # fmt: skip
        if not 1 <= command <= RESUME + self._config.window_size:
            raise ConfigError(f"steps={command - RESUME} must be 1 to {self._config.window_size}, the window_size; use "
                              "one of them")  # fmt: skip
        if command not in (PAUSE, RESUME) and self._will_be_paused:
            raise ReshufflePaused("rebalancing is paused; resume it first")
        self._commands.append(command)

    def import_placement(self, slot_owner: Any) -> None:
        """Go to this placement [L, X], as soon as all processes have imported it.

        Until then it may be replaced, and PAUSE withdraws it. Raises ConfigError if it does not fit, ReshuffleBusy if
        there is no time for it.
        """
        owner = as_placement(slot_owner, self.layout)
        if self.phase is not Phase.IDLE:
            raise ReshuffleBusy(f"the {self.model} model is {self.phase}; import a placement when it is idle")
        self._imported = _Goal(owner, None)

    def hold(self) -> None:
        """No commit, on any process, until `release`: somebody lays out weights for the placement of this moment.

        Rows go on moving. Holds add up.
        """
        self._num_holds += 1

    def release(self) -> None:
        """The end of one `hold`."""
        self._num_holds -= 1

    def discard(self) -> None:
        """All weights have been replaced, on all processes before the same `act`: begin the layer in flight anew."""
        if self._move is not None:
            self._move.restart()

    def status(self) -> ReshuffleStatus:
        """As of the last step."""
        window, figures = self._window, self._figures
        is_due = self.phase is Phase.IDLE and not window.is_paused and not window.is_disabled
        moving = self._move.num_rows if self._move is not None else 0
        imported, phase = self._imported, str(self.phase)
        if self._is_window_due or self._reading is not None:
            phase = "reading"
        elif self.phase is Phase.IDLE and imported is not None:
            phase = "waiting"
        return ReshuffleStatus(
            model=self.model, layout=self.layout, slot_owner=self.slot_owner, placement_hash=self._hash,
            load=figures.load, load_steps=figures.load_steps, balancedness=figures.balancedness,
            feasible=figures.feasible or 0.0, phase=phase, imported_hash=0 if imported is None else imported.hash,
            layers_done=self._layers_done, layers_total=self._num_layers, rebalances=dict(figures.rebalances),
            last_failure=figures.last_failure, moved_rows=figures.moved_rows + moving,
            moved_bytes=figures.moved_bytes + moving * self._mover.row_bytes, least_rows=figures.least_rows,
            is_paused=window.is_paused, is_disabled=window.is_disabled,
            steps_to_trigger=window.interval - window.since if is_due else 0,
        )  # fmt: skip

    def close(self) -> None:
        """End the planner."""
        self._planner.close()

    # --- what this process knows ------------------------------------------------------------------------------------

    def _state(self) -> Report:
        goal = {Phase.IDLE: self._imported, Phase.PLANNING: self._planned, Phase.MIGRATING: None}[self.phase]
        return Report(
            planned=goal is not None,
            plan_hash=0 if goal is None else goal.hash,
            staged=self._is_staged and not self._num_holds,
            fails=bool(self._failure),
            command=self._commands[0] if self._commands else 0,
            placement=self._hash,
        )

    @property
    def _will_be_paused(self) -> bool:
        """Once what was asked for here is obeyed."""
        asked = [one for one in self._commands if one in (PAUSE, RESUME)]
        return asked[-1] == PAUSE if asked else self._window.is_paused

    @property
    def _is_staged(self) -> bool:
        return self._move is not None and self._move.is_staged

    @property
    def _may_move(self) -> bool:
        """Whether the layer in flight, or the next one, need not wait for the other model."""
        return self._move is not None or self._goes_after is None or self._goes_after.phase is not Phase.MIGRATING

    @property
    def _layers_done(self) -> int:
        return self._num_layers - len(self._todo)

    def _poll(self) -> None:
        """Take in what has become ready. Whatever goes wrong is said in the next report."""
        if self._failure:
            return
        try:
            if self._step_reading is not None and self._step_reading.is_ready():
                reading, self._step_reading = self._step_reading, None
                if self._step_owner is self.slot_owner:  # else a layer was committed since
                    self._figures.step_read(reading.value())
            if self._reading is not None:
                self._take_window(self._reading)
            elif self.phase is Phase.PLANNING and not self._is_window_due and self._planned is None:
                self._take_plan()
            elif self._move is not None:
                self._move.poll()
        except Exception as err:
            self._fail(err)

    def _take_window(self, reading: Reading) -> None:
        if reading.is_ready():
            found, self._reading = reading.value(), None
            self._figures.window_read(found, self._window_rows)
            load = fold_slots(found.load_by_slot, self.slot_owner, self.layout.num_experts)
            self._planner.start(load, self.slot_owner)
        elif self._reading_steps.elapsed_s > self._config.layer_deadline_s:
            raise TimeoutError(f"the load of the window was not there after {self._config.layer_deadline_s:g} s")

    def _take_plan(self) -> None:
        plan = self._planner.poll()
        if plan is None:
            return
        check_placement(plan.slot_owner, self.layout, "the plan")
        goal = _Goal(plan.slot_owner.astype(np.int32), plan)
        goal.layers(self.slot_owner)
        self._figures.planned(plan)
        self._planned = goal

    def _fail(self, err: Exception) -> None:
        text = str(err) or type(err).__name__
        self._failure = text if self._move is None else f"layer {self._move.migration.layer}: {text}"

    # --- what all processes do together -----------------------------------------------------------------------------

    def _read_loads(self) -> None:
        """Before anything else of a step, so that the newest load on the device is that of the step before."""
        self._reading_steps.tick()
        if self._is_step_due:
            self._is_step_due = False
            self._step_reading, self._step_owner = self._tried(self._mover.read_step), self.slot_owner
        if self._is_window_due:  # though the other may have failed: the other processes dispatch this
            self._is_window_due = False
            self._reading_steps = StepClock(self._clock)
            self._reading = self._tried(self._mover.read_window)

    def _tried(self, read: Callable[[], Reading]) -> Reading | None:
        try:
            return read()
        except Exception as err:
            self._fail(err)
            return None

    def _obey(self, command: int) -> None:
        if self._commands and self._commands[0] == command:
            self._commands.popleft()
        window = self._window
        if command == PAUSE:
            window.pause()
            self._asked_steps = 0
            return
        if command != RESUME:
            if window.is_paused:
                _log.warning("%s: a rebalance was asked for while rebalancing is paused; resume it first", self.model)
                return
            steps = _ASKED_STEPS if command == TRIGGER else command - RESUME
            self._asked_steps = min(steps, self._config.window_size)
        if window.is_disabled or command == RESUME:
            window.resume()
            self._figures.resumed()

    def _set_out(self, hashes: tuple[int, ...]) -> None:
        """All processes hold a placement to go to."""
        other = next((rank for rank, one in enumerate(hashes) if one != hashes[0]), -1)
        if other >= 0:
            self._failure = (f"it would go to placement {hash_text(hashes[other])} and rank 0 to "
                             f"{hash_text(hashes[0])}")  # fmt: skip
            self._give_up(other, is_known=True)
            return
        goal = self._imported if self.phase is Phase.IDLE else self._planned
        assert goal is not None, "all processes hold a placement, but this one does not"
        if self.phase is Phase.IDLE:
            self._imported = None
        self.phase, self._goal, self._planned, self._said = Phase.MIGRATING, goal, None, Report()
        self._todo.extend(goal.layers(self.slot_owner))
        self._num_layers, self._start_s = len(self._todo), self._clock()
        self._figures.set_out()
        if not self._todo:
            self._arrive()

    def _withdraw(self) -> None:
        """What was imported here and not everywhere."""
        if self._imported is not None:
            _log.info("%s: the imported placement %s is withdrawn", self.model, hash_text(self._imported.hash))
            self._imported = None

    def _move_on(self) -> None:
        """This step's share of the work."""
        try:
            if self._move is None and self._may_move and self._goal is not None:
                layer = self._todo[0]
                migration = plan_layer(layer, self.slot_owner[layer], self._goal.slot_owner[layer], self.layout)
                self._move_start_s = self._clock()
                self._move = LayerMove(
                    migration, self._mover, slice_rows=self._config.slice_rows,
                    deadline_s=self._config.layer_deadline_s, clock=self._clock,
                )  # fmt: skip
            if self._move is not None:  # a failure here is no reason: the others wait for this process's share
                self._move.dispatch()
        except Exception as err:
            self._fail(err)

    def _commit(self, move: LayerMove) -> None:
        layer, before = move.migration.layer, self.slot_owner
        after = before.copy()
        after[layer] = move.migration.slot_owner
        try:
            self._mover.commit(move.migration, after)
        except Exception as err:
            self._fail(err)
            return
        self.slot_owner, self._hash = after, placement_hash(after)
        self._put_move_away()
        self._todo.popleft()
        least = count_arrivals(before[layer : layer + 1], after[layer : layer + 1], self.layout)
        self._figures.layer_committed(least, self._clock() - self._move_start_s)
        if not self._todo:
            self._arrive()

    def _arrive(self) -> None:
        self._window.committed()
        plan = self._goal.plan if self._goal is not None else None
        self._figures.arrived(plan, self._num_layers, self._clock() - self._start_s)
        self._rest()

    def _give_up(self, rank: int, *, is_known: bool = False) -> None:
        """On all processes at the same step. What has been committed stays. `is_known`: why rank `rank` did it."""
        reason = self._failure if is_known or rank == self._rank else "its log says why"
        if self._num_layers:
            reason += f" ({self._layers_done} of {self._num_layers} layers committed)"
        if self.phase is Phase.IDLE:
            self._imported = None
        self._planner.cancel()
        self._put_move_away()
        self._window.abandoned()
        self._figures.abandoned(f"rank {rank}: {reason}", 0 if self._window.is_disabled else self._window.interval)
        self._rest()

    def _put_move_away(self) -> None:
        if self._move is not None:
            self._figures.moved_rows += self._move.num_rows
            self._move = None
        self._said = Report()

    def _rest(self) -> None:
        self.phase, self._failure, self._said = Phase.IDLE, "", Report()
        self._goal = self._planned = self._reading = None
        self._is_window_due, self._num_layers = False, 0
        self._todo.clear()
