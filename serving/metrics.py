"""The engine's figures: its thread adds up plain numbers, which become Prometheus metrics when somebody asks.

Names that begin with `vllm:` mean what vLLM means by them; what vLLM has no name for begins with `widemesh:`.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from widemesh.serving.compile_counter import CompileCounter
from widemesh.serving.expert_metrics import ExpertMetrics
from widemesh.serving.histogram import Histogram, one_two_five
from widemesh.serving.request import FinishReason
from widemesh.serving.speculation_metrics import SpeculationMetrics

if TYPE_CHECKING:
    from widemesh.serving.exchange_traffic import MeshTraffic

# Upper bounds in seconds. vLLM's, but for the ones below 10 ms between tokens, where a decode step belongs.
_FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
                  40.0, 80.0, 160.0, 640.0, 2560.0)  # fmt: skip
_BETWEEN_TOKENS_S = (0.001, 0.002, 0.003, 0.004, 0.005, 0.007, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5,
                     0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)  # fmt: skip
_REQUEST_S = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0,
              960.0, 1920.0, 7680.0)  # fmt: skip
_STEP_S = (0.001, 0.002, 0.003, 0.004, 0.005, 0.007, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.0,
           5.0, 10.0)  # fmt: skip
_STEP_TOKENS = (1, *(2**power for power in range(3, 15)))
# What a step waits for others and what starting it costs lies far below a step: 1, 2 and 5 of each power of ten.
_HOST_S = tuple(digit * 10.0**power for power in range(-5, 1) for digit in (1, 2, 5))


@dataclasses.dataclass(slots=True, kw_only=True)
class RequestTrace:
    """Sizes of one request and when it got where, in `time.monotonic()` seconds. None: not there yet."""

    prompt_tokens: int
    arrived_s: float = dataclasses.field(default_factory=time.monotonic)
    started_s: float | None = None  # it got its slot for the first time
    first_token_s: float | None = None
    last_token_s: float | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PageCounts:
    """The pages of one mesh. Cached ones hold a prefix that no running request uses and can be taken any time."""

    used: int
    cached: int
    free: int


class EngineMetrics(Collector):
    """Figures of one engine since its start; register it with a `CollectorRegistry` to have them exported.

    `rank` is that of its process in a job of several. `traffic` counts the bytes of exchanges, by the name of the mesh.

    The engine's thread alone reports. Reading takes no lock: a
    scrape may see one step's numbers half added, never a number that was not there.
    """

    def __init__(self, *, model_name: str, max_model_len: int, compiles: CompileCounter, rank: int = 0,
                 traffic: Mapping[str, MeshTraffic] | None = None):  # fmt: skip
        self._labels = {"model_name": model_name, "engine": str(rank)}
        self._compiles, self._traffic = compiles, traffic or {}
        self._running = self._waiting = 0
        self._prompt_tokens = self._generated_tokens = 0
        self._finished = dict.fromkeys(FinishReason, 0)
        self._pages: Mapping[str, PageCounts] = {}
        self._prefix_queries = self._prefix_hits = self._preemptions = 0
        self._generated_before = 0  # the turn of the loop that is under way

        self._first_token = Histogram(_FIRST_TOKEN_S)
        self._between_tokens = Histogram(_BETWEEN_TOKENS_S)
        self._queue, self._prefill, self._decode, self._inference, self._whole = (
            Histogram(_REQUEST_S) for _ in range(5)
        )
        token_bounds = one_two_five(max_model_len)
        self._request_prompt, self._request_output = Histogram(token_bounds), Histogram(token_bounds)
        self._step_tokens, self._step_time = Histogram(_STEP_TOKENS), Histogram(_STEP_S)
        self._ticket_wait, self._dispatch = Histogram(_HOST_S), Histogram(_HOST_S)
        self._device_step = Histogram(_STEP_S)
        self._last_ranks: dict[int, int] = {}
        self._experts = ExpertMetrics(self._labels)
        self.speculation = SpeculationMetrics(self._labels)

    # --- what the engine's thread reports -----------------------------------------------------------------------------

    def generated(self, num_tokens: int) -> None:
        """A step's result has arrived, with so many tokens in all."""
        self._generated_tokens += num_tokens

    def first_token(self, trace: RequestTrace, now_s: float) -> None:
        """A request has got its first tokens."""
        trace.first_token_s = trace.last_token_s = now_s
        self._prompt_tokens += trace.prompt_tokens
        self._first_token.add(now_s - trace.arrived_s)

    def later_tokens(self, interval_s: float, times: int) -> None:
        """So many requests have got more tokens, each so long after the ones before."""
        self._between_tokens.add(interval_s, times)

    def finished(self, trace: RequestTrace, output_tokens: int, reason: FinishReason, now_s: float) -> None:
        """A request has ended. Of its phases those are counted that it has completed."""
        self._finished[reason] += 1
        self._whole.add(now_s - trace.arrived_s)
        self._request_prompt.add(trace.prompt_tokens)
        self._request_output.add(output_tokens)
        if trace.started_s is None:
            return
        self._queue.add(trace.started_s - trace.arrived_s)
        if trace.first_token_s is None or trace.last_token_s is None:
            return
        self._prefill.add(trace.first_token_s - trace.started_s)
        self._decode.add(trace.last_token_s - trace.first_token_s)
        self._inference.add(trace.last_token_s - trace.started_s)

    def cache(
        self, *, pages: Mapping[str, PageCounts], prefix_queries: int, prefix_hits: int, preemptions: int
    ) -> None:
        """The state of the pages, by the name of their mesh, and totals since start; queries and hits in tokens."""
        self._pages = pages
        self._prefix_queries, self._prefix_hits, self._preemptions = prefix_queries, prefix_hits, preemptions

    def step(self, *, running: int, waiting: int, prompt_rows: int, step_s: float) -> None:
        """A turn of the loop is over, in which `prompt_rows` prompt tokens were computed.

        A turn without any token, as one that only ends requests, counts as no step.
        """
        self._running, self._waiting = running, waiting
        tokens = prompt_rows + self._generated_tokens - self._generated_before
        self._generated_before = self._generated_tokens
        if tokens > 0:
            self._step_time.add(step_s)
            self._step_tokens.add(tokens)

    def agreed(self, wait_s: float, last_rank: int) -> None:
        """The processes of a job have agreed on a step, after this one's wait; `last_rank` answered last."""
        self._ticket_wait.add(wait_s)
        self._last_ranks[last_rank] = self._last_ranks.get(last_rank, 0) + 1

    def dispatched(self, seconds: float) -> None:
        """Starting a step's programs has taken so long on the engine's thread."""
        self._dispatch.add(seconds)

    def device_step(self, seconds: float) -> None:
        """A decode step's result is there, so long after its dispatch or, if later, the result before it."""
        self._device_step.add(seconds)

    def balancedness(self, model: str, value: float, feasible: float | None) -> None:
        """Mean rank load / maximum rank load of a model's experts; `feasible`, if known: what no placement exceeds."""
        self._experts.of(model).value = value
        if feasible is not None:
            self._experts.of(model).feasible = feasible

    def rebalanced(self, model: str, result: str, rows: int, num_bytes: int) -> None:
        """A rebalance has ended in one of `expert_metrics.RESULTS`, after sending so many rows between ranks."""
        found = self._experts.of(model)
        found.results[result] = found.results.get(result, 0) + 1
        found.num_bytes += num_bytes

    def layer_committed(self, model: str, seconds: float) -> None:
        """A layer's weights and maps are in force, so long after its first copy."""
        self._experts.of(model).commits.add(seconds)

    def disabled(self, model: str, is_disabled: bool) -> None:
        """Rebalancing has been given up after too many failures, or resumed."""
        self._experts.of(model).is_disabled = is_disabled

    # --- what a scrape reads ------------------------------------------------------------------------------------------

    def collect(self) -> Iterator[Metric]:
        """All figures as they are now."""
        yield self._gauge("vllm:num_requests_running", "Requests that hold a slot.", self._running)
        yield self._gauge("vllm:num_requests_waiting", "Requests in the queue.", self._waiting)
        yield self._gauge("vllm:kv_cache_usage_perc", "Used share of the pages of the fullest mesh; 1 is all.",
                          max(map(_used_share, self._pages.values()), default=0.0))  # fmt: skip
        yield self._counter("vllm:prefix_cache_queries", "Tokens looked up in the prefix cache.", self._prefix_queries)
        yield self._counter("vllm:prefix_cache_hits", "Tokens found in the prefix cache.", self._prefix_hits)
        yield self._counter("vllm:num_preemptions", "Requests put back into the queue.", self._preemptions)
        yield self._counter("vllm:prompt_tokens", "Tokens of prompts that were processed.", self._prompt_tokens)
        yield self._counter("vllm:generation_tokens", "Tokens generated.", self._generated_tokens)
        yield self._finished_by_reason()
        for name, text, histogram in (
            ("vllm:time_to_first_token_seconds", "From arrival to the first token.", self._first_token),
            ("vllm:inter_token_latency_seconds", "From one delivery of tokens to the next.", self._between_tokens),
            ("vllm:e2e_request_latency_seconds", "From arrival to the end.", self._whole),
            ("vllm:request_queue_time_seconds", "From arrival to a slot.", self._queue),
            ("vllm:request_prefill_time_seconds", "From a slot to the first token.", self._prefill),
            ("vllm:request_decode_time_seconds", "From the first token to the last.", self._decode),
            ("vllm:request_inference_time_seconds", "From a slot to the last token.", self._inference),
            ("vllm:request_prompt_tokens", "Prompt tokens of finished requests.", self._request_prompt),
            ("vllm:request_generation_tokens", "Generated tokens of finished requests.", self._request_output),
            ("vllm:iteration_tokens_total", "Prompt and generated tokens of a step.", self._step_tokens),
            ("widemesh:step_time_seconds", "One turn of the engine's loop.", self._step_time),
            ("widemesh:ticket_wait_seconds", "Wait for the other processes' part of a step.", self._ticket_wait),
            ("widemesh:dispatch_seconds", "Starting a step's programs.", self._dispatch),
            ("widemesh:device_step_seconds", "From a decode step's start to its result.", self._device_step),
        ):
            family = HistogramMetricFamily(name, text, labels=tuple(self._labels))
            counts, total = histogram.read()
            bounds = [(floatToGoString(bound), count) for bound, count in counts]
            family.add_metric(tuple(self._labels.values()), bounds, total)
            yield family
        yield self._last_by_rank()
        yield self._pages_by_state()
        yield self._exchange_bytes()
        yield from self.speculation.collect()
        yield from self._experts.collect()
        yield self._counter("widemesh:compiles_after_warm_up", "Programs compiled that should have been there already.",
                            self._compiles.after_warm_up)  # fmt: skip

    def _gauge(self, name: str, text: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(name, text, labels=tuple(self._labels))
        family.add_metric(tuple(self._labels.values()), value)
        return family

    def _counter(self, name: str, text: str, value: float) -> CounterMetricFamily:
        family = CounterMetricFamily(name, text, labels=tuple(self._labels))
        family.add_metric(tuple(self._labels.values()), value)
        return family

    def _finished_by_reason(self) -> CounterMetricFamily:
        family = CounterMetricFamily("vllm:request_success", "Requests that have ended.",
                                     labels=(*self._labels, "finished_reason"))  # fmt: skip
        for reason, count in self._finished.items():
            family.add_metric((*self._labels.values(), str(reason)), count)
        return family

    def _last_by_rank(self) -> CounterMetricFamily:
        family = CounterMetricFamily("widemesh:ticket_last_rank", "Steps for which a rank's part came last.",
                                     labels=(*self._labels, "rank"))  # fmt: skip
        for rank, count in sorted(self._last_ranks.copy().items()):
            family.add_metric((*self._labels.values(), str(rank)), count)
        return family

    def _exchange_bytes(self) -> CounterMetricFamily:
        family = CounterMetricFamily("widemesh:exchange_bytes", "Bytes sent between ranks for experts and tables.",
                                     labels=(*self._labels, "mesh"))  # fmt: skip
        for mesh, traffic in self._traffic.items():
            family.add_metric((*self._labels.values(), mesh), traffic.total)
        return family

    def _pages_by_state(self) -> GaugeMetricFamily:
        family = GaugeMetricFamily("widemesh:pages", "Pages of a mesh: used, cached (can be taken) and free.",
                                   labels=(*self._labels, "mesh", "state"))  # fmt: skip
        for mesh, counts in self._pages.items():
            for state in ("used", "cached", "free"):
                family.add_metric((*self._labels.values(), mesh, state), getattr(counts, state))
        return family


def _used_share(counts: PageCounts) -> float:
    return counts.used / max(1, counts.used + counts.cached + counts.free)
