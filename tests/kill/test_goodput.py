"""Goodput of a real run, from its journals alone: every second is accounted for, with kills."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from otlp_collector import OtlpCollector, attributes_of, families_of
from prometheus_client.parser import text_string_to_metric_families
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from training_job import TrainingJob, Workload

from elastic.agent.metrics import METRICS
from elastic.cli.view import JobCondition, JobView, read_job, sentence
from elastic.report.model import report_of
from elastic.store.embedded import EmbeddedEtcd
from elastic.telemetry.goodput import Activity, goodput_of_run
from elastic.telemetry.reader import merge, read_folder, run_of
from elastic.testing.node import LocalNode
from elastic.testing.slowness import is_within
from elastic.testing.waiting import PATIENCE_S

WORKLOAD = Workload(epochs=4, step_s=0.3)
# The time that may be unaccounted for on an idle machine: a killed worker has not logged its last
# window.
UNREPORTED_S = 12.0


def elastic(job: TrainingJob, command: str, *argv: str) -> list[str]:
    """The command line of the tool for this job."""
    where = (f"--rdzv-endpoint={job.endpoints[0]}", f"--rdzv-id={job.run_id}")
    return [sys.executable, "-m", "elastic.cli.main", command, *where, *argv]


@contextlib.contextmanager
def waiting_for_the_end(job: TrainingJob, output: Path) -> Iterator[subprocess.Popen[bytes]]:
    """`elastic wait`, until the job is done or the test is."""
    command = elastic(job, "wait", "--for=done", "--timeout=1h")
    with output.open("wb") as file, subprocess.Popen(command, stdout=file) as process:
        try:
            yield process
        finally:
            process.kill()


def status(job: TrainingJob) -> JobView:
    return read_job(job.store, job.keys, time.time())


def trains(job: TrainingJob, nodes: int) -> JobView | None:
    """The output of `elastic status`, once this number of nodes train."""
    view = status(job)
    is_whole = view.state is JobCondition.TRAINING and len(view.training) == nodes
    return view if is_whole else None


def hears(job: TrainingJob, nodes: int) -> bool:
    """Whether the leader has recent heartbeats of this number of nodes, with their steps."""
    view = status(job)
    heartbeat = [view.heartbeat_of(node) for node in view.nodes]
    is_heard = all(sign.age_s is not None and not sign.is_late for sign in heartbeat)
    knows_steps = all((sign.step or 0) > 10 for sign in heartbeat) and view.eta_s is not None
    return len(heartbeat) == nodes and is_heard and knows_steps


def assert_a_recovery_prints_three_lines(
    survivors: list[LocalNode], killed: datetime, mode: str, worlds: int
) -> None:
    """The lost node with the reason, the new world, and the cost; in the logs of all nodes."""
    logs = [node.log_text() for node in survivors]
    assert not any("Traceback" in log or "Exception ignored" in log for log in logs)
    ours = re.compile(r"(\S+Z) \w+ +\[[^]]*\] (.*)")
    since = killed.strftime("%Y-%m-%dT%H:%M:%S.%f")
    lines = [m.groups() for log in logs for m in map(ours.match, log.splitlines()) if m]
    # Training continues, a worker may fail before its agent knows the new world, a busy machine may
    # cause further failures, and another node may now be the first, which logs the meaning of
    # restarts.
    beside = (
        *(
            "checkpoint-",
            "step ",
            "job-ended",
            "node-arrived",
            "worker-died",
            "waiting",
            "what happened:",
        ),
        "mode=restart:",
        *("node-suspected", "store-problem", "lease-lost", "straggler-", "run.log", "training"),
    )
    said = [text for at, text in sorted(lines) if at > since and not text.startswith(beside)]
    cost = "recovered" if mode == "in-process" else "state-restored"
    assert {text.split()[0] for text in said} == {"node-lost", "world-formed", cost}, said
    assert len(said) <= 1 + 2 * worlds, said


def traces(folder: Path) -> list[str]:
    """Names of the complete traces that workers wrote for `elastic profile`."""
    found = []
    for path in (folder / "journal" / "profiles").glob("g*.pt.trace.json"):
        with contextlib.suppress(ValueError):
            assert json.loads(path.read_text())["traceEvents"]
            found.append(path.name)
    return found


def assert_each_step_is_logged_once(folder: Path) -> None:
    """Whichever process was rank 0: no step is missing or repeated."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    steps = [scalar.step for scalar in events.Scalars("loss")]
    assert steps == list(range(1, WORKLOAD.steps + 1))


def scrape(port: int) -> str | None:
    """The metrics page; None if a busy machine did not answer within the server's two seconds."""
    try:
        with urllib.request.urlopen(
            f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE_S
        ) as answer:
            return str(answer.read().decode())
    except (OSError, http.client.HTTPException):
        return None


def metric(job: TrainingJob, node: str, name: str, **labels: str) -> float | None:
    """One series of a node, scraped now."""
    served = job.wait_event("health-served", lambda e: bool(e["node"] == node))
    port = served["port"]
    page = job.wait_for(partial(scrape, port), PATIENCE_S, f"an answer of {node}")
    families = list(text_string_to_metric_families(page))
    common = {"run_id": job.run_id, "node": node}
    found = [
        sample.value
        for family in families
        for sample in family.samples
        if sample.name == name and sample.labels == {**common, **labels}
    ]
    return found[0] if found else None


def wait_metric(
    job: TrainingJob, node: str, name: str, accepts: Callable[[float], bool], **labels: str
) -> None:
    """Wait until one series of a node has such a value: reports of workers reach agents with a
    delay.
    """

    def is_there() -> bool:
        value = metric(job, node, name, **labels)
        return value is not None and accepts(value)

    job.wait_for(is_there, PATIENCE_S, f"{name} of {node}")


def check_metrics_before(job: TrainingJob) -> None:
    """Agents are scraped, and workers report without a restart in between."""
    names = ("node0", "node1", "node2")
    assert sum(metric(job, node, "elastic_leader") or 0 for node in names) == 1
    for node in names:
        wait_metric(job, node, "elastic_generation", float(job.generation()).__eq__)
        wait_metric(job, node, "elastic_world_nodes", (3.0).__eq__)
        wait_metric(job, node, "elastic_etcd_up", (1.0).__eq__)
        wait_metric(job, node, "elastic_etcd_request_seconds_count", bool, operation="put")
        wait_metric(job, node, "elastic_steps_committed_total", bool)
        wait_metric(job, node, "elastic_step_seconds_sum", WORKLOAD.step_s.__le__)


def check_metrics_after(job: TrainingJob, mode: str, generation: int) -> None:
    """Check the metrics after the kill of one node."""
    survivors = ("node0", "node1")
    for node in survivors:
        wait_metric(job, node, "elastic_generation", float(generation).__lt__)
        wait_metric(job, node, "elastic_world_nodes", (2.0).__eq__)
        if mode == "in-process":
            recovered = partial(total, job, (node,), "elastic_recoveries_total")
            job.wait_for(recovered, PATIENCE_S, f"the recovery of {node} in its metrics")
            wait_metric(job, node, "elastic_recovery_seconds_total", bool, phase="build")
    formed = partial(total, job, survivors, "elastic_worlds_formed_total")
    job.wait_for(formed, PATIENCE_S, "the world after the death in the metrics")
    states = ("WORLD_ENTERED", *(["RECOVERED"] if mode == "in-process" else []))
    for node in survivors:
        for state in states:
            said = partial(is_recorded, job, node, state)
            job.wait_for(said, PATIENCE_S, f"torch's event handler to hear of {state} on {node}")


def is_recorded(job: TrainingJob, node: str, state: str) -> bool | None:
    """Recorded by torch's own handler, the console."""
    name = f'"name": "torchelastic.worker.status.{state}"'
    return name in job.node(node).log_text() or None


def total(job: TrainingJob, nodes: tuple[str, ...], name: str) -> float:
    """The sum of a metric for the causes ``lost`` and ``failure``."""
    causes = ("lost", "failure")
    return sum(metric(job, node, name, cause=cause) or 0 for node in nodes for cause in causes)


@pytest.fixture
def collector() -> Iterator[OtlpCollector]:
    made = OtlpCollector()
    yield made
    made.close()


def otlp_settings(collector: OtlpCollector, mode: str) -> dict[str, str]:
    """Enabled in one of the two jobs; a pod may have the endpoint set for other programs."""
    endpoint = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
        "OTEL_METRIC_EXPORT_INTERVAL": "1000",
    }
    return {"ELASTIC_OTEL": "on", **endpoint} if mode == "in-process" else endpoint


class Collected:
    """The newest value of each series sent by agents."""

    def __init__(self, collector: OtlpCollector, run_id: str) -> None:
        self._collector = collector
        self._run_id = run_id
        self._values: dict[tuple[str, str, str], float] = {}  # by name, node and cause
        self.names: set[str] = set()

    def value(self, name: str, node: str, cause: str = "") -> float:
        """0 before it was sent."""
        for request in self._collector.taken():
            assert request.path == "/v1/metrics"
            for metric in families_of(request.metrics).values():
                self._take(metric)
        return self._values.get((name, node, cause), 0.0)

    def _take(self, metric: Any) -> None:
        self.names.add(metric.name)
        kind = metric.WhichOneof("data")
        for point in getattr(metric, kind).data_points:
            labels = attributes_of(point.attributes)
            assert labels["run_id"] == self._run_id
            number = point.sum if kind == "histogram" else point.as_double
            self._values[metric.name, labels["node"], labels.get("cause", "")] = number


def check_collector(job: TrainingJob, collected: Collected) -> None:
    """It receives the same values as a scrape from all nodes, and only documented names."""
    for node in ("node0", "node1", "node2"):
        for name in ("elastic_build_info", "elastic_steps_committed_total", "elastic_step_seconds"):
            sent = partial(collected.value, name, node)
            job.wait_for(sent, PATIENCE_S, f"{name} of {node} at the collector")
    assert collected.names <= {metric.name for metric in METRICS}


def has_recovered(collected: Collected) -> bool:
    """Whether the collector has received the recovery from the kill."""
    name = "elastic_recoveries_total"
    return any(collected.value(name, "node0", cause) for cause in ("lost", "failure"))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["in-process", "restart"])
def test_goodput_accounts_for_all_time_of_a_run_with_kills(
    etcd: EmbeddedEtcd, tmp_path: Path, collector: OtlpCollector, mode: str
) -> None:
    began_s = time.time()
    job = TrainingJob(
        [etcd.endpoint],
        tmp_path,
        workload=WORKLOAD,
        min_nodes=2,
        max_nodes=3,
        conf={"mode": mode, "health_port": 0},
    )
    # torch's own event handler: to stderr, which is the node's log.
    job.env["PET_EVENT_LOG_HANDLER"] = "console"
    job.env |= otlp_settings(collector, mode)
    collected = Collected(collector, job.run_id)
    with job, contextlib.ExitStack() as exits:
        nodes = job.bring_to(3)
        job.wait_progress(10)
        generation = job.generation()
        waiting = exits.enter_context(waiting_for_the_end(job, tmp_path / "waiting"))
        view = job.wait_for(lambda: trains(job, 3), PATIENCE_S, "status of three nodes")
        assert sentence(view).startswith(f"training in generation {generation} with 3 of 3 nodes")
        check_metrics_before(job)
        if mode == "in-process":
            check_collector(job, collected)
        said = subprocess.check_output(elastic(job, "profile", "--steps=2"), text=True)
        job.wait_for(lambda: len(traces(tmp_path)) == 3, PATIENCE_S, "three traces")
        assert said.startswith(
            f"requested traces of the next 2 steps from 3 ranks of generation {generation}:"
        )
        assert "the request has no effect" not in said
        killed = datetime.now(timezone.utc)
        nodes[2].kill()
        job.wait_training(nodes=2, after_generation=generation)
        view = job.wait_for(lambda: trains(job, 2), PATIENCE_S, "status of two nodes")
        assert "; node2 was lost " in sentence(view)
        job.wait_for(lambda: (status(job).step or 0) > 10 or None, PATIENCE_S, "the step")
        job.wait_for(lambda: hears(job, 2) or None, PATIENCE_S, "heartbeats of two nodes")
        job.wait_progress(5)
        check_metrics_after(job, mode, generation)
        if mode == "in-process":
            told = partial(has_recovered, collected)
            job.wait_for(told, PATIENCE_S, "the recovery at the collector")
        survivors = job.running
        job.hurry()
        job.wait_for(lambda: not job.running, PATIENCE_S, "the end of the job")
        assert [node.exit_code for node in survivors] == [0, 0]
        ledger = job.ledger()
        worlds = job.generation() - generation
        assert waiting.wait(PATIENCE_S) == 0
        assert (tmp_path / "waiting").read_text().startswith("succeeded")
        view = status(job)
        assert view.state is JobCondition.SUCCEEDED
    ended_s = time.time()
    if mode == "restart":
        assert not collector.taken(), "nothing is sent unless it is switched on"
    assert_a_recovery_prints_three_lines(survivors, killed, mode, worlds)
    assert_each_step_is_logged_once(tmp_path / "runs" / job.run_id)

    journal = merge(*read_folder(tmp_path / "journal"))
    found = goodput_of_run(run_of(journal))
    assert found.run_id == job.run_id
    assert {name.partition("-rank")[2] for name in traces(tmp_path)} == {
        f"{rank}.pt.trace.json" for rank in range(3)
    }
    # The total is the wall time of the job, and the parts add up to it: for the run and each node.
    assert began_s <= found.start_s < found.end_s <= ended_s + 0.1
    assert found.breakdown.total_s == pytest.approx(found.duration_s, rel=0.01)
    assert {node.node for node in found.nodes} == {"node0", "node1", "node2"}
    for node in found.nodes:
        assert node.breakdown.total_s == pytest.approx(node.end_s - node.start_s, rel=0.01)
    assert found.steps == WORKLOAD.steps
    if mode == "restart":  # it resumes from a checkpoint; in-process, the current step is lost
        assert found.recomputed_steps == ledger.recomputed_steps
    assert found.breakdown.seconds[Activity.PRODUCTIVE] > WORKLOAD.step_s * 10
    assert is_within(found.breakdown.seconds.get(Activity.UNREPORTED, 0.0), UNREPORTED_S)
    assert found.breakdown.seconds[Activity.STARTUP] > 0

    # A busy machine may have had a later one, too.
    (kill,) = [i for i in found.incidents if generation + 1 in i.generations]
    assert kill.cause not in ("first", "joined")
    assert kill.nodes == ("node0", "node1")
    assert "node2" in kill.reason
    assert 0 < kill.pause_s <= (kill.end_s - kill.start_s) * 1.01
    # Two of the three nodes paused, and none for longer than the pause. One whose workers restart
    # may have committed its last step before the other.
    pause_s = kill.end_s - kill.start_s if mode == "restart" else kill.pause_s
    assert kill.breakdown.total_s - kill.breakdown.seconds.get(Activity.RECOMPUTED, 0.0) <= (
        pause_s * 1.01
    )
    report = report_of(journal)
    (incident,) = [i for i in report.incidents if i.generations == kill.generations]
    (recorded,) = [b for b in view.breakages if b.generation == kill.generations[0] - 1]
    formed_s = {mark.generation: mark.at_s for mark in report.marks}
    # As etcd has it, and no later than the world that follows.
    for at_s in (incident.at_s, recorded.time_s):
        assert formed_s[generation] <= at_s <= formed_s[kill.generations[0]] + 0.1
    assert recorded.lost == ("node2",)
    assert report.goodput.recomputed_steps or not incident.recomputed_s
    assert any("node2" in note for note in found.notes)
