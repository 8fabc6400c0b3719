"""This node's workers, according to their links: which exist, their progress and their reports.

Everything here runs on the node's thread; the link's thread only posts into its inbox. Workers that
call ``run.retry`` report *ready*: from then on their node changes worlds without a restart.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

from elastic.agent.messages import ReplacementEnded, publish_change
from elastic.agent.supervision.announced_worlds import AnnouncedWorlds
from elastic.agent.supervision.failure_reporter import FailureReporter, nodes_at, nodes_of
from elastic.agent.supervision.known_workers import KnownWorkers
from elastic.agent.supervision.readiness import Readiness
from elastic.agent.supervision.replica_meetings import ReplicaMeetings
from elastic.agent.supervision.worker_deaths import WorkerDeaths
from elastic.events import CollectiveFailed, WorldEntered
from elastic.link.protocol import (
    IN_STEP,
    ClientHandshakeRequest,
    CollectiveFailure,
    CountEvents,
    Entered,
    Exiting,
    FlightAsk,
    Heartbeat,
    Left,
    MeasureSteps,
    Message,
    Permit,
    ProfileSteps,
    Ready,
    ReplicaJoin,
    ReplicaMet,
    SigtermAnswer,
    SigtermAsk,
)
from elastic.link.server import LinkServer, Worker, WorkerDeath
from elastic.membership.proposal import listed
from elastic.membership.records import Node, NodeState, Profile, WorldRecord
from elastic.membership.step_rate import StepRate
from elastic.metrics.counting import NodeMetrics
from elastic.node.context import NodeContext
from elastic.node.oom_kills import OomKillCounter


@dataclass(frozen=True)
class LinkEvent:
    """A message of a worker."""

    worker: Worker
    message: Message


@dataclass(frozen=True)
class WorkerEnded:
    """A worker's process has ended."""

    worker: Worker
    death: WorkerDeath


class Workers:
    """One per agent, across all starts of its workers."""

    def __init__(
        self,
        context: NodeContext,
        oom_kills: OomKillCounter | None = None,
        metrics: NodeMetrics | None = None,
        *,
        make_server: Callable[..., LinkServer] = LinkServer,
    ) -> None:
        self._at = context
        self._metrics = metrics if metrics is not None else NodeMetrics(context.clock)
        oom_kills = oom_kills if oom_kills is not None else OomKillCounter()
        self._server = make_server(
            on_message=lambda worker, message: context.post(LinkEvent(worker, message)),
            on_death=lambda worker, death: context.post(WorkerEnded(worker, death)),
            on_error=context.status.fail,
        )
        self._known = KnownWorkers(self._server)
        self._announced = AnnouncedWorlds(context, self._server)
        self._deaths = WorkerDeaths(context, self._known, self._announced, oom_kills)
        self.replicas = ReplicaMeetings(context, self._known, self._server)
        self.readiness = Readiness(context, self._known, self._server)
        self.reporter = FailureReporter(context)
        self._permit: Permit | None = None  # the last one

    @property
    def path(self) -> str:
        """Of the socket: ``ELASTIC_LINK`` in the workers' environment."""
        return self._server.path

    def start(self) -> None:
        self._server.start()

    def keep_key(self) -> None:
        """Write the link's key to the file that starting workers read. From any thread."""
        self._server.keep_key()

    def close(self) -> None:
        self._server.close()

    @property
    def world(self) -> WorldRecord | None:
        """The newest world that was announced to them."""
        return self._announced.current

    def ask_for_flights(self) -> None:
        """Request the workers' flight recorder traces, for the report of a hang."""
        self._server.send(FlightAsk())

    def profile(self, request: Profile) -> None:
        """Request profiles of their next steps."""
        self._server.send(ProfileSteps(request.steps, request.ranks))

    # ── messages from workers ────────────────────────────────────────────────────────────

    def on_message(self, worker: Worker, message: Message) -> None:
        """A message from the link."""
        world = self._at.status.world.world
        self._metrics.on_worker_message(worker.pid, worker.local_rank, message, world)
        if worker.pid in self._known.ended:
            return  # sent before this agent killed it
        match message:
            case ClientHandshakeRequest():
                self._known.starts[worker.pid] = self._at.status.starts
                self._at.status.unconnected.discard(worker.pid)
                self._at.status.workers_joined = True
                if self._at.status.to_replace:
                    self._at.status.undecided.add(worker.pid)
                self._welcome(worker)
            case Ready(max_ranks=max_ranks):
                self._on_ready(worker, max_ranks)
            case ReplicaJoin():
                self.replicas.join(worker, message)
            case ReplicaMet():
                self._known.meeting_left_s.pop(worker.pid, None)
                self._known.met.add(worker.pid)
            case Heartbeat():
                self._on_heartbeat(worker, message)
            case Entered(generation=generation, step=step):
                self._on_entered(worker, generation, step)
            case CollectiveFailure():
                self._on_failure(worker, message)
            case Left():
                self._known.left.add(worker.pid)
                if self._known.have_left:
                    self._at.status.note_workers_left()
            case SigtermAsk():
                leaving = self._node.state is NodeState.LEAVING and not self._at.status.stopping
                self._server.send(SigtermAnswer(leaving=leaving), worker)
            case Exiting():
                self._deaths.on_exit_notice(worker, message)
            case _:
                pass

    @property
    def _node(self) -> Node:
        return self._at.status.node

    def _welcome(self, worker: Worker) -> None:
        """The message to a worker that has just connected."""
        if self._permit is not None:
            self._server.send(self._permit, worker)
        if self._at.options.straggler_action != "off":
            self._server.send(MeasureSteps(window_s=self._at.options.straggler_window_s), worker)
        if self._metrics.collects_worker_events:
            self._server.send(CountEvents(), worker)
        self._announced.welcome(worker)

    def _on_ready(self, worker: Worker, max_ranks: int) -> None:
        self._known.ready.add(worker.pid)
        self._at.status.undecided.add(worker.pid)
        if len(self._known.ready & self._known.present) < self._node.nproc:
            return
        if self._node.state is NodeState.STARTING:
            self._at.status.to_replace.clear()
            publish_change(
                self._at,
                lambda n: replace(n, in_process=True, state=NodeState.READY, max_ranks=max_ranks),
            )

    def _on_heartbeat(self, worker: Worker, heartbeat: Heartbeat) -> None:
        if worker.local_rank == 0 and (heartbeat.phase == IN_STEP or heartbeat.step_time_s > 0):
            self._at.status.stepping_generation = heartbeat.generation
        # Without the duration of a step, the beginning of a later one cannot be predicted.
        if worker.local_rank == 0 and heartbeat.generation and heartbeat.step_time_s > 0:
            now = self._at.clock.monotonic()
            self._at.status.step_rate = StepRate(
                heartbeat.generation, heartbeat.step, heartbeat.step_time_s, now
            )

    def _on_entered(self, worker: Worker, generation: int, step: int) -> None:
        entered = self._known.entered
        entered[worker.pid] = generation
        now = self._at.clock.monotonic()
        if worker.local_rank == 0 and (step_rate := self._at.status.step_rate) is not None:
            self._at.status.step_rate = StepRate(generation, step, step_rate.step_time_s, now)
        count = sum(entered.get(pid) == generation for pid in self._known.present)
        if count < self._node.nproc:
            return
        world = self._announced.newest
        if world is None or world.generation != generation:
            return
        self._at.journal.emit(
            WorldEntered(
                generation=generation,
                first_rank=world.first_rank_of(self._node.node_id),
                size=world.size,
                waited_s=0.0,
            ),
            level=logging.DEBUG,
        )
        self._at.status.failure_step = None
        publish_change(
            self._at,
            lambda n: replace(
                n,
                running=world,
                failure=None,
                failure_exit_code=None,
                failure_step=None,
                failure_generation=None,
                failure_is_oom_kill=False,
                failure_kernel_log=(),
            ),
        )

    def _on_failure(self, worker: Worker, failure: CollectiveFailure) -> None:
        generation, error = failure.generation, failure.error
        newest = self._announced.current
        if newest is not None and generation < newest.generation and not newest.switch_at_step:
            return  # already handled
        if self.reporter.has_reported(generation):
            return
        self._at.journal.emit(
            CollectiveFailed(generation=generation, local_rank=worker.local_rank, error=error),
            level=logging.DEBUG,  # the leader's log has the lost node and the reason
        )
        accused = (
            *nodes_of(newest, generation, failure.missing),
            *nodes_at(newest, generation, failure.unreachable),
        )
        if failure.missing and newest is not None:
            # Ranks differ from world to world, and a node that never arrives stays the same.
            names = [m.name for m in newest.members if m.node_id in accused]
            error = f"{error} ({listed(names)})" if names else error
        self.reporter.report(generation, error, accused=accused)

    def is_hung(self, pid: int, reason: str) -> None:
        """A worker is about to be ended."""
        self._known.hung[pid] = reason

    def is_unkillable(self, pid: int, reason: str) -> None:
        """A worker still exists although it was killed."""
        self._deaths.on_unkillable(pid, reason)

    def world_is_hung(self, generation: int, reason: str) -> None:
        """The workers wait for each other, and all are alive: the same ranks form another world."""
        if self.world is None or self.world.generation > generation:
            return
        self.reporter.report(generation, reason)

    # ── ended workers ────────────────────────────────────────────────────────────────────

    def on_ended(self, worker: Worker, death: WorkerDeath) -> None:
        """A process has ended."""
        self._metrics.on_worker_ended(worker.pid)
        self._deaths.on_ended(worker, death)
        self._at.status.undecided.discard(worker.pid)

    def on_ended_unconnected(self, ended: ReplacementEnded) -> None:
        """Handle the end of a replacement that had not connected when torchrun polled it."""
        status = self._at.status
        if ended.pid not in self._known.starts and ended.pid not in status.to_replace:
            self._deaths.on_ended_unconnected(ended)
        status.unconnected.discard(ended.pid)

    # ── messages to workers ──────────────────────────────────────────────────────────────

    def learn(self, world: WorldRecord | None) -> None:
        """The newest world: announce it if it concerns workers that need no restart."""
        self._announced.learn(world)

    def ask_to_leave(self, reason: str) -> None:
        """Ask all workers to leave at their next boundary and save, as a job's last ones do."""
        self._announced.ask_to_leave(reason)

    def forget(self) -> None:
        """The workers are restarted."""
        self._known.forget()
        self._announced.forget()
        self.replicas.forget()
        self._at.status.workers_left = False
        self._at.status.to_replace.clear()
        self._at.status.undecided.clear()
        self._at.status.unconnected.clear()

    def permit(self, until_s: float) -> None:
        """Permit the workers to train until ``until_s`` of this machine's boot time."""
        self._permit = Permit(until_s=until_s)
        self._server.send(self._permit)

    @property
    def are_all_connected(self) -> bool:
        """Whether every worker of this node has a link, and so respects its permission."""
        return len(self._server.workers()) >= self._node.nproc > 0
