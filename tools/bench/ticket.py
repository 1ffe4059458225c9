"""`widemesh bench ticket`: an exchange of the step ticket beside jax's all-reduce over gloo, with real processes."""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

from rich.console import Console
from rich.table import Table

from widemesh.model.config import ConfigError
from widemesh.sharding.ticket.addresses import free_port

_GIVE_UP_S = 600.0  # for one set of processes; starting jax in 16 of them takes a minute on two idle cores
_TAIL = 2000


@dataclasses.dataclass(frozen=True, kw_only=True)
class TicketBench:
    """Time an exchange of the step ticket and jax's gloo all-reduce of the same vector, one set of processes each.

    The last line printed is a JSON object with `rows`, one for each number of processes: `rounds` of an exchange,
    `messages` of all ranks together, and in microseconds `us_ticket`, `us_gloo` and `us_wait_after_step`, what is left
    to wait when a step lies between the two ends of an exchange. Times are medians over ranks of each rank's median.
    """

    processes: str = "8,16"  # numbers of processes, with commas between them
    exchanges: int = 200  # timed, of each kind
    step_ms: float = 10.0  # that an exchange overlaps

    def __post_init__(self) -> None:
        sizes = [word.strip() for word in self.processes.split(",")]
        if not all(word.isdigit() and 2 <= int(word) <= 64 for word in sizes):
            raise ConfigError(f"processes={self.processes!r} must be numbers from 2 to 64; use for example 8,16")
        if self.exchanges < 1:
            raise ConfigError(f"exchanges={self.exchanges} must be at least 1; use 1 or more")
        if not self.step_ms >= 0:
            raise ConfigError(f"step_ms={self.step_ms} must be at least 0; use 0 or more")

    def run(self) -> None:
        """Measure, and print the table and the line."""
        console, rows = Console(), []
        for size in map(int, self.processes.split(",")):
            console.print(f"{size} processes: ticket ...", highlight=False)
            ticket = self._measure("ticket", size)
            console.print(f"{size} processes: gloo ...", highlight=False)
            gloo = self._measure("gloo", size)
            rows.append(
                {
                    "processes": size,
                    "rounds": ticket[0]["rounds"],
                    "messages": round(sum(rank["messages"] for rank in ticket)),
                    "us_ticket": round(_median(ticket, "us"), 1),
                    "us_gloo": round(_median(gloo, "us"), 1),
                    "us_wait_after_step": round(_median(ticket, "us_wait"), 1),
                }
            )
        console.print(self._table(rows))
        print(json.dumps({"rows": rows}), flush=True)

    def _measure(self, kind: str, size: int) -> list[dict[str, Any]]:
        """What each rank of one set of processes has found. Raises RuntimeError with what a failed one has said."""
        with tempfile.TemporaryFile("w+") as said:
            address = f"127.0.0.1:{free_port()}"
            options = [str(size), address, str(self.exchanges), str(self.step_ms)]
            module = [sys.executable, "-m", "widemesh.tools.bench.ticket_ranks"]
            env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
            ranks: list[subprocess.Popen[str]] = []
            try:
                for number in range(size):
                    ranks.append(subprocess.Popen([*module, kind, str(number), *options], stdout=subprocess.PIPE,
                                                  stderr=said, text=True, env=env))  # fmt: skip
                until_s = time.monotonic() + _GIVE_UP_S
                found = []
                for rank in ranks:
                    output, _ = rank.communicate(timeout=max(1.0, until_s - time.monotonic()))
                    if rank.returncode:
                        said.seek(0)
                        raise RuntimeError(f"a rank of {kind} with {size} processes failed: {said.read()[-_TAIL:]}")
                    # gloo itself writes lines to standard output
                    found.append(json.loads(output.splitlines()[-1]))
                return found
            finally:
                for rank in ranks:
                    rank.kill()
                    rank.wait()

    def _table(self, rows: list[dict[str, Any]]) -> Table:
        table = Table(title="one exchange of 12 int32 per rank, microseconds",
                      caption=f"messages: of all ranks; last column: left to wait after a step of {self.step_ms:g} ms",
                      )  # fmt: skip
        for name in ("processes", "rounds", "messages", "ticket", "gloo", "gloo / ticket", "after a step"):
            table.add_column(name, justify="right")
        for row in rows:
            table.add_row(
                *(str(row[name]) for name in ("processes", "rounds", "messages")),
                *(f"{row[name]:,.0f}" for name in ("us_ticket", "us_gloo")),
                f"{row['us_gloo'] / row['us_ticket']:.1f}",
                f"{row['us_wait_after_step']:,.0f}",
            )
        return table


def _median(ranks: list[dict[str, Any]], name: str) -> float:
    return statistics.median(rank[name] for rank in ranks)
