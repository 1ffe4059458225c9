"""Figures on drafts: what is counted of a step, and how Prometheus reads it."""

from __future__ import annotations

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.registry import Collector

from widemesh.serving.speculation_metrics import SpeculationMetrics

LABELS = {"model_name": "tiny", "engine": "3"}


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def page(metrics: SpeculationMetrics) -> list[str]:
    """The lines of a scrape, but for comments and the time at which a counter was made."""

    class Export(Collector):
        def collect(self):
            return metrics.collect()

    registry = CollectorRegistry()
    registry.register(Export())
    lines = generate_latest(registry).decode().splitlines()
    return [line for line in lines if not line.startswith("#") and "_created" not in line]


def test_without_drafts_all_is_zero_and_there_are_no_places() -> None:
    metrics = SpeculationMetrics(LABELS)
    assert page(metrics) == [
        'vllm:spec_decode_num_drafts_total{engine="3",model_name="tiny"} 0.0',
        'vllm:spec_decode_num_draft_tokens_total{engine="3",model_name="tiny"} 0.0',
        'vllm:spec_decode_num_accepted_tokens_total{engine="3",model_name="tiny"} 0.0',
    ]


def test_places_are_there_before_anything_was_tried() -> None:
    metrics = SpeculationMetrics(LABELS)
    metrics.add(ints(0, 0), ints(1, 0), 2)
    assert page(metrics)[3:] == [
        f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="3",model_name="tiny",position="{place}"}} 0.0'
        for place in range(2)
    ]


def test_each_slot_counts_what_it_tried_and_kept() -> None:
    """A step draws one token more than the drafts that it accepts. Slots without drafts, or idle, count nothing."""
    metrics = SpeculationMetrics(LABELS)
    metrics.add(ints(3, 3, 3, 2, 1, 0, 0), ints(4, 3, 1, 2, 1, 1, 0), 3)
    assert (metrics.drafts, metrics.tried_tokens, metrics.accepted.tolist()) == (5, 12, [3, 2, 1])
    metrics.add(ints(1, 0), ints(2, 1), 3)
    assert (metrics.drafts, metrics.tried_tokens, metrics.accepted.tolist()) == (6, 13, [4, 2, 1])
    assert metrics.accepted_tokens == 7
    lines = page(metrics)
    assert lines[2] == 'vllm:spec_decode_num_accepted_tokens_total{engine="3",model_name="tiny"} 7.0'
    assert [line.rsplit(" ", 1)[1] for line in lines[3:]] == ["4.0", "2.0", "1.0"]


@pytest.mark.parametrize("count", [0, 1])
def test_a_step_that_drew_nothing_has_accepted_nothing(count: int) -> None:
    metrics = SpeculationMetrics(LABELS)
    metrics.add(ints(2), ints(count), 2)
    assert (metrics.drafts, metrics.tried_tokens, metrics.accepted.tolist()) == (1, 2, [0, 0])


def test_a_reader_never_sees_a_step_half_added_by_place() -> None:
    """The figures by place are replaced, not written to: a scrape on another thread holds those it has begun with."""
    metrics = SpeculationMetrics(LABELS)
    metrics.add(ints(2), ints(3), 2)
    held = metrics.accepted
    metrics.add(ints(2), ints(3), 2)
    assert held.tolist() == [1, 1] and metrics.accepted.tolist() == [2, 2]
