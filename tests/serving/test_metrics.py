"""The engine's figures as Prometheus reads them: names, labels, and numbers that match what happened."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import jax
import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from widemesh.eplb.reshuffle_status import ReshuffleListener
from widemesh.serving import Engine, FinishReason, SamplingParams
from widemesh.serving.compile_counter import CompileCounter
from widemesh.serving.metrics import EngineMetrics, PageCounts, RequestTrace

BASE = {"model_name": "tiny", "engine": "0"}


class Page:
    """What a scrape of some metrics says now."""

    def __init__(self, metrics: EngineMetrics):
        registry = CollectorRegistry()
        registry.register(metrics)
        self.text = generate_latest(registry).decode()
        families = list(text_string_to_metric_families(self.text))
        self.types = {family.name: family.type for family in families}
        self.samples = {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}

    def value(self, name: str, **labels: str) -> float:
        """The one sample of that name and those labels, whatever the model's name."""
        want = {("engine", "0"), *labels.items()}
        (found,) = (value for (sample, has), value in self.samples.items() if sample == name
                    and {pair for pair in has if pair[0] != "model_name"} == want)  # fmt: skip
        return found

    def histogram(self, name: str) -> tuple[float, float]:
        """Number and sum of the values of a histogram."""
        assert self.value(f"{name}_bucket", le="+Inf") == self.value(f"{name}_count")
        return self.value(f"{name}_count"), self.value(f"{name}_sum")


@pytest.fixture
def compiles() -> SimpleNamespace:
    return SimpleNamespace(after_warm_up=0)


@pytest.fixture
def metrics(compiles: SimpleNamespace) -> EngineMetrics:
    return EngineMetrics(model_name="tiny", max_model_len=100, compiles=cast(CompileCounter, compiles))


def test_names_and_types(metrics: EngineMetrics) -> None:
    """Dashboards made for vLLM find what they look for."""
    assert Page(metrics).types == {
        "vllm:num_requests_running": "gauge",
        "vllm:num_requests_waiting": "gauge",
        "vllm:kv_cache_usage_perc": "gauge",
        "vllm:prefix_cache_queries": "counter",
        "vllm:prefix_cache_hits": "counter",
        "vllm:num_preemptions": "counter",
        "vllm:prompt_tokens": "counter",
        "vllm:generation_tokens": "counter",
        "vllm:request_success": "counter",
        "vllm:time_to_first_token_seconds": "histogram",
        "vllm:inter_token_latency_seconds": "histogram",
        "vllm:e2e_request_latency_seconds": "histogram",
        "vllm:request_queue_time_seconds": "histogram",
        "vllm:request_prefill_time_seconds": "histogram",
        "vllm:request_decode_time_seconds": "histogram",
        "vllm:request_inference_time_seconds": "histogram",
        "vllm:request_prompt_tokens": "histogram",
        "vllm:request_generation_tokens": "histogram",
        "vllm:iteration_tokens_total": "histogram",
        "vllm:spec_decode_num_drafts": "counter",
        "vllm:spec_decode_num_draft_tokens": "counter",
        "vllm:spec_decode_num_accepted_tokens": "counter",
        "vllm:spec_decode_num_accepted_tokens_per_pos": "counter",
        "widemesh:step_time_seconds": "histogram",
        "widemesh:ticket_wait_seconds": "histogram",
        "widemesh:dispatch_seconds": "histogram",
        "widemesh:device_step_seconds": "histogram",
        "widemesh:ticket_last_rank": "counter",
        "widemesh:pages": "gauge",
        "widemesh:exchange_bytes": "counter",
        "widemesh:eplb_balancedness": "gauge",
        "widemesh:eplb_feasible_balancedness": "gauge",
        "widemesh:eplb_disabled": "gauge",
        "widemesh:eplb_rebalances": "counter",
        "widemesh:eplb_migrated_bytes": "counter",
        "widemesh:eplb_layer_commit_seconds": "histogram",
        "widemesh:compiles_after_warm_up": "counter",
    }


def test_every_sample_names_the_model_and_the_engine(metrics: EngineMetrics) -> None:
    samples = Page(metrics).samples
    assert all(set(BASE.items()) <= labels for _, labels in samples)
    assert 'vllm:generation_tokens_total{engine="0",model_name="tiny"} 0.0' in Page(metrics).text


def test_the_life_of_a_request(metrics: EngineMetrics) -> None:
    trace = RequestTrace(prompt_tokens=30, arrived_s=100.0)
    trace.started_s = 100.4
    metrics.step(running=1, waiting=2, prompt_rows=29, step_s=0.3)
    metrics.first_token(trace, 102.0)
    metrics.generated(1)
    metrics.step(running=1, waiting=2, prompt_rows=0, step_s=0.004)
    metrics.later_tokens(0.06, 1)
    trace.last_token_s = 102.06
    metrics.generated(3)
    metrics.finished(trace, 4, FinishReason.LENGTH, 102.5)
    metrics.step(running=0, waiting=2, prompt_rows=16, step_s=0.02)
    page = Page(metrics)
    assert page.value("vllm:num_requests_running") == 0
    assert page.value("vllm:num_requests_waiting") == 2
    assert page.value("vllm:prompt_tokens_total") == 30
    assert page.value("vllm:generation_tokens_total") == 4
    assert [page.value("vllm:request_success_total", finished_reason=str(r)) for r in FinishReason] == [0, 1, 0, 0]
    for name, count, total in (
        ("vllm:time_to_first_token_seconds", 1, 2.0),
        ("vllm:inter_token_latency_seconds", 1, 0.06),
        ("vllm:e2e_request_latency_seconds", 1, 2.5),
        ("vllm:request_queue_time_seconds", 1, 0.4),
        ("vllm:request_prefill_time_seconds", 1, 1.6),
        ("vllm:request_decode_time_seconds", 1, 0.06),
        ("vllm:request_inference_time_seconds", 1, 1.66),
        ("vllm:request_prompt_tokens", 1, 30),
        ("vllm:request_generation_tokens", 1, 4),
        ("vllm:iteration_tokens_total", 3, 29 + 1 + 19),
        ("widemesh:step_time_seconds", 3, 0.324),
    ):
        assert page.histogram(name) == (count, pytest.approx(total)), name
    assert page.value("vllm:inter_token_latency_seconds_bucket", le="0.05") == 0
    assert page.value("vllm:inter_token_latency_seconds_bucket", le="0.075") == 1
    assert page.value("widemesh:step_time_seconds_bucket", le="0.004") == 1


def test_a_request_that_never_started_has_no_phases(metrics: EngineMetrics) -> None:
    waited, started = (RequestTrace(prompt_tokens=5, arrived_s=10.0) for _ in range(2))
    started.started_s = 11.0
    metrics.finished(waited, 0, FinishReason.ABORT, 12.0)
    metrics.finished(started, 0, FinishReason.ERROR, 12.0)
    metrics.step(running=0, waiting=0, prompt_rows=0, step_s=0.001)
    page = Page(metrics)
    assert page.value("vllm:request_success_total", finished_reason="abort") == 1
    assert page.value("vllm:request_success_total", finished_reason="error") == 1
    assert page.histogram("vllm:e2e_request_latency_seconds") == (2, 4.0)
    assert page.histogram("vllm:request_queue_time_seconds") == (1, 1.0)
    for name in ("vllm:time_to_first_token_seconds", "vllm:request_prefill_time_seconds",
                 "vllm:request_decode_time_seconds", "vllm:iteration_tokens_total",
                 "widemesh:step_time_seconds"):  # fmt: skip
        assert page.histogram(name) == (0, 0.0)
    assert page.value("vllm:prompt_tokens_total") == 0


def test_moving_experts(metrics: EngineMetrics) -> None:
    """Figures of each model that has reported; an engine that moves none has no sample."""
    listener: ReshuffleListener = metrics
    assert "eplb" not in " ".join(name for name, _ in Page(metrics).samples)
    listener.balancedness("target", 0.35, 0.99)
    listener.balancedness("target", 0.94, None)
    listener.balancedness("draft", 0.5, None)
    for result, rows in (("skipped", 0), ("committed", 7), ("abandoned", 2), ("committed", 1)):
        listener.rebalanced("target", result, rows, rows * 100)
    for seconds in (0.004, 0.3):
        listener.layer_committed("target", seconds)
    listener.disabled("draft", True)
    page = Page(metrics)
    assert page.value("widemesh:eplb_balancedness", model="target") == 0.94
    assert page.value("widemesh:eplb_feasible_balancedness", model="target") == 0.99
    assert page.value("widemesh:eplb_balancedness", model="draft") == 0.5
    assert 'feasible_balancedness{engine="0",model="draft"' not in page.text
    found = [page.value("widemesh:eplb_rebalances_total", model="target", result=result)
             for result in ("committed", "skipped", "abandoned")]  # fmt: skip
    assert found == [2, 1, 1]
    assert page.value("widemesh:eplb_rebalances_total", model="draft", result="committed") == 0
    assert page.value("widemesh:eplb_migrated_bytes_total", model="target") == 1000
    assert page.value("widemesh:eplb_layer_commit_seconds_sum", model="target") == pytest.approx(0.304)
    assert page.value("widemesh:eplb_layer_commit_seconds_bucket", model="target", le="0.005") == 1
    assert [page.value("widemesh:eplb_disabled", model=model) for model in ("target", "draft")] == [0, 1]


def test_pages_and_prefix_cache(metrics: EngineMetrics) -> None:
    """Cached pages can be taken, so they are no usage; the fullest mesh is what limits."""
    assert Page(metrics).value("vllm:kv_cache_usage_perc") == 0
    pages = {"prefill": PageCounts(used=1, cached=6, free=3), "decode": PageCounts(used=9, cached=3, free=0)}
    metrics.cache(pages=pages, prefix_queries=100, prefix_hits=64, preemptions=2)
    page = Page(metrics)
    assert page.value("vllm:kv_cache_usage_perc") == 0.75
    states = ("used", "cached", "free")
    assert [page.value("widemesh:pages", mesh="prefill", state=state) for state in states] == [1, 6, 3]
    assert [page.value("widemesh:pages", mesh="decode", state=state) for state in states] == [9, 3, 0]
    assert page.value("vllm:prefix_cache_queries_total") == 100
    assert page.value("vllm:prefix_cache_hits_total") == 64
    assert page.value("vllm:num_preemptions_total") == 2


def test_where_a_step_of_several_processes_waits(metrics: EngineMetrics) -> None:
    for wait_s, rank in ((0.00004, 3), (0.0003, 11), (7.0, 3)):
        metrics.agreed(wait_s, rank)
    metrics.dispatched(0.0002)
    metrics.device_step(0.008)
    metrics.device_step(0.012)
    page = Page(metrics)
    assert page.histogram("widemesh:ticket_wait_seconds") == (3, pytest.approx(7.00034))
    assert page.value("widemesh:ticket_wait_seconds_bucket", le="2e-05") == 0
    assert page.value("widemesh:ticket_wait_seconds_bucket", le="5e-05") == 1
    assert page.value("widemesh:ticket_wait_seconds_bucket", le="5.0") == 2
    assert page.histogram("widemesh:dispatch_seconds") == (1, 0.0002)
    assert page.histogram("widemesh:device_step_seconds") == (2, pytest.approx(0.02))
    assert page.value("widemesh:ticket_last_rank_total", rank="3") == 2
    assert page.value("widemesh:ticket_last_rank_total", rank="11") == 1


def test_the_engine_label_is_the_rank(compiles: SimpleNamespace) -> None:
    metrics = EngineMetrics(model_name="tiny", max_model_len=100, compiles=cast(CompileCounter, compiles), rank=7)
    assert {dict(labels)["engine"] for _, labels in Page(metrics).samples} == {"7"}


def test_compiles_are_read_when_asked(metrics: EngineMetrics, compiles: SimpleNamespace) -> None:
    assert Page(metrics).value("widemesh:compiles_after_warm_up_total") == 0
    compiles.after_warm_up = 3
    assert Page(metrics).value("widemesh:compiles_after_warm_up_total") == 3


# --- a running engine -------------------------------------------------------------------------------------------------

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


class Growth:
    """How much a sample of the engine's page has grown since this was made."""

    def __init__(self, engine: Engine):
        self._engine, self._before = engine, Page(engine.metrics)

    def counter(self, name: str, **labels: str) -> float:
        return Page(self._engine.metrics).value(name, **labels) - self._before.value(name, **labels)

    def count(self, name: str) -> float:
        return Page(self._engine.metrics).histogram(name)[0] - self._before.histogram(name)[0]

    def sum(self, name: str) -> float:
        return Page(self._engine.metrics).histogram(name)[1] - self._before.histogram(name)[1]


def eventually(read: Callable[[], float], want: float) -> None:
    """A turn of the loop delivers tokens before it counts itself."""
    deadline_s = time.monotonic() + 10
    while read() != want and time.monotonic() < deadline_s:
        time.sleep(0.005)
    assert read() == want


@pytest.fixture
def growth(engine: Engine) -> Growth:
    """Taken while the loop sleeps, with all that went before counted."""

    async def run() -> None:
        stream = engine.stream([5, 6, 7], SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True))
        await anext(stream)
        await anext(stream)  # by now a turn has said that a request runs; the one that ends it says that none does
        await stream.aclose()

    asyncio.run(run())
    eventually(lambda: Page(engine.metrics).value("vllm:num_requests_running"), 0)
    return Growth(engine)


def test_numbers_match_a_generation(engine: Engine, growth: Growth) -> None:
    rng = np.random.default_rng(3)
    lengths = (1, 9, 20, 4, 12, 7)  # more than slots: some wait
    prompts: list[Any] = [rng.integers(3, 500, length).astype(np.int32) for length in lengths]
    done = engine.generate(prompts, GREEDY)
    made = sum(len(completion.token_ids) for completion in done)
    assert made == 6 * 6
    assert growth.counter("vllm:prompt_tokens_total") == sum(lengths)
    assert growth.counter("vllm:generation_tokens_total") == made
    assert growth.counter("vllm:request_success_total", finished_reason="length") == 6
    assert growth.count("vllm:time_to_first_token_seconds") == 6
    assert growth.count("vllm:inter_token_latency_seconds") == made - 6
    for name in ("e2e_request_latency", "request_queue_time", "request_prefill_time", "request_decode_time",
                 "request_inference_time"):  # fmt: skip
        assert growth.count(f"vllm:{name}_seconds") == 6
    assert growth.sum("vllm:request_prompt_tokens") == sum(lengths)
    assert growth.sum("vllm:request_generation_tokens") == made
    assert growth.sum("vllm:e2e_request_latency_seconds") == pytest.approx(
        growth.sum("vllm:request_queue_time_seconds") + growth.sum("vllm:request_inference_time_seconds"), abs=0.1
    )
    # Every token but a prompt's last is computed by a prefill step, every output token by a decode step.
    eventually(lambda: growth.sum("vllm:iteration_tokens_total"), sum(lengths) - 6 + made)
    assert growth.count("widemesh:step_time_seconds") == growth.count("vllm:iteration_tokens_total") >= 12
    steps = growth.count("widemesh:device_step_seconds")
    assert 6 <= steps <= made and growth.sum("widemesh:device_step_seconds") < 60
    assert growth.count("widemesh:dispatch_seconds") >= steps and growth.sum("widemesh:dispatch_seconds") > 0
    page = Page(engine.metrics)
    assert page.value("vllm:num_requests_running") == page.value("vllm:num_requests_waiting") == 0
    assert {dict(labels)["model_name"] for _, labels in page.samples} == {engine.config.model}


def test_an_aborted_request_is_counted_once(engine: Engine, growth: Growth) -> None:
    async def run() -> None:
        stream = engine.stream([5, 6, 7], SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True))
        await anext(stream)
        await stream.aclose()

    asyncio.run(run())
    eventually(lambda: growth.counter("vllm:request_success_total", finished_reason="abort"), 1)
    assert growth.count("vllm:e2e_request_latency_seconds") == 1
    assert growth.counter("vllm:prompt_tokens_total") == 3


def test_a_late_compile_shows(engine: Engine, growth: Growth) -> None:
    engine.generate([5, 6, 7], GREEDY)
    assert growth.counter("widemesh:compiles_after_warm_up_total") == 0
    jax.jit(lambda x: x * 7.5 - 2)(np.arange(11.0, dtype=np.float32))
    assert growth.counter("widemesh:compiles_after_warm_up_total") == 1
