"""Counts events and messages of workers for metrics. No I/O; never blocks.

Workers send their agent a few of their events (:data:`elastic.link.protocol.COUNTED`), one every
few seconds and one for each checkpoint and recovery. An event seen by all workers of a node,
such as a checkpoint, counts once per node.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from elastic.clock import Clock
from elastic.events import (
    CheckpointSaved,
    CheckpointSkipped,
    Event,
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
from elastic.membership.records import WorldRecord
from elastic.metrics import table
from elastic.metrics.activity_seconds import ActivitySeconds
from elastic.metrics.tally import Tally

_REMEMBERED_NAMES = 64  # of checkpoints: a worker may report a commit long after the others


class NodeMetrics:
    """The counters of one agent."""

    def __init__(
        self,
        clock: Clock,
        *,
        collects_worker_events: bool = False,
        listener: Callable[[Event], None] = lambda event: None,
    ) -> None:
        """``collects_worker_events``: whether workers send their counted events. ``listener``
        receives recoveries and checkpoints, once per node."""
        self.tally = Tally()
        self._listener = listener
        self.collects_worker_events = collects_worker_events
        self._clock = clock
        self._activities = ActivitySeconds(self.tally, clock)
        self._heard_s: dict[int, float] = {}  # time of the last message, by pid
        self._recovered = 0  # the newest generation whose recovery was counted
        self._committed: deque[str] = deque(maxlen=_REMEMBERED_NAMES)
        self._failed: deque[str] = deque(maxlen=_REMEMBERED_NAMES)
        self.last_checkpoint: tuple[int, float] | None = None  # its step, and when it was reported

    @property
    def heartbeat_age_s(self) -> float | None:
        """Time since the last message of the worker that has been silent for longest; None without
        workers. Lock-free."""
        heard = self._heard_s.copy()
        return self._clock.monotonic() - min(heard.values()) if heard else None

    def on_event(self, event: Event) -> None:
        """Count an event of the agent."""
        add = self.tally.add
        match event:
            case WorldFormed(cause=cause):
                add(table.WORLDS_FORMED, cause=cause)
            case FailureJudged(rule=rule, action=action):
                add(table.FAILURES, action=action)
                add(table.FAILURE_RULES, rule=rule)
            case WorkersStarting():
                self._activities.workers_start()
            case WorkerDied():
                add(table.WORKER_DEATHS)
            case WorkerReplaced():
                add(table.WORKERS_REPLACED)
            case NodeLost():
                add(table.NODES_LOST)
            case NodeSuspected():
                add(table.NODES_SUSPECTED)
            case HangFound(kind=kind, action=action):
                add(table.HANGS, kind=kind, action=action)
            case StragglerFound(cause=cause):
                add(table.STRAGGLERS, cause=cause)
            case LeaseLost():
                add(table.LEASES_LOST)

    def on_etcd_call(self, what: str, seconds: float, is_error: bool) -> None:
        """Count a finished request to etcd. ``what`` begins with its kind: ``put /elastic/…``."""
        kind = what.partition(" ")[0]
        operation = kind if kind in table.ETCD_OPERATIONS else "other"
        self.tally.observe(table.ETCD_REQUESTS, seconds, operation=operation)
        if is_error:
            self.tally.add(table.ETCD_ERRORS, operation=operation)

    def on_worker_message(
        self, pid: int, local_rank: int, message: object, world: WorldRecord | None
    ) -> None:
        """Count a message of a worker. ``world``: the newest known one."""
        self._heard_s[pid] = self._clock.monotonic()
        match message:
            case RankTimes():
                self._on_times(pid, local_rank, message)
            case Recovered():
                self._on_recovered(message, world)
            case CheckpointSaved():
                self._on_saved(message)
            case CheckpointSkipped(name=name):
                if name not in self._failed:
                    self._failed.append(name)
                    self.tally.add(table.CHECKPOINTS_FAILED)

    def on_worker_ended(self, pid: int) -> None:
        """Forget a worker that has ended."""
        self._heard_s.pop(pid, None)
        self._activities.forget(pid)

    def _on_times(self, pid: int, local_rank: int, times: RankTimes) -> None:
        if local_rank == 0:
            self.tally.add(table.STEPS_COMMITTED, times.steps)
        in_steps_s = times.productive_s + times.data_s + times.checkpoint_s
        self.tally.observe(table.STEP_SECONDS, in_steps_s, times=times.steps)
        self._activities.on_times(pid, times)

    def _on_recovered(self, event: Recovered, world: WorldRecord | None) -> None:
        self._activities.on_recovered(event)
        if event.generation <= self._recovered:
            return
        self._recovered = event.generation
        is_known = world is not None and world.generation == event.generation
        cause = world.cause.value if world is not None and is_known else "unknown"
        self.tally.add(table.RECOVERIES, cause=cause)
        for phase in table.PHASES:
            self.tally.add(table.RECOVERY_SECONDS, getattr(event, f"{phase}_s"), phase=phase)
        self._listener(event)

    def _on_saved(self, event: CheckpointSaved) -> None:
        self.tally.add(table.CHECKPOINT_BYTES, event.bytes)
        if event.name in self._committed:
            return
        self._committed.append(event.name)
        self.tally.add(table.CHECKPOINTS_COMMITTED)
        self.tally.observe(table.CHECKPOINT_SECONDS, event.duration_s)
        self.tally.add(table.CHECKPOINT_STALL, event.stall_s)
        if self.last_checkpoint is None or event.step >= self.last_checkpoint[0]:
            self.last_checkpoint = event.step, self._clock.wall()
        self._listener(event)
