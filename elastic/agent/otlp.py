"""Exports a node's metrics to an OpenTelemetry collector, by OTLP over HTTP. An extra, off unless
``ELASTIC_OTEL=on``.

The destination is set by the standard variables (OTEL_EXPORTER_OTLP_ENDPOINT, …_HEADERS,
…_TIMEOUT, …_CERTIFICATE, OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES): the SDK's exporter reads
them. The thread is ours: the SDK's periodic reader would start its own in every forked worker, and
it has no observable histograms.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from elastic.agent.metrics import (
    COMMON_LABELS,
    ETCD_BUCKETS,
    Distribution,
    MetricKind,
    MetricSeries,
    NodeReadings,
    label_value,
    series_of,
)
from elastic.errors import SYSTEM_CLOCK, Clock, ConfigError
from elastic.telemetry.log import get_logger

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import (
        HistogramDataPoint,
        Metric,
        MetricsData,
        NumberDataPoint,
    )
    from opentelemetry.sdk.resources import Resource

# Between two exports of a node's metrics by OTLP (OTEL_METRIC_EXPORT_INTERVAL): the default of
# OpenTelemetry's specification.
OTLP_EXPORT_S = 60.0
# A terminating agent waits this long for the last export, and as long again for the thread: a
# collector that hangs does not prevent a node from leaving.
OTLP_CLOSE_S = 2.0

SWITCH = "ELASTIC_OTEL"
INTERVAL = "OTEL_METRIC_EXPORT_INTERVAL"  # in milliseconds
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_METRICS_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_PROTOCOL = "http/protobuf"
_SERVICE = "torch-elastic-harness"
_THREAD = "elastic-otlp"
_PACKAGES = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")

Send = Callable[["MetricsData"], bool]


def is_wanted(env: Mapping[str, str]) -> bool:
    """Whether ``ELASTIC_OTEL=on``. Raises ConfigError if the settings cannot be applied."""
    value = env.get(SWITCH, "off")
    if value not in ("on", "off"):
        raise ConfigError(f"{SWITCH}={value}", hint="set it to on or off (the default)")
    if value == "off":
        return False
    if not all(_is_installed(name) for name in _PACKAGES):
        raise ConfigError(
            f"{SWITCH}=on needs OpenTelemetry, which is not installed on this node",
            hint="pip install 'torch-elastic-harness[otel]'",
        )
    protocol = next((env[name] for name in _PROTOCOLS if env.get(name)), _PROTOCOL)
    if protocol != _PROTOCOL:
        raise ConfigError(
            f"{SWITCH}=on with OTLP by {protocol}: the agent sends {_PROTOCOL}",
            hint=f"set {_PROTOCOLS[0]}={_PROTOCOL}, and OTEL_EXPORTER_OTLP_METRICS_ENDPOINT to "
            "the collector's HTTP port, by default http://localhost:4318/v1/metrics",
        )
    interval_s(env)
    return True


def interval_s(env: Mapping[str, str]) -> float:
    """The interval between two exports. Raises ConfigError."""
    text = env.get(INTERVAL)
    if not text:
        return OTLP_EXPORT_S
    try:
        seconds = float(text) / 1000
    except ValueError:
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds > 0):
        raise ConfigError(f"{INTERVAL}={text}", hint="milliseconds, for example 10000")
    return seconds


def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # of a package above it
        return False


class OtlpExport:
    """The exporter. One per agent. ``send`` is the SDK's exporter unless given."""

    def __init__(
        self,
        readings: NodeReadings,
        *,
        run_id: str,
        node: str,
        env: Mapping[str, str],
        send: Send | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._readings = readings
        self._common = dict(
            zip(COMMON_LABELS, (label_value(run_id), label_value(node)), strict=True)
        )
        self._every_s = interval_s(env)
        self._clock = clock
        self._since_s = clock.wall()
        self._given = send
        self._exporter: Any = None
        self._is_failing = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=_THREAD, daemon=True)

    def start(self) -> None:
        """Start exporting."""
        self._thread.start()

    def close(self) -> None:
        """Export once more, if the last export succeeded, and join. A hanging collector is not
        waited for. Idempotent."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(OTLP_CLOSE_S)
        if self._exporter is not None:
            exporter, self._exporter = self._exporter, None
            exporter.shutdown()  # ends the pauses between its retries
        if self._thread.is_alive():
            self._thread.join(OTLP_CLOSE_S)

    def _run(self) -> None:
        """Run the loop; an error here is reported and does not stop training."""
        try:
            send = self._given or self._connect()
            while not self._clock.wait(self._closing, self._every_s):
                self._export(send)
            if not self._is_failing:
                self._export(send)
        except Exception:  # noqa: BLE001 - metrics are no reason to end a job
            get_logger().exception("OTLP: this node no longer exports metrics")

    def _connect(self) -> Send:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.sdk.metrics.export import MetricExportResult

        # The SDK logs several lines per interval while the collector is unreachable: one is enough.
        for name in [n for n in logging.root.manager.loggerDict if n.startswith("opentelemetry.")]:
            logging.getLogger(name).addFilter(lambda line: line.threadName != _THREAD)
        exporter = self._exporter = OTLPMetricExporter()
        return lambda data: exporter.export(data) is MetricExportResult.SUCCESS

    def _export(self, send: Send) -> None:
        is_sent = send(self.collect())
        if is_sent == self._is_failing and not self._closing.is_set():
            if is_sent:
                get_logger().info("OTLP: the collector accepts metrics again")
            else:
                get_logger().warning(
                    "OTLP: the collector does not accept this node's metrics "
                    "(OTEL_EXPORTER_OTLP_ENDPOINT, by default http://localhost:4318); trying again "
                    "every %g s",
                    self._every_s,
                )
        self._is_failing = not is_sent

    def collect(self) -> MetricsData:
        """All metrics as they are now."""
        from opentelemetry.sdk.metrics.export import MetricsData, ResourceMetrics, ScopeMetrics
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        metrics = [self._metric(series) for series in series_of(self._readings)]
        scope = InstrumentationScope("elastic", self._readings.status.node.library)
        return MetricsData(
            [ResourceMetrics(self._resource(), [ScopeMetrics(scope, metrics, "")], "")]
        )

    def _resource(self) -> Resource:
        from opentelemetry.sdk.resources import Resource

        # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES take precedence.
        own = {"service.name": _SERVICE, "service.instance.id": self._common["node"]}
        return Resource(own).merge(_resource_of_environment())

    def _metric(self, series: MetricSeries) -> Metric:
        from opentelemetry.sdk.metrics.export import (
            AggregationTemporality,
            Gauge,
            Histogram,
            Metric,
            Sum,
        )

        kind, cumulative = series.metric.kind, AggregationTemporality.CUMULATIVE
        data: Gauge | Histogram | Sum
        if kind is MetricKind.GAUGE:
            data = Gauge(list(self._numbers(series)))
        elif kind is MetricKind.COUNTER:
            data = Sum(list(self._numbers(series)), cumulative, is_monotonic=True)
        else:
            bounds = ETCD_BUCKETS if kind is MetricKind.HISTOGRAM else ()
            data = Histogram(list(self._distributed(series, bounds)), cumulative)
        # No unit: collectors would append it to the name again.
        return Metric(series.metric.name, series.metric.meaning, "", data)

    def _numbers(self, series: MetricSeries) -> Iterator[NumberDataPoint]:
        from opentelemetry.sdk.metrics.export import NumberDataPoint

        for labels, value in sorted(series.values.items()):
            yield NumberDataPoint(self._attributes(series, labels), *self._times(), value)

    def _distributed(
        self, series: MetricSeries, bounds: Sequence[float]
    ) -> Iterator[HistogramDataPoint]:
        from opentelemetry.sdk.metrics.export import HistogramDataPoint

        unknown: Any = None  # minimum and maximum are not counted
        for labels, known in sorted(series.distributions.items(), key=lambda pair: pair[0]):
            yield HistogramDataPoint(
                self._attributes(series, labels),
                *self._times(),
                int(known.count),
                known.total,
                _buckets(known, bounds),
                bounds,
                unknown,
                unknown,
            )

    def _attributes(self, series: MetricSeries, labels: Sequence[str]) -> dict[str, str]:
        return {**self._common, **dict(zip(series.metric.labels, labels, strict=True))}

    def _times(self) -> tuple[int, int]:
        return int(self._since_s * 1e9), int(self._clock.wall() * 1e9)


def _buckets(known: Distribution, bounds: Sequence[float]) -> Sequence[int]:
    return known.buckets if bounds else (int(known.count),)


def _resource_of_environment() -> Resource:
    from opentelemetry.sdk.resources import OTELResourceDetector

    return OTELResourceDetector().detect()
