"""Export of a node's metrics by OTLP to a collector on loopback; off by default."""

from __future__ import annotations

import itertools
import logging
import queue
import sys
import threading
from collections.abc import Iterator

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from otlp_collector import OtlpCollector, attributes_of, families_of
from test_metrics import ScrapedNode, Series, busy

from elastic.agent import exporters, otlp
from elastic.agent.metrics import METRICS, MetricKind
from elastic.agent.otlp import (
    OTLP_EXPORT_S,
    OtlpExport,
    interval_s,
    is_wanted,
)
from elastic.errors import ConfigError
from elastic.telemetry.log import get_logger

DEADLINE_S = 60.0
ON = {"ELASTIC_OTEL": "on"}


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[OtlpCollector]:
    made = OtlpCollector()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", made.url)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-key=secret")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "team=vision")
    yield made
    made.close()


def next_of(collector: OtlpCollector) -> ExportMetricsServiceRequest:
    request = collector.requests.get(timeout=DEADLINE_S)
    assert (request.path, request.key) == ("/v1/metrics", "secret")
    return request.metrics


@pytest.fixture
def messages() -> Iterator[list[str]]:
    """The messages that this library logs."""
    lines: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(self.format(record))

    handler = Kept()
    get_logger().addHandler(handler)
    yield lines
    get_logger().removeHandler(handler)


def series_of(request: ExportMetricsServiceRequest) -> Series:
    """The series as a collector writes them for Prometheus, without the common labels."""
    found: Series = {}

    def put(name: str, labels: dict[str, str], value: float) -> None:
        found[name, tuple(sorted(labels.items()))] = value

    for name, metric in families_of(request).items():
        data = getattr(metric, metric.WhichOneof("data"))
        for point in data.data_points:
            labels = attributes_of(point.attributes)
            assert (labels.pop("run_id"), labels.pop("node")) == ("llama-7", "n1")
            begins_ns = point.start_time_unix_nano  # cumulative points have a start time
            assert metric.WhichOneof("data") == "gauge" or 0 < begins_ns <= point.time_unix_nano
            if metric.WhichOneof("data") != "histogram":
                put(name, labels, point.as_double)
                continue
            assert len(point.bucket_counts) == len(point.explicit_bounds) + 1
            assert not point.HasField("min")
            put(f"{name}_count", labels, point.count)
            put(f"{name}_sum", labels, point.sum)
            bounds = [*map(str, point.explicit_bounds), "+Inf"] if point.explicit_bounds else []
            counts = itertools.accumulate(point.bucket_counts)
            for bound, count in zip(bounds, counts, strict=False):
                put(f"{name}_bucket", {**labels, "le": bound}, count)
    return found


def without_ages(series: Series) -> Series:
    """The series that do not change with time alone."""
    return {k: v for k, v in series.items() if "_age_" not in k[0] and "silence" not in k[0]}


def test_a_collector_receives_the_series_of_a_scrape(collector: OtlpCollector) -> None:
    scraped = busy(ScrapedNode())
    env = {**ON, "OTEL_METRIC_EXPORT_INTERVAL": "50"}
    export = exporters.otlp_export_of(scraped.readings, "llama-7", "n1", env)
    assert export is not None
    request = next_of(collector)
    assert without_ages(series_of(request)) == without_ages(scraped.scrape())
    assert set(series_of(request)) == set(scraped.scrape())
    families = families_of(request)
    for metric in METRICS:
        family = families[metric.name]
        kind = {MetricKind.GAUGE: "gauge", MetricKind.COUNTER: "sum"}.get(metric.kind, "histogram")
        assert (family.description, family.unit) == (metric.meaning, "")
        assert family.WhichOneof("data") == kind
        if kind == "sum":
            assert family.sum.is_monotonic and family.sum.aggregation_temporality == 2
    (resource,) = request.resource_metrics
    found = attributes_of(resource.resource.attributes)
    assert found["service.name"] == "torch-elastic-harness"
    assert (found["service.instance.id"], found["team"]) == ("n1", "vision")
    next_of(collector)  # again and again
    export.close()
    export.close()
    assert not [t for t in threading.enumerate() if t.name == "elastic-otlp"]


def test_an_unavailable_collector_is_logged_once_and_retried(messages: list[str]) -> None:
    answers: queue.SimpleQueue[bool] = queue.SimpleQueue()
    done = threading.Event()

    def send(data: object) -> bool:
        if not answers.empty():
            return answers.get()
        done.set()
        return False

    env = {**ON, "OTEL_METRIC_EXPORT_INTERVAL": "1"}
    export = OtlpExport(ScrapedNode().readings, run_id="r", node="n", env=env, send=send)
    for answer in (False, False, False, True, False, False):
        answers.put(answer)
    export.start()
    assert done.wait(DEADLINE_S)
    export.close()
    away, back, again = messages
    assert "trying again every 0.001 s" in away and again == away
    assert back == "OTLP: the collector accepts metrics again"
    assert not [t for t in threading.enumerate() if t.name == "elastic-otlp"]


def test_a_missing_endpoint_is_logged_once(
    collector: OtlpCollector, messages: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """The SDK would log several lines per interval; this library logs one."""
    collector.status = 404
    env = {**ON, "OTEL_METRIC_EXPORT_INTERVAL": "5"}
    export = OtlpExport(ScrapedNode().readings, run_id="llama-7", node="n1", env=env)
    export.start()
    for _ in range(3):
        next_of(collector)
    export.close()
    assert [r for r in caplog.records if r.name.startswith("opentelemetry")] == []
    assert len(messages) == 1


def test_an_internal_error_ends_only_the_export(messages: list[str]) -> None:
    def send(data: object) -> bool:
        raise RuntimeError("boom")

    env = {**ON, "OTEL_METRIC_EXPORT_INTERVAL": "1"}
    export = OtlpExport(ScrapedNode().readings, run_id="r", node="n", env=env, send=send)
    export.start()
    export._thread.join(DEADLINE_S)
    export.close()
    (said,) = messages
    assert "this node no longer exports metrics" in said and "boom" in said


def test_the_export_is_off_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:4318"}
    assert not is_wanted({}) and not is_wanted({"ELASTIC_OTEL": "off", **endpoint})
    assert not is_wanted(endpoint), "a pod may have them for other programs"
    assert is_wanted(ON)
    assert exporters.otlp_export_of(ScrapedNode().readings, "r", "n", endpoint) is None
    assert interval_s({}) == OTLP_EXPORT_S
    assert interval_s({"OTEL_METRIC_EXPORT_INTERVAL": "2500"}) == 2.5
    for name in ("opentelemetry.sdk", "opentelemetry"):
        with monkeypatch.context() as without:
            without.setitem(sys.modules, name, None)
            without.setattr(otlp, "find_spec", _find_spec_without_modules)
            with pytest.raises(ConfigError, match="not installed on this node") as refused:
                is_wanted(ON)
            assert "torch-elastic-harness[otel]" in str(refused.value.hint)


def _find_spec_without_modules(name: str) -> object:
    """Behave like importlib if the package is not installed."""
    if sys.modules.get("opentelemetry", 0) is None:
        raise ModuleNotFoundError(name)
    return None if sys.modules.get(name, 0) is None else object()


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"ELASTIC_OTEL": "yes"}, "ELASTIC_OTEL=yes"),
        ({**ON, "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "OTLP by grpc"),
        (
            {
                **ON,
                "OTEL_EXPORTER_OTLP_METRICS_PROTOCOL": "http/json",
                "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
            },
            "OTLP by http/json",
        ),
        ({**ON, "OTEL_METRIC_EXPORT_INTERVAL": "soon"}, "OTEL_METRIC_EXPORT_INTERVAL=soon"),
        ({**ON, "OTEL_METRIC_EXPORT_INTERVAL": "0"}, "OTEL_METRIC_EXPORT_INTERVAL=0"),
    ],
)
def test_invalid_settings_are_rejected(env: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        is_wanted(env)
