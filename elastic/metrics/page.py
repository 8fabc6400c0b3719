"""``/metrics``: a node's readings and counts in Prometheus' text format, by prometheus-client.

The package is an extra, and imported by agents that serve a port.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING

from elastic.metrics.readings import NodeReadings
from elastic.metrics.series import series_of
from elastic.metrics.table import COMMON_LABELS, ETCD_BUCKETS, Metric, MetricKind
from elastic.metrics.tally import Distribution, Labels, label_value
from elastic.telemetry.log import get_logger

if TYPE_CHECKING:
    from prometheus_client import Metric as Family

NEEDS_EXTRA = (
    "metrics need prometheus-client, which is not installed on this node: "
    "pip install 'torch-elastic-harness[metrics]'"
)


@dataclass(frozen=True)
class MetricsPage:
    """A response of the health server."""

    status: HTTPStatus
    content_type: str
    text: bytes

    def body(self) -> bytes:
        """The response body."""
        return self.text


def load() -> bool:
    """Import prometheus-client, which takes longer than a first scrape may on a busy machine.

    False if it is not installed.
    """
    try:
        import prometheus_client  # noqa: F401
    except ImportError:
        return False
    return True


def render(readings: NodeReadings, *, run_id: str, node: str) -> MetricsPage:
    """The current metrics of a node."""
    if not load():
        return _sentence(HTTPStatus.NOT_IMPLEMENTED, NEEDS_EXTRA)
    from prometheus_client import CollectorRegistry
    from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

    registry = CollectorRegistry(auto_describe=False)
    registry.register(NodeCollector(readings, (label_value(run_id), label_value(node))))
    try:
        text = generate_latest(registry)
    except Exception as error:  # noqa: BLE001 - a scrape shows the defect; the agent continues
        get_logger().exception("the metrics of this node cannot be read")
        return _sentence(
            HTTPStatus.INTERNAL_SERVER_ERROR, f"the metrics of this node cannot be read: {error!r}"
        )
    return MetricsPage(HTTPStatus.OK, CONTENT_TYPE_LATEST, text)


def _sentence(status: HTTPStatus, text: str) -> MetricsPage:
    return MetricsPage(status, "text/plain; charset=utf-8", f"{text}\n".encode(errors="replace"))


class NodeCollector:
    """A custom collector of prometheus-client: families are created at each scrape, from copies."""

    def __init__(self, readings: NodeReadings, common: Sequence[str]) -> None:
        self._readings = readings
        self._common = tuple(common)

    def collect(self) -> Iterator[Family]:
        """Every metric of the table that has a value."""
        for metric, values, distributions in series_of(self._readings):
            if metric.kind in (MetricKind.GAUGE, MetricKind.COUNTER):
                yield self._simple(metric, values)
            else:
                yield self._distributed(metric, distributions)

    def _simple(self, metric: Metric, values: Mapping[Labels, float]) -> Family:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        is_counter = metric.kind is MetricKind.COUNTER
        kind: type[GaugeMetricFamily | CounterMetricFamily]
        kind = CounterMetricFamily if is_counter else GaugeMetricFamily
        family = kind(metric.name, metric.meaning, labels=_names(metric))
        for labels, value in sorted(values.items()):
            family.add_metric((*self._common, *labels), value)
        return family

    def _distributed(self, metric: Metric, values: Mapping[Labels, Distribution]) -> Family:
        from prometheus_client.core import HistogramMetricFamily, SummaryMetricFamily

        if metric.kind is MetricKind.SUMMARY:
            summary = SummaryMetricFamily(metric.name, metric.meaning, labels=_names(metric))
            for labels, known in sorted(values.items(), key=lambda pair: pair[0]):
                summary.add_metric((*self._common, *labels), int(known.count), known.total)
            return summary
        histogram = HistogramMetricFamily(metric.name, metric.meaning, labels=_names(metric))
        for labels, known in sorted(values.items(), key=lambda pair: pair[0]):
            bounds = (*map(str, ETCD_BUCKETS), "+Inf")
            buckets = list(
                zip(bounds, itertools.accumulate(map(float, known.buckets)), strict=True)
            )
            histogram.add_metric((*self._common, *labels), buckets, known.total)
        return histogram


def _names(metric: Metric) -> tuple[str, ...]:
    return (*COMMON_LABELS, *metric.labels)
