"""The processes of one engine: how they meet, how they part, and what becomes of the rest when one is lost."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import re
import sys
import threading
from collections.abc import Callable, Mapping

from widemesh.model.config import ConfigError
from widemesh.serving.agreement import JAX_PORT
from widemesh.serving.process_config import ProcessConfig
from widemesh.sharding.ticket import Lifeline, LocalTicket, NetTicket, Ticket, TicketError, TicketSchema
from widemesh.sharding.ticket.addresses import free_port

LOST_STATUS = 70  # with which a process ends when its job is lost
LOSS_EXIT_S = 2.0  # from the loss to the end, for streams to be told
# Silence that is allowed until all programs have run: compiles keep every core busy, and the thread that beats comes
# late. On two cores with a load of 11 to 14, 5 s were too few.
LOADING_SILENCE_S = 60.0
END_SENTENCE = re.compile(r"(?P<reason>rank \d+ .*); this process, rank \d+, ends with status \d+$")  # as logged
_CULPRIT_S = 1.0  # for the lifeline to say who is lost, when a collective has failed first

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobEnd:
    """Why there is no job any more."""

    reason: str
    is_failure: bool  # else the processes have parted in good order, or one has been told to stop
    is_others: bool = False  # the reason lies with another process


class Job:
    """This process's tie to the others. Made by `alone` or `join`.

    When another process is lost, or reports that it cannot go on, listeners hear of it on whatever thread has noticed,
    and `LOSS_EXIT_S` later this process ends itself with `LOST_STATUS`: its devices may wait in a collective for ever.
    When another was told to stop before all serve, this one ends likewise, with status 0.
    """

    def __init__(self, ticket: Ticket, address: str = ""):
        self.ticket, self.jax_address = ticket, address
        self._lock = threading.Lock()
        self._listeners: list[Callable[[JobEnd], None]] = []
        self._end: JobEnd | None = None
        self._has_ended = threading.Event()
        self._lifeline: Lifeline | None = None

    @classmethod
    def alone(cls, schema: TicketSchema) -> Job:
        """Of a single process."""
        return cls(LocalTicket(schema))

    @classmethod
    def join(
        cls, processes: ProcessConfig, schema: TicketSchema, digests: Mapping[str, str], timeout_s: float
    ) -> Job:
        """Meet the others and see that all have the same `digests`.

        `timeout_s`: how long silence may last, by the lifeline only from `has_loaded` on.
        `jax_address` is where JAX's coordinator is to be. Raises ConfigError if they do not meet or differ.
        """
        if processes.coordinator is None:
            return cls.alone(schema)
        if processes.num_processes == 1:
            _log.warning("coordinator=%s is given, but num_processes is 1: this process serves alone",
                         processes.coordinator)  # fmt: skip
            return cls.alone(schema)
        port = 0 if processes.process_id else free_port()
        job: Job | None = None
        try:
            ticket = NetTicket.join(
                schema, rank=processes.process_id, size=processes.num_processes, address=processes.coordinator,
                timeout_s=timeout_s, join_timeout_s=processes.join_timeout_s, digests=digests,
            )  # fmt: skip
            job = cls(ticket)
            job._lifeline = Lifeline(
                ticket, job._lose, timeout_s=max(timeout_s, LOADING_SILENCE_S), interval_s=min(0.5, timeout_s / 4),
                on_stop=job._stopped, remark=" while the model was loading",
            )  # fmt: skip
            told = ticket.post(dict.fromkeys((field.name for field in schema.fields), 0) | {JAX_PORT: port}).wait()
            ticket.end_wave()  # which this exchange would otherwise begin
        except TicketError as err:
            if job is not None:
                job.leave("the start has failed")
            raise ConfigError(f"the processes of coordinator={processes.coordinator} cannot start: {err}") from None
        job.jax_address = f"{processes.coordinator.rpartition(':')[0]}:{told.value(JAX_PORT)}"
        return job

    @property
    def end(self) -> JobEnd | None:
        """Why there is no job any more; None while there is."""
        return self._end

    @property
    def failure(self) -> str:
        """Why the job is lost; empty if it is not."""
        return self._end.reason if self._end is not None and self._end.is_failure else ""

    def on_end(self, listener: Callable[[JobEnd], None]) -> None:
        """Call a function once, on any thread, when the job has ended; at once if it has."""
        with self._lock:
            if self._end is None:
                self._listeners.append(listener)
                return
        listener(self._end)

    def has_loaded(self, timeout_s: float) -> None:
        """All processes have compiled and run every program: from now on silence may last `timeout_s`."""
        if self._lifeline is not None:
            self._lifeline.set_limit(timeout_s, "; if it was only slow, give a larger --ticket-timeout-s")

    def leave(self, reason: str) -> None:
        """Part in good order, when all have agreed to. With a single process nothing happens."""
        if self._lifeline is None:
            return
        self._lifeline.close()
        self.ticket.close()
        self._finish(JobEnd(reason=reason, is_failure=False))

    def stop(self) -> None:
        """This process is told to end while the others cannot agree to: as long as it loads. They end too."""
        if self._lifeline is None:
            return
        reason = f"rank {self.ticket.rank} was told to stop while the model was loading"
        self._lifeline.stop(reason)
        self.leave(reason)

    def fail(self, failure: BaseException) -> None:
        """This process cannot go on: tell the others, and end. With a single process nothing happens."""
        if self._lifeline is None:
            return
        if not isinstance(failure, TicketError):
            self._has_ended.wait(_CULPRIT_S)  # it may be another's end that this one's collective has stumbled over
        if self._end is None:
            first = str(failure).split("\n", 1)[0][:300]
            told = isinstance(failure, TicketError)
            reason = first if told else f"rank {self.ticket.rank} has failed ({type(failure).__name__}: {first})"
            self._lifeline.fail(reason, failure.rank if isinstance(failure, TicketError) else None)
            self._finish(JobEnd(reason=reason, is_failure=True))

    def _lose(self, rank: int, reason: str) -> None:
        self._finish(JobEnd(reason=reason, is_failure=True, is_others=rank != self.ticket.rank))

    def _stopped(self, rank: int, reason: str) -> None:
        self._finish(JobEnd(reason=reason, is_failure=False, is_others=True))

    def _finish(self, end: JobEnd) -> None:
        with self._lock:
            if self._end is not None:
                return
            self._end = end
            listeners, self._listeners = self._listeners, []
        if end.is_failure or end.is_others:
            status = LOST_STATUS if end.is_failure else 0
            _log.error("%s; this process, rank %d, ends with status %d", end.reason, self.ticket.rank, status)
            exit_after(LOSS_EXIT_S, status)
        self._has_ended.set()
        for listener in listeners:
            try:
                listener(end)
            except Exception:  # whatever one does, the others must hear
                _log.exception("a listener has failed at the end of the job")


def exit_after(seconds: float, status: int) -> None:
    """End the process after that time, past threads that cannot be stopped."""
    timer = threading.Timer(seconds, exit_now, (status,))
    timer.daemon = True
    timer.start()


def exit_now(status: int) -> None:
    """End the process at once, past threads that cannot be stopped."""
    try:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # it may be closed, or None
                stream.flush()
    finally:
        os._exit(status)
