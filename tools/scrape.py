"""What a server's metrics page says, and what has happened between two readings of it."""

from __future__ import annotations

import collections
import dataclasses
import http.client
import math
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families

from widemesh.model.config import ConfigError

DEFAULT_PORT = 9090
_MAX_BYTES = 4 << 20  # of a page; a server's has some 20 KB

_GROWING = (
    "vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total", "widemesh:step_time_seconds_count",
)  # fmt: skip


class ScrapeError(RuntimeError):
    """A page could not be read. The message says why, in a few words."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Page:
    """One reading of a page, samples of a name added up over their labels."""

    at_s: float  # of time.monotonic()
    values: Mapping[str, float]
    last_ranks: Mapping[int, float]  # steps for which a rank's part came last
    balancedness: Mapping[str, float]  # of the experts of each model: target, draft
    model: str
    engine: str  # rank of the process in its job


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One server now, and since the page before; None where nothing can be said. Times are means of a step."""

    address: str
    error: str | None = None  # why all else is None
    model: str | None = None
    engine: str | None = None
    running: int | None = None
    waiting: int | None = None
    prompt_tokens_per_s: float | None = None
    generated_tokens_per_s: float | None = None
    steps_per_s: float | None = None
    step_s: float | None = None
    kv_usage: float | None = None  # share of the pages in use
    prefix_hit_rate: float | None = None  # share of the tokens that were looked up
    ticket_wait_s: float | None = None
    dispatch_s: float | None = None
    device_step_s: float | None = None
    balancedness: Mapping[str, float] | None = None  # mean / maximum rank load of the experts of each model
    last_rank: int | None = None  # whose part came last most often
    last_rank_share: float | None = None  # of the steps


def page_url(address: str) -> str:
    """The page at HOST, HOST:PORT, [IPV6]:PORT or a URL. Raises ConfigError."""
    remedy = f"use HOST:PORT, for example 127.0.0.1:{DEFAULT_PORT}"
    try:
        parts = urllib.parse.urlsplit(address if "://" in address else f"http://{address}")
        host, port = parts.hostname, parts.port or DEFAULT_PORT
    except ValueError as err:
        raise ConfigError(f"address={address!r} cannot be read ({err}); {remedy}") from None
    if parts.scheme not in ("http", "https") or not host:
        raise ConfigError(f"address={address!r} names no server; {remedy}")
    return f"{parts.scheme}://{f'[{host}]' if ':' in host else host}:{port}{parts.path.rstrip('/') or '/metrics'}"


def read_page(url: str, timeout_s: float) -> Page:
    """Fetch and parse a page. Raises ScrapeError."""
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as answer:
            text = answer.read(_MAX_BYTES).decode()
        at_s = time.monotonic()
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    except urllib.error.HTTPError as err:
        raise ScrapeError(f"no page there (HTTP status {err.code})") from None
    except (OSError, http.client.HTTPException) as err:
        reason = getattr(err, "reason", err)  # of a URLError, which hides the socket's own
        raise ScrapeError(f"no answer ({getattr(reason, 'strerror', None) or reason})") from None
    except ValueError:
        raise ScrapeError("not a metrics page") from None
    values: collections.Counter[str] = collections.Counter()
    last_ranks: collections.Counter[int] = collections.Counter()
    balancedness: dict[str, float] = {}
    try:
        for sample in samples:
            if sample.name.startswith(("vllm:", "widemesh:")) and not math.isfinite(sample.value):
                raise ValueError(sample.value)
            if sample.name == "widemesh:ticket_last_rank_total":
                last_ranks[int(sample.labels["rank"])] += sample.value  # type: ignore[assignment]
            elif sample.name == "widemesh:eplb_balancedness":
                balancedness[sample.labels["model"]] = sample.value
            elif not sample.name.endswith("_bucket"):
                values[sample.name] += sample.value  # type: ignore[assignment]
    except (KeyError, ValueError):
        raise ScrapeError("not an engine's page") from None
    if "vllm:num_requests_running" not in values:
        raise ScrapeError("no engine yet" if not samples else "not an engine's page")
    labels = next(sample.labels for sample in samples if sample.name == "vllm:num_requests_running")
    return Page(at_s=at_s, values=values, last_ranks=last_ranks, balancedness=balancedness,
                model=labels.get("model_name", ""), engine=labels.get("engine", ""))  # fmt: skip


def row_of(address: str, page: Page, before: Page | None) -> Row:
    """What a page says; without one before it, or with one from before a restart, the figures of the moment only."""
    now = Row(
        address=address, model=page.model, engine=page.engine,
        running=round(page.values["vllm:num_requests_running"]),
        waiting=round(page.values.get("vllm:num_requests_waiting", 0)),
        kv_usage=page.values.get("vllm:kv_cache_usage_perc"), balancedness=page.balancedness or None,
    )  # fmt: skip
    if before is None or any(page.values.get(name, 0) < before.values.get(name, 0) for name in _GROWING):
        return now

    def grown(name: str) -> float:
        return page.values.get(name, 0.0) - before.values.get(name, 0.0)

    def mean(name: str) -> float | None:
        return _ratio(grown(f"{name}_sum"), grown(f"{name}_count"))

    since_s = page.at_s - before.at_s
    lasts = {rank: count - before.last_ranks.get(rank, 0) for rank, count in page.last_ranks.items()}
    last = max(lasts, key=lambda rank: lasts[rank], default=None)
    is_known = last is not None and lasts[last] > 0
    return dataclasses.replace(
        now,
        prompt_tokens_per_s=_ratio(grown("vllm:prompt_tokens_total"), since_s),
        generated_tokens_per_s=_ratio(grown("vllm:generation_tokens_total"), since_s),
        steps_per_s=_ratio(grown("widemesh:step_time_seconds_count"), since_s),
        step_s=mean("widemesh:step_time_seconds"),
        prefix_hit_rate=_ratio(grown("vllm:prefix_cache_hits_total"), grown("vllm:prefix_cache_queries_total")),
        ticket_wait_s=mean("widemesh:ticket_wait_seconds"),
        dispatch_s=mean("widemesh:dispatch_seconds"),
        device_step_s=mean("widemesh:device_step_seconds"),
        last_rank=last if is_known else None,
        last_rank_share=lasts[last] / sum(lasts.values()) if is_known and last is not None else None,
    )


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None
