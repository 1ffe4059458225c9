"""What moving experts adds to the engine's figures, for each model that it serves: the target, and a draft."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from widemesh.serving.histogram import Histogram

_COMMIT_S = tuple(digit * 10.0**power for power in range(-3, 2) for digit in (1, 2, 5))
RESULTS = ("committed", "skipped", "abandoned")  # how a rebalance ends


@dataclasses.dataclass(slots=True)
class _Model:
    """Figures of one model."""

    value: float | None = None  # None: not measured yet
    feasible: float | None = None
    results: dict[str, int] = dataclasses.field(default_factory=lambda: dict.fromkeys(RESULTS, 0))
    num_bytes: int = 0
    commits: Histogram = dataclasses.field(default_factory=lambda: Histogram(_COMMIT_S))
    is_disabled: bool = False


class ExpertMetrics:
    """Figures by the name of the model; a name is there from the first report on. `labels` stand on every sample."""

    def __init__(self, labels: Mapping[str, str]):
        self._labels = labels
        self._models: dict[str, _Model] = {}

    def of(self, model: str) -> _Model:
        """The figures of a model, all of them 0 at first."""
        return self._models.setdefault(model, _Model())

    def collect(self) -> Iterator[Metric]:
        """All figures as they are now; families without a sample if no model is served with moving experts."""
        models = self._models.copy()
        labels, values = (*self._labels, "model"), tuple(self._labels.values())
        for name, text, figures in (
            ("widemesh:eplb_balancedness", "Mean rank load / maximum rank load, as last measured; 1 is even.",
             {name: one.value for name, one in models.items()}),
            ("widemesh:eplb_feasible_balancedness", "What no placement of the last plan's load can exceed.",
             {name: one.feasible for name, one in models.items()}),
            ("widemesh:eplb_disabled", "1 if migrations failed too often and nothing moves until it is resumed.",
             {name: float(one.is_disabled) for name, one in models.items()}),
        ):  # fmt: skip
            gauge = GaugeMetricFamily(name, text, labels=labels)
            for model, figure in figures.items():
                if figure is not None:
                    gauge.add_metric((*values, model), figure)
            yield gauge
        moved = CounterMetricFamily("widemesh:eplb_migrated_bytes", "Weights sent from rank to rank.", labels=labels)
        ended = CounterMetricFamily("widemesh:eplb_rebalances", "Rebalances that have ended.",
                                    labels=(*labels, "result"))  # fmt: skip
        commits = HistogramMetricFamily("widemesh:eplb_layer_commit_seconds",
                                        "From a layer's first copy to its commit.", labels=labels)  # fmt: skip
        for model, one in models.items():
            moved.add_metric((*values, model), one.num_bytes)
            for result, count in one.results.items():
                ended.add_metric((*values, model, result), count)
            counts, total = one.commits.read()
            bounds = [(floatToGoString(bound), count) for bound, count in counts]
            commits.add_metric((*values, model), bounds, total)
        yield from (ended, moved, commits)
