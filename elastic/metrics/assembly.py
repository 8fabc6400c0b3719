"""Assembles the metrics of one launch: the counters and their subscribers."""

from __future__ import annotations

import os
from collections.abc import Mapping

from elastic.clock import SYSTEM_CLOCK
from elastic.metrics import otlp, page
from elastic.metrics.counting import NodeMetrics
from elastic.metrics.otlp import OtlpExport
from elastic.metrics.readings import NodeReadings
from elastic.metrics.torchelastic import TorchElasticBridge, TorchElasticOrigin
from elastic.telemetry.journal import Journal
from elastic.tuning.agent_options import AgentOptions


def metrics_of(
    options: AgentOptions,
    journal: Journal,
    origin: TorchElasticOrigin,
    env: Mapping[str, str] = os.environ,
) -> tuple[NodeMetrics, TorchElasticBridge]:
    """Count the events of the journal. Workers send their part only if there is a reader of
    metrics: a scraper, a collector, or torch's handlers. Raises ConfigError."""
    bridge = TorchElasticBridge(origin)
    is_scraped = options.health_port is not None and page.load()
    is_read = otlp.is_wanted(env) or is_scraped or bridge.is_configured
    metrics = NodeMetrics(
        SYSTEM_CLOCK,
        collects_worker_events=options.mode == "in-process" and is_read,
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
