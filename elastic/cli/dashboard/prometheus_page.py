"""``/metrics`` of the dashboard: the job as a whole, as gauges (prometheus-client).

Agents serve metrics per node; these describe the job and end with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from elastic.cli.dashboard.feed.snapshot import UNKNOWN, JobSnapshot
from elastic.cli.observe.job_view import JobCondition
from elastic.cli.observe.printable import printable


@dataclass(frozen=True)
class JobGauge:
    """A metric and its samples: one per value of its only label, or one without a label."""

    name: str
    help: str
    label: str
    samples: tuple[tuple[str, float], ...]


def gauges_of(snapshot: JobSnapshot) -> Iterator[JobGauge]:
    """All metrics; an unknown number has no sample."""
    view = snapshot.view
    progress = view.progress if view is not None else None
    states = [*(condition.value for condition in JobCondition), UNKNOWN]
    yield JobGauge(
        "elastic_job_state",
        "1 for the job's current state, else 0",
        "state",
        tuple((state, float(state == snapshot.state)) for state in states),
    )
    world = view.world if view is not None else None
    yield _one("generation", "Generation of the newest world", world.generation if world else None)
    yield _one("step", "Steps committed", view.step if view else None)
    planned = progress.planned_steps if progress else None
    yield _one("planned_steps", "Total number of steps planned by the script", planned)
    rate = view.steps_per_s if view else None
    yield _one("steps_per_second", "Step rate while the job trains", rate)
    yield _one("eta_seconds", "Time until the last planned step", view.eta_s if view else None)
    yield _one("goodput_ratio", "Fraction of time spent in steps that count", _goodput(snapshot))
    saved = progress.checkpoint_step if progress else None
    yield _one("checkpoint_step", "Step of the last committed checkpoint", saved)
    age_s = view.checkpoint_age_s if view else None
    yield _one("checkpoint_age_seconds", "Age of the last committed checkpoint", age_s)
    states_of_nodes = Counter(node.state.value for node in (view.nodes if view else ()))
    yield JobGauge(
        "elastic_job_nodes",
        "Live nodes, by state",
        "state",
        tuple((state, float(count)) for state, count in sorted(states_of_nodes.items())),
    )
    yield _one("etcd_up", "0 while etcd does not answer the dashboard", float(not snapshot.outage))
    view_age_s = snapshot.at_s - view.at_s if view is not None else None
    yield _one("view_age_seconds", "Time since etcd last answered", view_age_s)


def _one(name: str, help: str, value: float | None) -> JobGauge:
    samples = () if value is None else (("", float(value)),)
    return JobGauge(f"elastic_job_{name}", f"{help}.", "", samples)


def _goodput(snapshot: JobSnapshot) -> float | None:
    if snapshot.charts is not None and snapshot.charts.goodput is not None:
        return snapshot.charts.goodput
    return snapshot.view.goodput if snapshot.view is not None else None


def exposition(snapshot: JobSnapshot) -> tuple[bytes, str]:
    """The page and its content type. Raises ImportError without prometheus-client."""
    from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Gauge, generate_latest

    registry = CollectorRegistry()
    run_id = printable(snapshot.run_id, 100)
    for gauge in gauges_of(snapshot):
        labels = ("run_id", gauge.label) if gauge.label else ("run_id",)
        metric = Gauge(gauge.name, gauge.help, labels, registry=registry)
        for value, number in gauge.samples:
            values = (run_id, value) if gauge.label else (run_id,)
            metric.labels(*values).set(number)
    return generate_latest(registry), CONTENT_TYPE_LATEST
