"""`widemesh top ADDRESS ...`: a live table of running servers, read from their metrics pages."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated

import tyro
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from widemesh.model.config import ConfigError
from widemesh.tools.scrape import DEFAULT_PORT, Page, Row, ScrapeError, page_url, read_page, row_of

_MAX_AT_ONCE = 32  # pages read together
# Short, so that a line fits a terminal; docs/quickstart-service.md, "Watching servers", says what each shows.
_COLUMNS = ("server", "rank", "run", "wait", "in/s", "out/s", "KV", "hits", "step", "ticket", "disp.", "device", "last")
_EXPERTS = "even"  # a column of its own, in front of the last one, if a server moves its experts


@dataclasses.dataclass(frozen=True, kw_only=True)
class Top:
    """Show what servers started with `--metrics-port` do: requests, tokens per second, cache, and a step's times.

    Rates, times and shares are over the last interval. `--once` prints one table, and on the last line a JSON object.
    """

    # metrics pages, as HOST:PORT; PORT is 9090 if left out
    addresses: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="ADDRESS [ADDRESS ...]")] = ()
    interval_s: float = 2.0  # between two readings
    timeout_s: float = 2.0  # for a page to arrive
    once: bool = False  # print one table, after one interval, and end

    def __post_init__(self) -> None:
        if not self.addresses:
            raise ConfigError(f"addresses=() names no server; use `widemesh top 127.0.0.1:{DEFAULT_PORT}`")
        for name in ("interval_s", "timeout_s"):
            if not 0 < getattr(self, name) <= 3600:
                raise ConfigError(f"{name}={getattr(self, name):g} must be above 0 and at most 3600; use 2")
        for address in self.addresses:
            page_url(address)

    def run(self) -> None:
        watch = _Watch(self.addresses, self.timeout_s)
        rows = watch.read()
        if self.once:
            time.sleep(self.interval_s)
            rows = watch.read()
            Console().print(table_of(rows))
            servers = [dataclasses.asdict(row) for row in rows]
            print(json.dumps({"interval_s": self.interval_s, "servers": servers}), flush=True)
            return
        try:
            with Live(table_of(rows), auto_refresh=False) as live:
                while True:
                    time.sleep(self.interval_s)
                    live.update(table_of(watch.read()), refresh=True)
        except KeyboardInterrupt:
            return


class _Watch:
    """Reads several pages at the same time and remembers the last one of each."""

    def __init__(self, addresses: Sequence[str], timeout_s: float):
        self._urls = {address: page_url(address) for address in addresses}
        self._timeout_s = timeout_s
        self._before: dict[str, Page] = {}
        self._pool = ThreadPoolExecutor(min(_MAX_AT_ONCE, len(self._urls)), "widemesh-top")

    def read(self) -> list[Row]:
        """A row for each server, whether it answers or not."""
        return list(self._pool.map(self._read, self._urls))

    def _read(self, address: str) -> Row:
        before = self._before.pop(address, None)
        try:
            page = read_page(self._urls[address], self._timeout_s)
        except ScrapeError as err:
            return Row(address=address, error=str(err))
        self._before[address] = page
        return row_of(address, page, before)


def table_of(rows: Sequence[Row]) -> Table:
    """A line per server, and one for them all if there are several."""
    table = Table(header_style="bold", box=None, pad_edge=False, padding=(0, 1, 0, 0), caption="times in ms")
    has_experts = any(row.balancedness for row in rows)
    for name in (*_COLUMNS[:-1], *[_EXPERTS] * has_experts, _COLUMNS[-1]):
        is_text = name == "server"  # gives way where there is no room
        table.add_column(name, justify="left" if is_text else "right", no_wrap=not is_text, overflow="fold",
                         min_width=13 if is_text else None)  # fmt: skip
    for row in rows:
        is_known = row.error is None
        table.add_row(
            *_cells(row, has_experts=has_experts) if is_known else [Text(f"{row.address}\n{row.error}", style="red")]
        )
    answered = [row for row in rows if row.error is None]
    if len(answered) > 1:
        table.add_row(
            f"all {len(answered)}", "", str(sum(row.running or 0 for row in answered)),
            str(sum(row.waiting or 0 for row in answered)), _rate(_sum(row.prompt_tokens_per_s for row in answered)),
            _rate(_sum(row.generated_tokens_per_s for row in answered)),
        )  # fmt: skip
    return table


def _cells(row: Row, *, has_experts: bool) -> list[str]:
    last = "-" if row.last_rank is None else f"{row.last_rank} {row.last_rank_share:.0%}"
    return [
        row.address, row.engine or "-", str(row.running), str(row.waiting), _rate(row.prompt_tokens_per_s),
        _rate(row.generated_tokens_per_s), _share(row.kv_usage), _share(row.prefix_hit_rate), _ms(row.step_s),
        _ms(row.ticket_wait_s), _ms(row.dispatch_s), _ms(row.device_step_s), *[_even(row)] * has_experts, last,
    ]  # fmt: skip


def _even(row: Row) -> str:
    """Balancedness of the experts, the target's before the draft's."""
    return "/".join(_share(value) for _, value in sorted((row.balancedness or {}).items(), reverse=True)) or "-"


def _sum(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 10 else f"{value:.1f}"


def _ms(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds * 1e3:.2f}" if seconds < 0.00995 else f"{seconds * 1e3:.1f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"
