"""A node's metrics for Prometheus and TorchElastic's handlers."""

from __future__ import annotations

import itertools
import json
import logging
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from types import MappingProxyType
from typing import TYPE_CHECKING

from torch.distributed.elastic.events import record
from torch.distributed.elastic.events.api import Event as TorchEvent
from torch.distributed.elastic.events.api import EventMetadataValue, EventSource
from torch.distributed.elastic.events.handlers import get_logging_handler
from torch.distributed.elastic.metrics.api import NullMetricHandler, getStream, put_metric

from elastic.agent import otlp
from elastic.agent.metrics import (
    COMMON_LABELS,
    ETCD_BUCKETS,
    Distribution,
    Labels,
    Metric,
    MetricKind,
    NodeMetrics,
    NodeReadings,
    label_value,
    series_of,
)
from elastic.agent.otlp import OtlpExport
from elastic.errors import SYSTEM_CLOCK, Clock
from elastic.telemetry.events import (
    CheckpointSaved,
    Event,
    FailureJudged,
    HangFound,
    Recovered,
    WorkerDied,
    WorkerReplaced,
    WorldEntered,
)
from elastic.telemetry.journal import Journal, kebab_name
from elastic.telemetry.log import get_logger, shorten
from elastic.tuning.options import AgentOptions

if TYPE_CHECKING:
    from prometheus_client import Metric as Family


# ----------------------------------------------------------------------------
# ``/metrics``: a node's readings and counts in Prometheus' text format, by prometheus-client.
#
# The package is an extra, and imported by agents that serve a port.

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


# ----------------------------------------------------------------------------
# Passes events that torch's agent does not see to TorchElastic's metric and event handlers.
#
# Programs pass handlers to torch: ``torch.distributed.elastic.metrics.configure(handler)``, and
# ``LaunchConfig(event_log_handler=…)``. torch's agent puts its metrics and records its events
# there when it starts and ends workers. It does not see a recovery without a restart, so worlds,
# recoveries and failures of workers are put into the same group, and recorded at the same
# destination with the same metadata.
#
# Events wait until torch's agent next polls its workers, and are passed on by its thread, as its
# own are: a handler may be slow, and need not be thread-safe. With torch's default handlers, which
# do nothing, nothing is kept.

GROUP = "torchelastic"
MAX_PENDING = 1000
_LONGEST_ERROR = 4000  # characters

MetricValues = dict[str, int]  # by name, after `workers.ROLE.`


@dataclass(frozen=True, kw_only=True)
class TorchElasticOrigin:
    """The identity of metrics and events, in torch's terms."""

    run_id: str
    role: str
    hostname: str
    backend: str
    destination: str  # of events: LaunchConfig.event_log_handler


@dataclass(frozen=True, kw_only=True)
class _Status:
    """A worker's status in torch's terms."""

    state: str  # after `torchelastic.worker.status.`
    source: EventSource = EventSource.AGENT
    duration_s: float | None = None
    raw_error: str | None = None
    metadata: Mapping[str, object] = field(default_factory=dict)


class TorchElasticBridge:
    """The bridge. One per agent. Call ``on_event`` on any thread, ``flush`` on torch's agent
    thread."""

    def __init__(self, origin: TorchElasticOrigin, clock: Clock = SYSTEM_CLOCK) -> None:
        self._origin = origin
        self._clock = clock
        self._pending: deque[tuple[Event, float]] = deque(maxlen=MAX_PENDING)

    @property
    def is_configured(self) -> bool:
        """Whether any of torch's handlers is not a no-op."""
        return _puts_metrics() or self._records_events()

    def on_event(self, event: Event) -> None:
        """Keep an event until :meth:`flush`, if a handler needs it."""
        if type(event) in REPORTED and self.is_configured:
            self._pending.append((event, self._clock.wall()))

    def flush(self) -> None:
        """Pass on events since the last call. An event is lost if its handler raises."""
        while self._pending:
            event, time_s = self._pending.popleft()
            try:
                self._pass_on(event, time_s)
            except Exception as error:  # noqa: BLE001 - telemetry must not stop training
                get_logger().warning(
                    "a handler of torch.distributed.elastic failed on %s: %r",
                    kebab_name(event),
                    error,
                )

    def _pass_on(self, event: Event, time_s: float) -> None:
        if _puts_metrics():
            for name, value in metric_values(event).items():
                put_metric(f"workers.{self._origin.role}.{name}", value, GROUP)
        status = _status(event)
        if status is not None and self._records_events():
            record(self._torch_event(status, time_s), self._origin.destination)

    def _torch_event(self, status: _Status, time_s: float) -> TorchEvent:
        """An event with the same metadata as torch's (torch 2.13, elastic/agent/server/api.py)."""
        duration_s = status.duration_s
        metadata: dict[str, EventMetadataValue] = {
            "run_id": self._origin.run_id,
            "global_rank": None,
            "group_rank": None,
            "worker_id": None,
            "role": self._origin.role,
            "hostname": self._origin.hostname,
            "state": status.state,
            "total_run_time": None,
            "rdzv_backend": self._origin.backend,
            "raw_error": status.raw_error,
            "metadata": json.dumps(status.metadata),
            "agent_restarts": None,
            "duration_ms": None if duration_s is None else duration_s * 1000,
        }
        name = f"torchelastic.worker.status.{status.state}"
        return TorchEvent(name, status.source, int(time_s * 1000), metadata)

    def _records_events(self) -> bool:
        handler = get_logging_handler(self._origin.destination)
        return not isinstance(handler, logging.NullHandler)


def _puts_metrics() -> bool:
    return not isinstance(getStream(GROUP).handler, NullMetricHandler)


# Metrics, after `workers.ROLE.`, and torch's status of each event.
REPORTED: Mapping[type[Event], tuple[tuple[str, ...], str | None]] = MappingProxyType(
    {
        WorldEntered: (("generation", "world_size"), "WORLD_ENTERED"),
        Recovered: (("recovery.success", "recovery.duration.ms"), "RECOVERED"),
        CheckpointSaved: (("checkpoint.success", "checkpoint.duration.ms"), None),
        WorkerDied: (("worker_failed",), "FAILED"),
        WorkerReplaced: (("worker_replaced",), "REPLACED"),
        FailureJudged: (("failure.ACTION",), "JUDGED"),
        HangFound: (("hang",), "HUNG"),
    }
)


def metric_values(event: Event) -> MetricValues:
    """The metrics for an event."""
    names, _ = REPORTED[type(event)]
    match event:
        case WorldEntered():
            values = (event.generation, event.size)
        case Recovered() | CheckpointSaved():
            values = (1, int(event.duration_s * 1000))
        case FailureJudged():
            return {names[0].replace("ACTION", event.action): 1}
        case _:
            return dict.fromkeys(names, 1)
    return dict(zip(names, values, strict=True))


def _status(event: Event) -> _Status | None:
    match event:
        case WorldEntered(generation=generation, first_rank=rank, size=size):
            about = {"generation": generation, "first_rank": rank, "world_size": size}
            return _Status(state="WORLD_ENTERED", metadata=about)
        case Recovered(generation=generation, step=step, duration_s=duration_s):
            about = {"generation": generation, "step": step}
            return _Status(state="RECOVERED", duration_s=duration_s, metadata=about)
        case WorkerDied(reason=reason):
            return _of_worker("FAILED", event, shorten(reason, _LONGEST_ERROR))
        case WorkerReplaced():
            return _of_worker("REPLACED", event)
        case HangFound(kind=kind, action=action, ranks=ranks):
            error = shorten(event.reason, _LONGEST_ERROR)
            hang = {"kind": kind, "action": action, "ranks": ranks}
            return _Status(state="HUNG", raw_error=error, metadata=hang)
        case FailureJudged(rule=rule, action=action, failed=failed):
            error = shorten(event.reason, _LONGEST_ERROR)
            verdict = {"rule": rule, "action": action, "node": failed}
            return _Status(state="JUDGED", raw_error=error, metadata=verdict)
    return None


def _of_worker(
    state: str, event: WorkerDied | WorkerReplaced, raw_error: str | None = None
) -> _Status:
    about = {"local_rank": event.local_rank, "worker_pid": event.pid}
    return _Status(state=state, source=EventSource.WORKER, raw_error=raw_error, metadata=about)


# ----------------------------------------------------------------------------
# Assembles the metrics of one launch: the counters and their subscribers.


def metrics_of(
    options: AgentOptions,
    journal: Journal,
    origin: TorchElasticOrigin,
    env: Mapping[str, str] = os.environ,
) -> tuple[NodeMetrics, TorchElasticBridge]:
    """Count the events of the journal. Workers send their part only if there is a reader of
    metrics: a scraper, a collector, or torch's handlers. Raises ConfigError."""
    bridge = TorchElasticBridge(origin)
    is_scraped = options.health_port is not None and load()
    is_read = otlp.is_wanted(env) or is_scraped or bridge.is_configured
    metrics = NodeMetrics(
        SYSTEM_CLOCK,
        collects_worker_events=is_read,
        listener=bridge.on_event,
    )
    journal.listen(metrics.on_event)
    journal.listen(bridge.on_event)
    return metrics, bridge


def otlp_export_of(
    readings: NodeReadings, run_id: str, node: str, env: Mapping[str, str] = os.environ
) -> OtlpExport | None:
    """A started exporter if ``ELASTIC_OTEL=on``; the caller closes it. Raises ConfigError."""
    if not otlp.is_wanted(env):
        return None
    export = OtlpExport(readings, run_id=run_id, node=node, env=env)
    export.start()
    return export
