"""The current metrics of a node, for the exporters: /metrics and OTLP.

Built from copies, without a lock, so that a scrape is answered while another thread hangs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, TypeVar

from elastic.metrics.readings import NodeReadings
from elastic.metrics.table import METRICS, Metric, MetricKind, MetricSource
from elastic.metrics.tally import Distribution, Labels, label_value

_V = TypeVar("_V")


class MetricSeries(NamedTuple):
    """One metric and the values of its series, by label values: the first for gauges and counters,
    the second for summaries and histograms."""

    metric: Metric
    values: Mapping[Labels, float]
    distributions: Mapping[Labels, Distribution]


def series_of(readings: NodeReadings) -> Iterator[MetricSeries]:
    """Every metric of the table that has a value, in its order."""
    gauges: dict[Metric, dict[Labels, float]] = {}
    for metric, labels, value in readings.gauges():
        cleaned = tuple(label_value(text) for text in labels)
        gauges.setdefault(metric, {})[cleaned] = float(value)
    counts = _by_metric(readings.metrics.tally.counts().items())
    distributions = _by_metric(readings.metrics.tally.distributions().items())
    collects = readings.metrics.collects_worker_events
    for metric in METRICS:
        values = gauges.get(metric, {})
        if metric.kind is MetricKind.COUNTER:
            # Zeros for workers without reports would look like a job without progress.
            is_collected = collects or metric.source is not MetricSource.WORKERS
            zeros = dict.fromkeys(metric.initial_series, 0.0) if is_collected else {}
            values = {**zeros, **counts.get(metric, {})}
        found = MetricSeries(metric, values, distributions.get(metric, {}))
        if found.values or found.distributions:
            yield found


def _by_metric(
    items: Iterable[tuple[tuple[Metric, Labels], _V]],
) -> dict[Metric, dict[Labels, _V]]:
    found: dict[Metric, dict[Labels, _V]] = {}
    for (metric, labels), value in items:
        found.setdefault(metric, {})[labels] = value
    return found
