"""The interface between the node's thread and the parts that follow its workers.

In restart mode there are no links to workers, and hang detection may be off: missing parts are
handled here, so that callers need not check.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from elastic.agent.messages import ReplacementEnded
from elastic.agent.supervision.hangs import (
    Hangs,
    RanksAreQuiet,
    StacksTaken,
    WorkerHung,
    WorkerUnkillable,
    WorldHung,
)
from elastic.agent.supervision.worker_deaths import publish_unkillable
from elastic.agent.supervision.workers import LinkEvent, WorkerEnded, Workers
from elastic.hangs.watch import Supervised
from elastic.link.protocol import FlightTrace, ProgressPage, StepReport
from elastic.liveness.heartbeats import NodeHeartbeat
from elastic.membership.records import Profile, WorldRecord, decode
from elastic.metrics.counting import NodeMetrics
from elastic.node.context import NodeContext
from elastic.node.oom_kills import OomKillCounter
from elastic.node.step_times import StepTimesReport
from elastic.store.keyvalue import Entry, Lease


class WorkerSupervisor:
    """One per agent. On the node's thread, except :meth:`supervise` and :meth:`write_link_key`."""

    def __init__(
        self,
        context: NodeContext,
        oom_kills: OomKillCounter,
        metrics: NodeMetrics | None = None,
    ) -> None:
        self._at = context
        options = context.options
        in_process = options.mode == "in-process"
        self._keys = context.keys
        self.workers = Workers(context, oom_kills, metrics) if in_process else None
        self._hangs = Hangs(context) if options.hang_detection != "off" else None
        self._step_times = StepTimesReport(context)

    @property
    def link_path(self) -> str:
        """The path of the workers' link; empty in restart mode."""
        return self.workers.path if self.workers is not None else ""

    @property
    def checkpoint_step(self) -> int | None:
        """The step of the last checkpoint that a worker of this node has reported as committed."""
        return self._hangs.checkpoint_step if self._hangs is not None else None

    @property
    def planned_steps(self) -> int | None:
        """The number of steps of the entire job, as reported by a worker of this node."""
        return self._hangs.planned_steps if self._hangs is not None else None

    @property
    def heartbeat(self) -> NodeHeartbeat:
        """The state of this node's workers, for the leader."""
        status = self._at.status
        return NodeHeartbeat(
            generation=status.stepping_generation,
            step=status.step_rate.step if status.step_rate is not None else None,
            has_joined=status.workers_joined if self.workers is not None else None,
        )

    def write_link_key(self) -> None:
        """Workers are about to start. From any thread."""
        if self.workers is not None:
            self.workers.keep_key()

    def supervise(self, workers: Iterable[Supervised]) -> None:
        """The processes that torchrun supervises. From its thread."""
        if self._hangs is not None:
            self._hangs.supervise(workers)

    def start(self) -> None:
        if self.workers is not None:
            self.workers.start()
        if self._hangs is not None:
            self._hangs.start()

    def close(self) -> None:
        if self._hangs is not None:
            self._hangs.close()
        if self.workers is not None:
            self.workers.close()

    def check(self) -> None:
        """Called on every iteration of the node's thread."""
        if self.workers is not None:
            self.workers.readiness.check()

    def handle(self, message: object) -> None:
        """A message of a worker, or of one of the threads that watch workers."""
        match message:
            case LinkEvent():
                self._on_link_event(message)
            case WorkerEnded(worker, death):
                self._step_times.on_ended(worker.pid)
                if self._hangs is not None:
                    self._hangs.on_ended(worker.pid)
                if self.workers is not None:
                    self.workers.on_ended(worker, death)
            case ReplacementEnded():
                if self.workers is not None:
                    self.workers.on_ended_unconnected(message)
            case RanksAreQuiet():
                if self._hangs is not None:
                    self._hangs.on_quiet(message)
                if message.ranks and self.workers is not None:
                    self.workers.ask_for_flights()
            case StacksTaken():
                if self._hangs is not None:
                    self._hangs.on_stacks_taken(message)
            case WorkerHung(pid, reason):
                if self.workers is not None:
                    self.workers.is_hung(pid, reason)
            case WorkerUnkillable(pid, reason):
                if self.workers is not None:
                    self.workers.is_unkillable(pid, reason)
                elif (running := self._at.status.node.running) is not None:
                    failure = f"a worker (pid {pid}) was ended by SIGKILL; {reason}"
                    publish_unkillable(self._at, failure, running.generation)
            case WorldHung(generation, reason):
                if self.workers is not None:
                    self.workers.world_is_hung(generation, reason)

    def _on_link_event(self, event: LinkEvent) -> None:
        worker = event.worker
        match event.message:
            case ProgressPage() as page:
                if self._hangs is not None:
                    self._hangs.on_page(worker, page)
            case FlightTrace() as trace:
                if self._hangs is not None:
                    self._hangs.on_flight(worker, trace)
            case StepReport(times=times):
                self._step_times.on_report(worker.pid, worker.local_rank, times)
            case message:
                if self.workers is not None:
                    self.workers.on_message(worker, message)

    def on_entry(self, entry: Entry) -> None:
        """A record of the store: one that belongs to the response to a hang, or any other."""
        if entry.key == self._keys.profile and self.workers is not None:
            self.workers.profile(decode(Profile, entry.key, entry.value))
        if self._hangs is None:
            return
        if entry.key == self._keys.hang_verdict:
            self._hangs.on_verdict(entry)
        elif entry.key.startswith(self._keys.hang_stacks):
            self._hangs.on_stacks(entry)

    def learn(self, world: WorldRecord | None) -> None:
        """The world of the job, after every message."""
        if self.workers is not None:
            self.workers.learn(world)
            if self._hangs is not None:
                self._hangs.learn(self.workers.world)

    def look_for_replica(self, now: float) -> float:
        """Find the nodes of this node's replica if its workers wait for them; returns the time of
        the next call. Raises CoordinationError."""
        return self.workers.replicas.look(now) if self.workers is not None else math.inf

    def forget_workers(self) -> None:
        """torchrun is about to restart them."""
        if self.workers is not None:
            self.workers.forget()

    def register_again(self) -> None:
        """The lease is new: keys of the old one are deleted."""
        if self.workers is not None:
            self.workers.reporter.register_again()
        if self._hangs is not None:
            self._hangs.register_again()

    def publish(self, lease: Lease) -> None:
        """Write changes to the store. Raises :class:`CoordinationError`."""
        if self.workers is not None:
            self.workers.reporter.publish(lease)
        if self._hangs is not None:
            self._hangs.publish(lease)
        self._step_times.publish(lease)
