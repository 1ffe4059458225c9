"""Metrics pages: where they are, what one says, and what two of them say about the time between them."""

from __future__ import annotations

import dataclasses
import http.server
import socket
import threading
from collections.abc import Iterator

import pytest

from widemesh.model.config import ConfigError
from widemesh.tools.scrape import Page, Row, ScrapeError, page_url, read_page, row_of

LABELS = '{engine="3",model_name="tiny"}'
PAGE = f"""\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{LABELS} 5.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{LABELS} 2.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{LABELS} 0.25
# TYPE vllm:generation_tokens counter
vllm:generation_tokens_total{LABELS} 700.0
# TYPE widemesh:step_time_seconds histogram
widemesh:step_time_seconds_bucket{{engine="3",model_name="tiny",le="0.01"}} 4.0
widemesh:step_time_seconds_bucket{{engine="3",model_name="tiny",le="+Inf"}} 10.0
widemesh:step_time_seconds_count{LABELS} 10.0
widemesh:step_time_seconds_sum{LABELS} 0.5
# TYPE widemesh:ticket_last_rank counter
widemesh:ticket_last_rank_total{{engine="3",model_name="tiny",rank="0"}} 4.0
widemesh:ticket_last_rank_total{{engine="3",model_name="tiny",rank="12"}} 6.0
"""


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers with the page of its server."""

    def do_GET(self) -> None:
        text = self.server.pages.get(self.path)  # type: ignore[attr-defined]
        self.send_response(404 if text is None else 200)
        self.end_headers()
        self.wfile.write((text or "").encode())

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def pages() -> Iterator[tuple[dict[str, str], int]]:
    """Pages by path, which may be changed, and the port where they are."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.pages = {"/metrics": PAGE}  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server.pages, server.server_port  # type: ignore[attr-defined]
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(
    ("address", "url"),
    [
        ("host", "http://host:9090/metrics"),
        ("10.0.0.1:8000", "http://10.0.0.1:8000/metrics"),
        ("[::1]:8000", "http://[::1]:8000/metrics"),
        ("http://host:8000/", "http://host:8000/metrics"),
        ("https://host:1/a/page", "https://host:1/a/page"),
    ],
)
def test_addresses(address: str, url: str) -> None:
    assert page_url(address) == url


@pytest.mark.parametrize("address", ["", ":9090", "ftp://host:1", "host:port", "host:70000", "[::1"])
def test_wrong_addresses_are_one_sentence(address: str) -> None:
    with pytest.raises(ConfigError, match=r"; use HOST:PORT, for example 127\.0\.0\.1:9090$"):
        page_url(address)


def test_a_page_is_read(pages: tuple[dict[str, str], int]) -> None:
    page = read_page(f"http://127.0.0.1:{pages[1]}/metrics", 5)
    assert (page.model, page.engine) == ("tiny", "3")
    assert page.values["vllm:generation_tokens_total"] == 700
    assert page.values["widemesh:step_time_seconds_sum"] == 0.5
    assert "widemesh:step_time_seconds_bucket" not in page.values
    assert page.last_ranks == {0: 4, 12: 6}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "no page there (HTTP status 404)"),
        ("", "no engine yet"),
        ("# TYPE a gauge\na 1.0\n", "not an engine's page"),
        ("<html>{ nothing like it", "not a metrics page"),
        *((PAGE.replace(old, new), "not an engine's page") for old, new in (
            ("running" + LABELS + " 5.0", "running" + LABELS + " NaN"),
            ("waiting" + LABELS + " 2.0", "waiting" + LABELS + " +Inf"),
            ("perc" + LABELS + " 0.25", "perc" + LABELS + " NaN"),
            ('rank="0"', 'rank="x"'), (',rank="0"', ""),
        )),
        (PAGE + 'widemesh:eplb_balancedness{engine="3"} 0.5\n', "not an engine's page"),
    ],
)
def test_other_pages_are_told_apart(pages: tuple[dict[str, str], int], text: str | None, reason: str) -> None:
    pages[0].clear()
    pages[0].update({} if text is None else {"/metrics": text})
    with pytest.raises(ScrapeError) as caught:
        read_page(f"http://127.0.0.1:{pages[1]}/metrics", 5)
    assert str(caught.value) == reason


def test_nobody_there_and_nobody_answering() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/metrics"
        with pytest.raises(ScrapeError, match=r"^no answer \(timed out\)$"):
            read_page(url, 0.05)
    with pytest.raises(ScrapeError, match=r"^no answer \(.*Connection refused\)$"):
        read_page(url, 5)


def page(at_s: float, lasts: dict[int, float] | None = None, **values: float) -> Page:
    names = {
        "running": "vllm:num_requests_running", "prompt": "vllm:prompt_tokens_total",
        "output": "vllm:generation_tokens_total", "asked": "vllm:prefix_cache_queries_total",
        "hits": "vllm:prefix_cache_hits_total", "steps": "widemesh:step_time_seconds_count",
        "steps_s": "widemesh:step_time_seconds_sum", "waits": "widemesh:ticket_wait_seconds_count",
        "waits_s": "widemesh:ticket_wait_seconds_sum", "device": "widemesh:device_step_seconds_count",
        "device_s": "widemesh:device_step_seconds_sum", "kv": "vllm:kv_cache_usage_perc",
    }  # fmt: skip
    found = {names[name]: value for name, value in values.items()}
    return Page(at_s=at_s, values=found, last_ranks=lasts or {}, balancedness={}, model="tiny", engine="0")


def test_rates_are_over_the_time_between_two_pages() -> None:
    before = page(100.0, {0: 50, 1: 10}, running=3, prompt=1000, output=200, asked=900, hits=100, steps=40, steps_s=1.0,
                  waits=40, waits_s=0.01, device=30, device_s=0.9, kv=0.1)  # fmt: skip
    after = page(104.0, {0: 60, 1: 40, 2: 0}, running=4, prompt=1400, output=240, asked=1100, hits=250, steps=60,
                 steps_s=1.2, waits=80, waits_s=0.03, device=50, device_s=1.1, kv=0.5)  # fmt: skip
    row = row_of("here:1", after, before)
    assert row == Row(
        address="here:1", model="tiny", engine="0", running=4, waiting=0, kv_usage=0.5,
        prompt_tokens_per_s=100.0, generated_tokens_per_s=10.0, steps_per_s=5.0,
        step_s=pytest.approx(0.01), prefix_hit_rate=0.75, ticket_wait_s=pytest.approx(0.0005),
        dispatch_s=None, device_step_s=pytest.approx(0.01), last_rank=1, last_rank_share=0.75,
    )  # fmt: skip


def test_the_first_page_and_the_first_after_a_restart_have_no_rates() -> None:
    before, after = page(1.0, running=1, output=500, steps=9), page(3.0, running=2, output=40, steps=4)
    first = row_of("a", before, None)
    assert first.running == 1 and first.generated_tokens_per_s is None and first.last_rank is None
    assert row_of("a", after, before) == dataclasses.replace(first, running=2)


def test_nothing_happened() -> None:
    row = row_of("a", page(3.0, {0: 4}, running=0, output=40), page(1.0, {0: 4}, running=0, output=40))
    assert row.generated_tokens_per_s == 0 and row.step_s is None
    assert row.last_rank is None and row.last_rank_share is None
