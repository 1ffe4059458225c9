"""What drafts bring: how many were tried, and how many were accepted at each place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from jaxtyping import Int32
from prometheus_client.core import CounterMetricFamily, Metric


class SpeculationMetrics:
    """Totals since start; one without drafts has none. `labels` stand on every sample. Names and meanings are vLLM's:
    mean acceptance length = 1 + accepted tokens / drafts."""

    def __init__(self, labels: Mapping[str, str]):
        self._labels = labels
        self.drafts = self.tried_tokens = 0  # slots' steps with drafts, and the tokens in them
        self.accepted = np.zeros(0, np.int64)  # by place behind the newest token

    @property
    def accepted_tokens(self) -> int:
        """At all places."""
        return int(self.accepted.sum())

    def add(
        self, tried: Int32[np.ndarray, "slots"], counts: Int32[np.ndarray, "slots"], places: int
    ) -> None:
        """A step's result is there: drafts that each slot has tried, of `places` at most, and tokens that it drew."""
        with_drafts = tried > 0
        if len(self.accepted) < places:
            self.accepted = np.zeros(places, np.int64)
        if not with_drafts.any():
            return
        kept = np.clip(counts[with_drafts] - 1, 0, None)  # the last token that a step draws is the target's own
        self.drafts += int(with_drafts.sum())
        self.tried_tokens += int(tried.sum())
        self.accepted = self.accepted + (kept[:, None] > np.arange(places)).sum(axis=0)

    def collect(self) -> Iterator[Metric]:
        """All figures as they are now."""
        accepted, names, values = self.accepted, tuple(self._labels), tuple(self._labels.values())
        for name, text, value in (
            ("vllm:spec_decode_num_drafts", "Steps of requests that tried drafts.", self.drafts),
            ("vllm:spec_decode_num_draft_tokens", "Drafts that were tried.", self.tried_tokens),
            ("vllm:spec_decode_num_accepted_tokens", "Drafts that were accepted.", int(accepted.sum())),
        ):
            family = CounterMetricFamily(name, text, labels=names)
            family.add_metric(values, value)
            yield family
        by_place = CounterMetricFamily("vllm:spec_decode_num_accepted_tokens_per_pos",
                                       "Drafts that were accepted, by place.", labels=(*names, "position"))  # fmt: skip
        for place, count in enumerate(accepted.tolist()):
            by_place.add_metric((*values, str(place)), count)
        yield by_place
