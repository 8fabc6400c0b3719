"""TorchElastic's handlers receive the harness's events, on the thread of its agent."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
from kit.manual_clock import ManualClock
from test_metrics import RECOVERED, SAVED, SEVEN
from torch.distributed.elastic import events
from torch.distributed.elastic.events import handlers
from torch.distributed.elastic.events.api import Event as TorchEvent
from torch.distributed.elastic.events.api import EventSource
from torch.distributed.elastic.metrics import api as metrics

from elastic.agent import exporters
from elastic.agent.exporters import MAX_PENDING, TorchElasticBridge, TorchElasticOrigin
from elastic.agent.metrics import NodeMetrics
from elastic.telemetry.events import (
    Event,
    FailureJudged,
    HangFound,
    Waiting,
    WorkerDied,
    WorkerReplaced,
    WorldEntered,
)
from elastic.telemetry.log import LOGGER_NAME

DESTINATION = "test-of-elastic"
ENTERED = WorldEntered(generation=7, first_rank=2, size=3, waited_s=0.0)
DIED = WorkerDied(pid=4711, local_rank=1, reason="ValueError: boom")
REPORTED: list[Event] = [
    ENTERED,
    DIED,
    WorkerReplaced(local_rank=1, pid=4712),
    RECOVERED,
    SAVED,
    HangFound(
        generation=7, action="kill", kind="absent", ranks=(1,), confidence="", reason="", report=""
    ),
    FailureJudged(
        generation=7,
        failed="n1",
        action="stop",
        rule="wrong-usage",
        confidence="",
        reason="it refuses its arguments",
        evidence="",
    ),
]


class Put(metrics.MetricHandler):
    """Records metrics, and the threads on which they were emitted."""

    def __init__(self) -> None:
        self.seen: list[metrics.MetricData] = []
        self.threads: set[int] = set()

    def emit(self, metric_data: metrics.MetricData) -> None:
        self.seen.append(metric_data)
        self.threads.add(threading.get_ident())

    def values(self) -> dict[str, int]:
        return {data.name: data.value for data in self.seen}


class Recorded(logging.Handler):
    """Records torch's events, as a destination receives them."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[TorchEvent] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append(TorchEvent.deserialize(record.getMessage()))


@pytest.fixture
def put(monkeypatch: pytest.MonkeyPatch) -> Put:
    made = Put()
    monkeypatch.setitem(metrics._metrics_map, "torchelastic", made)  # as configure() does
    return made


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorded]:
    made = Recorded()
    monkeypatch.setitem(handlers._log_handlers, DESTINATION, made)
    yield made
    events._events_loggers.pop(DESTINATION, None)
    logging.getLogger(f"torchelastic-events-{DESTINATION}").removeHandler(made)


def bridge(destination: str = "null") -> TorchElasticBridge:
    origin = TorchElasticOrigin(
        run_id="llama-7",
        role="trainer",
        hostname="host-1",
        backend="etcd-v3",
        destination=destination,
    )
    return TorchElasticBridge(origin, ManualClock())


def test_nothing_is_queued_with_the_default_handlers() -> None:
    made = bridge()
    assert not made.is_configured
    for event in REPORTED:
        made.on_event(event)
    assert not made._pending


def test_events_are_emitted_in_the_torchelastic_metric_group(put: Put) -> None:
    made = bridge()
    assert made.is_configured
    for event in (*REPORTED, Waiting(reason="not reported")):
        made.on_event(event)
    assert put.seen == [], "only the agent's thread may call handlers"
    made.flush()
    assert put.values() == {
        "workers.trainer.generation": 7,
        "workers.trainer.world_size": 3,
        "workers.trainer.worker_failed": 1,
        "workers.trainer.worker_replaced": 1,
        "workers.trainer.recovery.success": 1,
        "workers.trainer.recovery.duration.ms": 2100,
        "workers.trainer.checkpoint.success": 1,
        "workers.trainer.checkpoint.duration.ms": 3000,
        "workers.trainer.hang": 1,
        "workers.trainer.failure.stop": 1,
    }
    assert {data.group_name for data in put.seen} == {"torchelastic"}
    assert all(isinstance(data.value, int) for data in put.seen)
    made.flush()
    assert len(put.seen) == len(put.values()), "once each"


def test_the_table_of_reported_events_matches_the_output(put: Put, recorded: Recorded) -> None:
    for event in REPORTED:
        made = bridge(DESTINATION)
        put.seen.clear()
        recorded.seen.clear()
        made.on_event(event)
        made.flush()
        names, state = exporters.REPORTED[type(event)]
        assert [name.replace("ACTION", "stop") for name in names] == [
            data.name.removeprefix("workers.trainer.") for data in put.seen
        ]
        assert [one.metadata["state"] for one in recorded.seen] == ([state] if state else [])
    assert {type(event) for event in REPORTED} == set(exporters.REPORTED)


def test_events_are_recorded_with_the_metadata_of_torchs_agent(recorded: Recorded) -> None:
    made = bridge(DESTINATION)
    for event in REPORTED:
        made.on_event(event)
    made.flush()
    names = [one.name.removeprefix("torchelastic.worker.status.") for one in recorded.seen]
    assert names == ["WORLD_ENTERED", "FAILED", "REPLACED", "RECOVERED", "HUNG", "JUDGED"]
    by_name = dict(zip(names, recorded.seen, strict=True))
    failed = by_name["FAILED"]
    assert failed.source is EventSource.WORKER
    assert failed.metadata["raw_error"] == "ValueError: boom"
    assert json.loads(str(failed.metadata["metadata"])) == {"local_rank": 1, "worker_pid": 4711}
    recovered = by_name["RECOVERED"]
    assert recovered.source is EventSource.AGENT
    assert recovered.metadata["duration_ms"] == pytest.approx(2100)
    for one in recorded.seen:
        assert one.metadata["run_id"] == "llama-7"
        assert one.metadata["role"] == "trainer"
        assert one.metadata["hostname"] == "host-1"
        assert one.metadata["rdzv_backend"] == "etcd-v3"
        assert one.timestamp == int(ManualClock().wall() * 1000)


def test_events_of_all_workers_of_a_node_are_emitted_once(put: Put) -> None:
    made = bridge()
    node = NodeMetrics(ManualClock(), collects_worker_events=True, listener=made.on_event)
    for pid in (11, 12):
        node.on_worker_message(pid, pid - 11, RECOVERED, SEVEN)
        node.on_worker_message(pid, pid - 11, SAVED, SEVEN)
    made.flush()
    assert len(put.seen) == len(put.values()) == 4


def test_handlers_are_called_on_the_thread_that_flushes(put: Put) -> None:
    made = bridge()
    thread = threading.Thread(target=made.on_event, args=(ENTERED,))
    thread.start()
    thread.join()
    made.flush()
    assert put.threads == {threading.get_ident()}


def test_a_handler_that_raises_loses_only_one_event(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(metrics.MetricHandler):
        def emit(self, metric_data: metrics.MetricData) -> None:
            raise ConnectionError("no statsd")

    monkeypatch.setitem(metrics._metrics_map, "torchelastic", Broken())
    warnings: list[str] = []

    class Warnings(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            warnings.append(record.getMessage())

    handler = Warnings(logging.WARNING)
    logging.getLogger(LOGGER_NAME).addHandler(handler)
    try:
        made = bridge()
        made.on_event(ENTERED)
        made.flush()
    finally:
        logging.getLogger(LOGGER_NAME).removeHandler(handler)
    (warning,) = warnings
    assert "failed on world-entered" in warning and "no statsd" in warning
    assert not made._pending


def test_the_queue_of_an_agent_that_does_not_poll_is_bounded(put: Put) -> None:
    made = bridge()
    for generation in range(MAX_PENDING + 10):
        made.on_event(replace(ENTERED, generation=generation))
    made.flush()
    assert len(put.seen) == 2 * MAX_PENDING
    assert put.seen[-2].value == MAX_PENDING + 9, "the oldest are left out"
