"""/metrics: what is counted, what a scrape shows, and that a scrape never blocks."""

from __future__ import annotations

import http.client
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from kit.manual_clock import ManualClock
from kit.membership_nodes import node, world
from prometheus_client.parser import text_string_to_metric_families

from elastic.agent import metrics as table
from elastic.agent.exporters import render
from elastic.agent.health import HealthServer
from elastic.agent.metrics import (
    COMMON_LABELS,
    MAX_SERIES,
    METRICS,
    OTHER,
    MetricKind,
    NodeMetrics,
    NodeReadings,
    Tally,
)
from elastic.agent.node import NodeStatus, WorldEntry
from elastic.errors import StoreUnreachable
from elastic.link.link import Heartbeat
from elastic.membership.records import Done, Keys, NodeState, Outcome, Stop, WorldRecord
from elastic.membership.view import StepRate
from elastic.telemetry.events import (
    CheckpointSaved,
    CheckpointSkipped,
    FailureJudged,
    HangFound,
    LeaseLost,
    NodeLost,
    NodeSuspected,
    RankTimes,
    Recovered,
    StragglerFound,
    WorkerDied,
    WorkerReplaced,
    WorkersStarting,
    WorldFormed,
)
from elastic.wire.messages import Cause, WorldState

SEVEN = replace(world("n1", "n2", "n3", mode="in-process"), cause=Cause.LOST)
IN_SEVEN = node("n1", NodeState.READY, in_process=True, running=SEVEN)
HOSTILE = 'a"} 1\nelastic_leader{x="\x1b[2J\ud800<script>' + "x" * 1_000_000
Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]

RECOVERED = Recovered(
    generation=7,
    step=10,
    duration_s=2.1,
    leave_s=0.1,
    wait_s=0.5,
    build_s=0.25,
    agree_s=0.75,
    paused_s=0.0,
    wrap_s=0.5,
)
SAVED = CheckpointSaved(name="step-10", step=10, duration_s=3.0, stall_s=0.5, bytes=1000)
WINDOW = RankTimes(
    generation=7,
    step=20,
    steps=10,
    duration_s=6.0,
    productive_s=4.0,
    data_s=1.0,
    checkpoint_s=0.5,
    evaluation_s=0.25,
    open_s=0.25,
    collective_s=1.0,
    ended="due",
)
STRAGGLER = StragglerFound(
    generation=7,
    rank=1,
    node="n2",
    cause="data wait",
    factor=2.0,
    z_score=9.0,
    windows=3,
    data_s=1.0,
    compute_s=1.0,
    collective_s=0.0,
    checkpoint_s=0.0,
    script_s=0.0,
    typical_data_s=0.1,
    typical_compute_s=1.0,
    lag_s=0.9,
    reason="slow",
)


class ScrapedNode:
    """A node's metrics on a manual clock."""

    def __init__(self, *, name: str = "n1", run_id: str = "llama-7") -> None:
        self.clock = ManualClock()
        self.status = NodeStatus(replace(IN_SEVEN, name=name), Keys.of("/elastic", "r"), 0.0)
        self.status.world_entry = WorldEntry(SEVEN, 1, 0.0)
        self.metrics = NodeMetrics(self.clock, collects_worker_events=True)
        self.states: dict[NodeState, int] | None = None
        self.name, self.run_id = name, run_id
        self.readings = NodeReadings(
            status=self.status,
            metrics=self.metrics,
            node_states=lambda: self.states,
            etcd_contact_age_s=lambda: 0.5,
        )

    def sends(self, pid: int, local_rank: int, *messages: object) -> None:
        for message in messages:
            self.metrics.on_worker_message(pid, local_rank, message, SEVEN)

    def text(self) -> str:
        answer = render(self.readings, run_id=self.run_id, node=self.name)
        assert answer.status == 200, answer.text
        return answer.body().decode()

    def scrape(self) -> Series:
        """Every series without the common labels, whose values are always the same."""
        found: Series = {}
        for family in text_string_to_metric_families(self.text()):
            for sample in family.samples:
                labels = {k: v for k, v in sample.labels.items() if k not in COMMON_LABELS}
                assert set(COMMON_LABELS) <= set(sample.labels), sample
                key = sample.name, tuple(sorted(labels.items()))
                assert key not in found, f"twice: {key}"
                found[key] = sample.value
        return found

    def value(self, name: str, **labels: str) -> float | None:
        return self.scrape().get((name, tuple(sorted(labels.items()))))


@pytest.fixture
def scraped() -> ScrapedNode:
    return ScrapedNode()


def busy(scraped: ScrapedNode) -> ScrapedNode:
    """A node on which every counted event has occurred once."""
    metrics, status = scraped.metrics, scraped.status
    for event in (
        WorldFormed(
            generation=7,
            nodes=("n1",),
            size=1,
            state="active",
            mode="in-process",
            cause="lost",
            reason="",
        ),
        FailureJudged(
            generation=6,
            failed="n2",
            action="exclude-node",
            rule="gpu-ecc",
            confidence="high",
            reason="",
            evidence="",
        ),
        HangFound(
            generation=7,
            action="kill",
            kind="absent",
            ranks=(1,),
            confidence="high",
            reason="",
            report="",
        ),
        STRAGGLER,
        WorkersStarting(),
        WorkerDied(pid=1, local_rank=0, reason=""),
        WorkerReplaced(local_rank=0, pid=2),
        NodeLost(lost="n4", reason=""),
        NodeSuspected(suspect="n4", reason=""),
        LeaseLost(consequence=""),
    ):
        metrics.on_event(event)
    metrics.on_etcd_call("put /elastic/r/nodes/n1", 0.003, False)
    metrics.on_etcd_call("get /elastic/r/world", 4.0, True)
    scraped.sends(2, 0, WINDOW, RECOVERED, SAVED, CheckpointSkipped(name="step-15", reason="full"))
    status.step_rate = StepRate(7, 20, 0.5, 0.0)
    status.watchdog.heartbeat()
    scraped.states = {NodeState.READY: 2, NodeState.LEAVING: 1}
    return scraped


# The table --------------------------------------------------------------------------------------


def test_a_scrape_of_a_busy_leader_has_all_metrics_of_the_table(scraped: ScrapedNode) -> None:
    shown: dict[str, set[str]] = {}
    for name, labels in busy(scraped).scrape():
        shown.setdefault(name, set()).update(label for label, _ in labels if label != "le")
    listed = {name: set(metric.labels) for metric in METRICS for name in metric.sample_names}
    assert shown == listed


def test_help_and_type_of_every_family_match_the_table(scraped: ScrapedNode) -> None:
    families = {f.name: f for f in text_string_to_metric_families(busy(scraped).text())}
    for metric in METRICS:
        family = families[metric.name.removesuffix("_total")]
        assert (family.documentation, family.type) == (metric.meaning, metric.kind.value)


def test_a_new_node_exposes_counters_of_0(scraped: ScrapedNode) -> None:
    """Prometheus sees no increase in a series that did not exist before."""
    shown = scraped.scrape()
    for metric in METRICS:
        for values in metric.initial_series if metric.kind is MetricKind.COUNTER else ():
            labels = tuple(sorted(zip(metric.labels, values, strict=True)))
            assert shown[metric.name, labels] == 0.0
    assert shown["elastic_recoveries_total", (("cause", "lost"),)] == 0.0


def test_an_agent_without_messages_of_workers_has_no_worker_counters() -> None:
    """They would show a job without progress."""
    scraped = ScrapedNode()
    scraped.metrics.collects_worker_events = False
    assert scraped.value("elastic_steps_committed_total") is None
    assert scraped.value("elastic_worker_deaths_total") == 0.0


# The world --------------------------------------------------------------------------------------


def test_the_world_and_the_nodes_role_are_shown(scraped: ScrapedNode) -> None:
    assert scraped.value("elastic_generation") == SEVEN.generation
    assert scraped.value("elastic_world_nodes") == 3
    assert scraped.value("elastic_world_size") == SEVEN.size
    assert (scraped.value("elastic_min_nodes"), scraped.value("elastic_max_nodes")) == (2, 4)
    assert (scraped.value("elastic_in_world"), scraped.value("elastic_world_paused")) == (1, 0)
    assert scraped.value("elastic_node_state", state="ready") == 1
    assert scraped.value("elastic_node_state", state="leaving") == 0
    paused: WorldRecord = replace(SEVEN, state=WorldState.PAUSED)
    scraped.status.world_entry = WorldEntry(paused, 2, 0.0)
    assert scraped.value("elastic_world_paused") == 1
    scraped.status.world_entry = WorldEntry(None, 0, 0.0)
    assert scraped.value("elastic_generation") is None


def test_only_the_leader_counts_nodes(scraped: ScrapedNode) -> None:
    assert scraped.value("elastic_leader") == 0
    assert scraped.value("elastic_nodes", state="ready") is None
    scraped.states = {NodeState.READY: 2}
    assert scraped.value("elastic_leader") == 1
    assert scraped.value("elastic_nodes", state="ready") == 2
    assert scraped.value("elastic_nodes", state="failed") == 0


def test_the_end_of_the_job_is_shown_while_its_agent_is_parked(scraped: ScrapedNode) -> None:
    assert scraped.value("elastic_job_ended", outcome="failure") == 0
    scraped.status.done = Done(
        outcome=Outcome.FAILURE,
        reason="",
        exit_code=70,
        generation=7,
        final_step=None,
        time_s=0.0,
    )
    assert scraped.value("elastic_job_ended", outcome="failure") == 1
    assert scraped.value("elastic_job_ended", outcome="success") == 0
    assert scraped.value("elastic_in_world") == 0


def test_a_stopped_job_is_shown_until_it_ends(scraped: ScrapedNode) -> None:
    assert scraped.value("elastic_job_stopped") == 0
    scraped.status.stop = Stop(by="a@b", time_s=0.0)
    assert scraped.value("elastic_job_stopped") == 1
    scraped.status.done = Done(
        outcome=Outcome.SUCCESS,
        reason="",
        exit_code=0,
        generation=7,
        final_step=None,
        time_s=0.0,
    )
    assert scraped.value("elastic_job_stopped") == 0


def test_the_connection_to_etcd_is_shown(scraped: ScrapedNode) -> None:
    assert scraped.value("elastic_etcd_up") == 1
    assert scraped.value("elastic_etcd_contact_age_seconds") == 0.5
    scraped.status.store_problem = StoreUnreachable("no member answers")
    assert scraped.value("elastic_etcd_up") == 0


def test_requests_to_etcd_are_counted_in_buckets(scraped: ScrapedNode) -> None:
    for seconds in (0.001, 0.003, 0.004, 99.0):
        scraped.metrics.on_etcd_call("put /elastic/r/nodes/n1", seconds, seconds > 5)
    scraped.metrics.on_etcd_call("unheard-of /key", 0.1, False)
    name, put = "elastic_etcd_request_seconds", {"operation": "put"}
    buckets = [
        scraped.value(f"{name}_bucket", le=le, **put) for le in ("0.001", "0.005", "5.0", "+Inf")
    ]
    assert buckets == [1, 3, 3, 4]
    assert scraped.value(f"{name}_count", **put) == 4
    assert scraped.value(f"{name}_sum", **put) == pytest.approx(99.008)
    assert scraped.value("elastic_etcd_request_errors_total", **put) == 1
    assert scraped.value(f"{name}_count", operation="other") == 1


# Workers ----------------------------------------------------------------------------------------


def test_events_that_all_workers_report_count_once(scraped: ScrapedNode) -> None:
    """Bytes are summed, since each worker writes its own."""
    for pid, local_rank in ((11, 0), (12, 1)):
        failed = CheckpointSkipped(name="step-15", reason="the disk is full")
        scraped.sends(pid, local_rank, RECOVERED, SAVED, failed, WINDOW)
    assert scraped.value("elastic_recoveries_total", cause="lost") == 1
    assert scraped.value("elastic_recovery_seconds_total", phase="agree") == 0.75
    assert scraped.value("elastic_checkpoints_committed_total") == 1
    assert scraped.value("elastic_checkpoints_failed_total") == 1
    assert scraped.value("elastic_checkpoint_bytes_total") == 2000
    assert scraped.value("elastic_checkpoint_seconds_sum") == 3.0
    assert scraped.value("elastic_checkpoint_stall_seconds_total") == 0.5
    assert scraped.value("elastic_steps_committed_total") == 10
    assert scraped.value("elastic_step_seconds_count") == 20
    assert scraped.value("elastic_step_seconds_sum") == 11.0


def test_the_time_of_the_last_checkpoint_is_shown(scraped: ScrapedNode) -> None:
    assert scraped.value("elastic_checkpoint_last_timestamp_seconds") is None
    heard_s = scraped.clock.wall()
    scraped.sends(11, 0, SAVED)
    scraped.clock.advance(60)
    scraped.sends(11, 0, replace(SAVED, name="step-5", step=5))  # a slow save of an older step
    assert scraped.value("elastic_checkpoint_last_step") == 10
    assert scraped.value("elastic_checkpoint_last_timestamp_seconds") == heard_s


def test_a_recovery_into_an_ended_world_has_an_unknown_cause(scraped: ScrapedNode) -> None:
    scraped.metrics.on_worker_message(11, 0, RECOVERED, replace(SEVEN, generation=8))
    assert scraped.value("elastic_recoveries_total", cause="unknown") == 1


def test_the_age_of_the_oldest_heartbeat_is_shown(scraped: ScrapedNode) -> None:
    assert scraped.value("elastic_heartbeat_age_seconds") is None
    beat = Heartbeat(generation=7, step=1, phase="step", step_time_s=0.1)
    scraped.sends(11, 0, beat)
    scraped.clock.advance(40)
    scraped.sends(12, 1, beat)
    assert scraped.value("elastic_heartbeat_age_seconds") == 40
    scraped.metrics.on_worker_ended(11)
    assert scraped.value("elastic_heartbeat_age_seconds") == 0


def seconds_by_activity(scraped: ScrapedNode) -> dict[str, float]:
    return {
        dict(labels)["activity"]: value
        for (name, labels), value in scraped.scrape().items()
        if name == "elastic_worker_seconds_total" and value
    }


def test_the_time_of_a_worker_is_accounted_for(scraped: ScrapedNode) -> None:
    """As the report does: the parts add up to the time since the worker was started."""
    began_s = scraped.clock.monotonic()
    scraped.metrics.on_event(WorkersStarting())
    scraped.clock.advance(30 + 3)  # start-up, and a first step of 3 s
    first = replace(
        WINDOW,
        steps=1,
        duration_s=3.0,
        productive_s=3.0,
        data_s=0.0,
        checkpoint_s=0.0,
        evaluation_s=0.0,
        open_s=0.0,
        ended="first-step",
    )
    scraped.sends(11, 0, first)
    scraped.clock.advance(6)
    scraped.sends(11, 0, WINDOW)
    scraped.clock.advance(2)
    fault = replace(first, steps=0, productive_s=0.0, open_s=2.0, duration_s=2.0, ended="fault")
    scraped.sends(11, 0, fault)
    scraped.clock.advance(2.1)
    scraped.sends(11, 0, RECOVERED)
    seconds = seconds_by_activity(scraped)
    assert seconds == pytest.approx(
        {
            "start-up": 30.0,
            "first step": 2.6,  # a usual step takes 0.4 s
            "productive": 4.4,
            "data wait": 1.0,
            "checkpoint stall": 0.5,
            "evaluation": 0.25,
            "shutdown": 0.25,
            "detection": 2.0,
            "abort": 0.1,
            "rendezvous": 0.5,
            "rebuild": 0.75,
            "state transfer": 0.75,
        }
    )
    assert sum(seconds.values()) == pytest.approx(scraped.clock.monotonic() - began_s)


def test_the_first_step_of_a_worker_that_dies_in_the_second_counts(scraped: ScrapedNode) -> None:
    scraped.sends(11, 0, replace(WINDOW, productive_s=3.0, ended="first-step"))
    scraped.metrics.on_worker_ended(11)
    assert seconds_by_activity(scraped)["first step"] == 3.0


# Hostile names ----------------------------------------------------------------------------------


def test_hostile_names_are_escaped_and_shortened() -> None:
    scraped = ScrapedNode(name=HOSTILE, run_id=HOSTILE)
    scraped.metrics.on_event(
        FailureJudged(
            generation=6,
            failed=HOSTILE,
            action=HOSTILE,
            rule=HOSTILE,
            confidence="high",
            reason="",
            evidence="",
        )
    )
    text = scraped.text()
    assert len(text) < 100_000
    assert all(line.isprintable() for line in text.splitlines())
    assert [line for line in text.splitlines() if line.startswith("elastic_leader")] != []
    shown = {s.labels["node"] for f in text_string_to_metric_families(text) for s in f.samples}
    (name,) = shown
    assert name.startswith('a"} 1?elastic_leader{x="?[2J?<script>xxx')
    assert len(name) == 100
    assert scraped.value("elastic_leader") == 0


def test_a_metric_has_a_bounded_number_of_series() -> None:
    tally = Tally()
    for number in range(10 * MAX_SERIES):
        tally.add(table.FAILURE_RULES, rule=f"rule-{number}")
        tally.observe(table.ETCD_REQUESTS, 1.0, operation=f"operation-{number}")
    counts = tally.counts()
    assert len(counts) == MAX_SERIES + 1
    assert counts[table.FAILURE_RULES, (OTHER,)] == 9 * MAX_SERIES
    assert len(tally.distributions()) == MAX_SERIES + 1


@pytest.mark.parametrize("amount", [float("nan"), float("inf"), -1.0])
def test_a_counter_ignores_invalid_amounts(amount: float) -> None:
    tally = Tally()
    tally.add(table.CHECKPOINT_BYTES, amount)
    tally.observe(table.STEP_SECONDS, amount)
    assert (tally.counts(), tally.distributions()) == ({}, {})


def test_counts_of_concurrent_threads_add_up() -> None:
    tally = Tally()

    def count() -> None:
        for _ in range(2000):
            tally.add(table.LEASES_LOST)
            tally.observe(table.ETCD_REQUESTS, 0.01, operation="put")

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert tally.counts()[table.LEASES_LOST, ()] == 8000
    assert tally.distributions()[table.ETCD_REQUESTS, ("put",)].count == 8000


# Over HTTP --------------------------------------------------------------------------------------


@contextmanager
def served(scraped: ScrapedNode) -> Iterator[HealthServer]:
    def fail(error: BaseException) -> None:
        raise AssertionError from error

    routes = {"/metrics": lambda: render(scraped.readings, run_id="r", node="n1")}
    server = HealthServer(0, routes, on_error=fail)
    server.start()
    try:
        yield server
    finally:
        server.close()


def get(server: HealthServer) -> tuple[int, str, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    try:
        connection.request("GET", "/metrics")
        answer = connection.getresponse()
        return answer.status, answer.headers["Content-Type"], answer.read().decode()
    finally:
        connection.close()


def test_a_scrape_is_answered_while_every_lock_is_held(scraped: ScrapedNode) -> None:
    """By a hung thread, such as one whose disk does not respond."""
    held, released = threading.Event(), threading.Event()

    def hang() -> None:
        with scraped.metrics.tally._lock, scraped.status.changed:
            held.set()
            released.wait()

    thread = threading.Thread(target=hang)
    thread.start()
    try:
        assert held.wait(60)
        with served(busy_before(scraped)) as server:
            status, content_type, text = get(server)
    finally:
        released.set()
        thread.join()
    assert (status, content_type.partition(";")[0]) == (200, "text/plain")
    assert "elastic_build_info{" in text


def busy_before(scraped: ScrapedNode) -> ScrapedNode:
    scraped.states = {NodeState.READY: 2}
    scraped.status.step_rate = StepRate(7, 20, 0.5, 0.0)
    return scraped


def test_without_prometheus_client_the_page_names_the_command(
    scraped: ScrapedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with served(scraped) as server:
        status, _, text = get(server)
    assert status == 501
    assert "pip install 'torch-elastic-harness[metrics]'" in text
    assert len(text.strip().splitlines()) == 1


def test_an_internal_error_is_answered_with_status_500(
    scraped: ScrapedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> Any:
        raise KeyError("a defect")

    monkeypatch.setattr(NodeStatus, "has_workers_in_a_world", property(lambda self: broken()))
    with served(scraped) as server:
        status, _, text = get(server)
    assert status == 500
    assert "a defect" in text
