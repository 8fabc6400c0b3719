"""Passes events that torch's agent does not see to TorchElastic's metric and event handlers.

Programs pass handlers to torch: ``torch.distributed.elastic.metrics.configure(handler)``, and
``LaunchConfig(event_log_handler=…)``. torch's agent puts its metrics and records its events there
when it starts and ends workers. It does not see a recovery without a restart, so worlds,
recoveries and failures of workers are put into the same group, and recorded at the same destination
with the same metadata.

Events wait until torch's agent next polls its workers, and are passed on by its thread, as its own
are: a handler may be slow, and need not be thread-safe. With torch's default handlers, which do
nothing, nothing is kept.
"""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from torch.distributed.elastic.events import record
from torch.distributed.elastic.events.api import Event as TorchEvent
from torch.distributed.elastic.events.api import EventMetadataValue, EventSource
from torch.distributed.elastic.events.handlers import get_logging_handler
from torch.distributed.elastic.metrics.api import NullMetricHandler, getStream, put_metric

from elastic.clock import SYSTEM_CLOCK, Clock
from elastic.events import (
    CheckpointSaved,
    Event,
    FailureJudged,
    HangFound,
    Recovered,
    WorkerDied,
    WorkerReplaced,
    WorldEntered,
)
from elastic.telemetry.journal import kebab_name
from elastic.telemetry.log import get_logger
from elastic.telemetry.printable import shorten

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
