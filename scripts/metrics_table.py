"""Write docs/metrics.md: every metric that an agent exports.

python scripts/metrics_table.py          # write the page

What it says is in elastic/agent/metrics.py. The alerts are those of
deploy/components/monitoring/alerts/rules.yaml.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import yaml

from elastic.agent import exporters
from elastic.agent.exporters import NEEDS_EXTRA
from elastic.agent.metrics import (
    COMMON_LABELS,
    MAX_SERIES,
    METRICS,
    Metric,
    MetricKind,
    MetricSource,
)
from elastic.agent.otlp import (
    OTLP_CLOSE_S,
    OTLP_EXPORT_S,
)
from elastic.telemetry.journal import kebab_name
from elastic.tuning.intervals import (
    STEP_TIMES_S,
)

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "metrics.md"
RULES = ROOT / "deploy" / "components" / "monitoring" / "alerts" / "rules.yaml"

INTRODUCTION = f"""\
<!-- Written by scripts/metrics_table.py from elastic/agent/metrics.py: edit that. -->
# Metrics

Every agent serves the metrics of its node at `/metrics`, on the port of its probes:

```
pip install 'torch-elastic-harness[metrics]'
ELASTIC_HEALTH_PORT=8471 elastic run --nnodes=1 train.py
curl -s localhost:8471/metrics
```

There is one port per node, for any number of workers, and none without
`ELASTIC_HEALTH_PORT`. Without prometheus-client the agent runs as usual, and `/metrics` answers
501: {NEEDS_EXTRA}. On Kubernetes the images have it, and `--with monitoring` adds a PodMonitor,
alerts and a dashboard: [the runbook](../deploy/options.md#monitoring).

A scrape reads copies and takes no lock, so an agent whose threads hang still responds. Workers do
no additional work per step: they send their agent the same data that they write into the
[journal](reference/events.md), one message every {STEP_TIMES_S:g} s and one for each checkpoint
and recovery.

Counters start at 0 with each agent: use `rate()` and `increase()`. Metrics that only the
leader exports move with it: sum over nodes. Data that a killed worker had not sent, at most
{STEP_TIMES_S:g} s, is missing. A counter cannot be decremented: `elastic report` also excludes the
steps that were discarded later, and is exact.

## Labels

Every series has `run_id` and `node`. No series has a rank or a pid: counters are sums over the
workers of a node. A metric has at most {MAX_SERIES} series on a node; further ones are counted
as `other`. Values are printable, and have at most 100 characters.
"""

SECTIONS = {
    MetricSource.AGENT: "Of every node",
    MetricSource.WORKERS: "Of nodes whose workers have called `elastic.join()`",
    MetricSource.LEADER: "Of the leader",
}
_NOTES = {
    MetricSource.AGENT: "",
    MetricSource.WORKERS: "",
    MetricSource.LEADER: "Other nodes export the counters as 0. `elastic_nodes` is missing while "
    "there is no leader.\n\n",
}


OPENTELEMETRY = f"""
## OpenTelemetry

The same metrics, under the same names, can be sent to an OpenTelemetry collector by OTLP over HTTP.
It is off by default; enable it for the agents:

```
pip install 'torch-elastic-harness[otel]'
ELASTIC_OTEL=on OTEL_EXPORTER_OTLP_ENDPOINT=http://collector:4318 elastic run --nnodes=1 train.py
```

`ELASTIC_HEALTH_PORT` and prometheus-client are not needed for it. A thread of the agent sends them
every {OTLP_EXPORT_S:g} s; workers send nothing. The standard variables configure it:

- `OTEL_EXPORTER_OTLP_ENDPOINT` or `…_METRICS_ENDPOINT`: by default `http://localhost:4318`;
- `OTEL_EXPORTER_OTLP_HEADERS`, `…_CERTIFICATE`, `…_CLIENT_KEY`, `…_TIMEOUT`, `…_COMPRESSION`;
- `OTEL_METRIC_EXPORT_INTERVAL`: milliseconds between two requests;
- `OTEL_SERVICE_NAME`, `OTEL_RESOURCE_ATTRIBUTES`: of the resource, by default
  `service.name=torch-elastic-harness` and the node's name as `service.instance.id`;
- `OTEL_EXPORTER_OTLP_PROTOCOL`: `http/protobuf`; any other is refused.

Counters are cumulative sums. Histograms are exported as such; a summary becomes a histogram without
bounds, so it has the same `_count` and `_sum`. Metrics have no unit, since collectors would append
it to names that already contain it. If the collector is unreachable, the agent logs this once and
keeps retrying; nothing else changes. A terminating agent exports once more, and waits for that at
most {OTLP_CLOSE_S:g} s.
"""

TORCHELASTIC = """
## TorchElastic's own handlers

A program may configure torch's handlers, with
`torch.distributed.elastic.metrics.configure(handler)` before it launches, or with `torchrun
--event-log-handler=NAME`. They also receive what torch's agent does not observe: it only counts
restarts, and an in-process recovery is not a restart. The thread of torch's agent calls them when
it polls its workers: a slow handler delays only that thread, as under torchrun's own backends. With
torch's default handlers nothing is kept. Metrics are in torch's group, `torchelastic`; events have
torch's metadata.

| event | metrics, each `workers.ROLE.…` | recorded as `torchelastic.worker.status.…` |
|---|---|---|
"""


def page() -> str:
    """The whole page."""
    return INTRODUCTION + "".join(
        [*_metrics(), *_alerts(), OPENTELEMETRY, TORCHELASTIC, *_torchelastic()]
    )


def _torchelastic() -> Iterator[str]:
    for kind, (names, state) in exporters.REPORTED.items():
        put = ", ".join(f"`{name}`" for name in names)
        recorded = f"`{state}`" if state else ""
        name = kebab_name(kind)
        yield f"| [`{name}`](reference/events.md#{name}) | {put} | {recorded} |\n"


def _metrics() -> Iterator[str]:
    assert COMMON_LABELS == ("run_id", "node")
    for source, title in SECTIONS.items():
        yield f"\n## {title}\n\n{_NOTES[source]}"
        yield "| metric | kind | labels | meaning |\n|---|---|---|---|\n"
        for metric in METRICS:
            if metric.source is source:
                yield (
                    f"| {_name(metric)} | {metric.kind.value} | {_labels(metric)} "
                    f"| {metric.meaning} |\n"
                )


def _name(metric: Metric) -> str:
    if metric.kind in (MetricKind.SUMMARY, MetricKind.HISTOGRAM):
        return "<br>".join(f"`{name}`" for name in metric.sample_names)
    return f"`{metric.name}`"


def _labels(metric: Metric) -> str:
    values = metric.values or ((),) * len(metric.labels)
    return "<br>".join(
        f"`{name}`: {', '.join(known)}" if known else f"`{name}`"
        for name, known in zip(metric.labels, values, strict=True)
    )


def _alerts() -> Iterator[str]:
    rules = yaml.safe_load(RULES.read_text())
    yield "\n## Alerts\n\nOf `--with monitoring`; thresholds are meant to be changed.\n\n"
    yield "| alert | severity | after | meaning |\n|---|---|---|---|\n"
    for group in rules["spec"]["groups"]:
        for rule in group["rules"]:
            yield (
                f"| {rule['alert']} | {rule['labels']['severity']} | {rule.get('for', 'at once')} "
                f"| {rule['annotations']['summary']} |\n"
            )


if __name__ == "__main__":
    PAGE.write_text(page())
