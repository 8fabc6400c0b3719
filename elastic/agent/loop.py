"""The node's thread: owns its key and lease, learns the world, performs a leader's tasks.

It is fed through one inbox by watches, lease, liveness server, probes and the main thread, so it
handles one event at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace

from elastic.agent.admission import ReplicaWait
from elastic.agent.ending.job_end import read_end, record_end
from elastic.agent.ending.leaving import UnannouncedLeave
from elastic.agent.isolation import IsolationDetector
from elastic.agent.messages import (
    BaseEvent,
    ChangeNode,
    Close,
    ConnectionClosed,
    ConnectionDropped,
    ConnectionOpened,
    LeaseEnded,
    PushedWorld,
    WorkersStart,
)
from elastic.agent.permission import Permission
from elastic.agent.registration import Registration
from elastic.agent.store_events import StoreEvents, watch_job
from elastic.agent.supervision.supervisor import WorkerSupervisor
from elastic.errors import CoordinationError, LeaseGone, RecordError, StoreUnreachable
from elastic.leadership.leader import Leadership
from elastic.leadership.node_records import NodesEvent
from elastic.leadership.prober import Probed
from elastic.leadership.progress_writer import ProgressWriter
from elastic.leadership.succession import LeaderProbed, Succession
from elastic.liveness.channel import LIMITS, LivenessCallbacks, LivenessServer
from elastic.liveness.heartbeats import Heartbeats
from elastic.membership.records import NodeState
from elastic.metrics.counting import NodeMetrics
from elastic.node.context import NodeContext
from elastic.node.oom_kills import OomKillCounter
from elastic.node.run_secret import LIVENESS
from elastic.node.status import WorldEntry
from elastic.secure_channel.handshake import Credentials
from elastic.store.keyvalue import Watch
from elastic.tuning.agent_intervals import LEAVING_WORLD_S, NODE_IDLE_S, NODE_RETRY_S
from elastic.tuning.timeouts import peer_silence_s


class NodeLoop:
    """The thread ``elastic-node``. Errors that end it are stored in the node's status."""

    def __init__(
        self,
        context: NodeContext,
        *,
        oom_kills: OomKillCounter,
        last_contact_s: Callable[[], float] | None = None,
        metrics: NodeMetrics | None = None,
    ) -> None:
        self._at = context
        status, options, secret = context.status, context.options, context.secret
        node = status.node
        self._heartbeats = Heartbeats(node.node_id, context.clock)
        self._liveness = LivenessServer(
            node.address,
            self._liveness_callbacks(),
            credentials=Credentials(
                key=lambda: secret.key(LIVENESS), identity=node.node_id, tls=context.tls
            ),
            limits=replace(LIMITS, silence_s=peer_silence_s(options.lease_s)),
            clock=context.clock,
        )
        self.succession = Succession(self._at, self._liveness)
        self.supervisor = WorkerSupervisor(self._at, oom_kills, metrics)
        self.registration = Registration(self._at, self.supervisor.register_again)
        self._replica_wait = ReplicaWait(self._at)
        self.isolation = IsolationDetector(self._at, self.supervisor.workers, last_contact_s)
        self.permission = Permission(self._at, self.supervisor.workers)
        self._unannounced_leave = None
        if (workers := self.supervisor.workers) is not None:
            self._unannounced_leave = UnannouncedLeave(
                self._at,
                lambda: workers.world,
                workers.ask_to_leave,
                lambda: self.isolation.watch_is_cut or bool(status.store_problem),
            )
        self._progress = ProgressWriter(
            self._at,
            lambda: self.registration.current_lease if self.succession.term else None,
            lambda: self.supervisor.checkpoint_step,
            lambda: self.supervisor.planned_steps,
            self._heartbeats.by_node,
            lambda: term.waiting if (term := self.succession.term) is not None else {},
        )
        self.store_events = StoreEvents(
            context,
            succession=self.succession,
            registration=self.registration,
            supervisor=self.supervisor,
            isolation=self.isolation,
        )
        self._watch: Watch | None = None
        self._close_by_s: float | None = None  # set once, at the end at the latest
        self._end_read_in: Leadership | None = None  # the term in which it was last read
        self._next_wake_s = 0.0
        self._thread = threading.Thread(target=self._run, name="elastic-node", daemon=True)

    def _liveness_callbacks(self) -> LivenessCallbacks:
        post = self.post
        return LivenessCallbacks(
            on_opened=lambda node_id, is_leader: post(ConnectionOpened(node_id, is_leader)),
            on_closed=lambda node_id, was_leader: post(ConnectionClosed(node_id, was_leader)),
            on_silent=lambda node_id, was_leader: post(
                ConnectionClosed(node_id, was_leader, fell_silent=True)
            ),
            on_dropped=lambda node_id: post(ConnectionDropped(node_id)),
            on_world=lambda record: post(PushedWorld(record)),
            on_heartbeat=self._heartbeats.record,
            on_error=self._at.status.fail,
        )

    @property
    def liveness_port(self) -> int:
        return self._liveness.port

    def node_states(self) -> Mapping[NodeState, int] | None:
        """The number of nodes in each state, if this one leads. From any thread, without a lock."""
        term = self.succession.term
        return term.roster.states() if term is not None else None

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        self._liveness.start()
        self.supervisor.start()
        self._progress.start()
        self._watch = watch_job(self._at)
        self._thread.start()

    def post(self, message: object) -> None:
        """Put a message into the inbox, from any thread or a signal handler."""
        self._at.post(message)

    def close(self) -> None:
        """Resign, delete the node's key, end the lease, join. Idempotent."""
        self.post(Close())
        if self._thread.is_alive():
            self._thread.join()
        self._liveness.close()
        self._progress.close()
        self.supervisor.close()
        self.succession.join_threads()

    # ── the thread ───────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        try:
            while not self._may_end():
                self._turn()
        except BaseException as error:
            self._at.status.fail(error)
            raise
        finally:
            self._end()
            self._at.status.watchdog.rest()

    def _may_end(self) -> bool:
        """Whether the thread may end: it is closing and, if this node leaves, a world without it
        exists or the time for that has expired. So the last node to leave gracefully leaves an
        empty world behind, not one of dead members for which a later start would wait."""
        if self._close_by_s is None:
            return False
        status, node = self._at.status, self._at.status.node
        world = status.world.world
        return (
            node.state not in (NodeState.LEAVING, NodeState.FAILED)
            or world is None
            or node.node_id not in world.node_ids
            or status.done is not None
            or self.isolation.is_lost
            or bool(status.store_problem)
            or self._at.clock.monotonic() >= self._close_by_s
        )

    def _turn(self) -> None:
        for message in self._take():
            self._guarded(lambda message=message: self._handle(message))  # type: ignore[misc]
            self.supervisor.learn(self._at.status.world.world)
        if self._guarded(self._duties):
            self._at.status.store_problem = None
        self.supervisor.learn(self._at.status.world.world)
        self.permission.renew(self.registration.current_lease)
        self._heartbeats.send_if_due(self.supervisor.heartbeat, self._liveness.report)
        self.isolation.check()
        if self._unannounced_leave is not None:
            self._unannounced_leave.check()
        self.supervisor.check()

    def _guarded(self, work: Callable[[], None]) -> bool:
        """Run ``work``; a failed call of the store is reported, and retried in the next
        iteration."""
        try:
            work()
            return True
        except RecordError as error:
            continues = self.store_events.on_broken_record(error)
        except CoordinationError as error:
            continues = self.store_events.on_failed_call(error)
        if continues:
            self._next_wake_s = self._at.clock.monotonic() + NODE_RETRY_S
        return False

    def _take(self) -> list[object]:
        """All messages in the inbox; blocks until there is one or a deadline has passed."""
        self._at.status.watchdog.heartbeat()
        return self._at.inbox.take(max(0.0, self._next_wake_s - self._at.clock.monotonic()))

    def _handle(self, message: object) -> None:
        term = self.succession.term
        match message:
            case BaseEvent(event):
                self.store_events.handle(event)
            case NodesEvent():
                if term is not None:
                    term.on_nodes(message, self._at.status.world.world)
            case Probed():
                if term is not None:
                    term.on_probed(message)
            case ConnectionOpened(node_id, is_leader):
                self.succession.on_connection_opened(node_id, is_leader)
            case ConnectionClosed(node_id, was_leader, fell_silent):
                self.succession.on_connection_closed(node_id, was_leader, fell_silent=fell_silent)
            case ConnectionDropped(node_id):
                self.succession.on_connection_dropped(node_id)
            case LeaderProbed():
                self.succession.on_probed(message, reaches_store=self.isolation.reaches_store)
            case WorkersStart():
                self.supervisor.forget_workers()
            case PushedWorld(record):
                self.store_events.learn_pushed(record)
            case ChangeNode(change):
                self._at.status.change_node(change)
                self.registration.expire()
            case LeaseEnded():
                self.registration.on_lease_ended()
            case Close():
                self._close_by_s = self._at.clock.monotonic() + LEAVING_WORLD_S
            case _:
                self.supervisor.handle(message)

    def _duties(self) -> None:
        now = self._at.clock.monotonic()
        self._next_wake_s = now + (NODE_IDLE_S if self._close_by_s is None else NODE_RETRY_S / 5)
        if self.isolation.is_lost:
            return
        self.isolation.require()
        if not self.registration.is_current and self._at.status.node.nproc > 0:
            self._register()
        refused: CoordinationError | None = None
        for duty in (
            self._publish,
            lambda: self._look_for_replica(now),
            lambda: self.succession.duties(self.registration.current_lease, now),
            self._lead,
            self._judge,
        ):
            # A store that refuses one record must not keep the leader from deciding.
            try:
                duty()
            except (StoreUnreachable, LeaseGone):
                raise
            except CoordinationError as error:
                refused = refused or error
        if (wake_s := self.succession.wake_s) is not None:
            self._next_wake_s = min(self._next_wake_s, max(wake_s, now))
        if refused is not None:
            raise refused

    def _publish(self) -> None:
        if (lease := self.registration.lease) is not None:
            self.supervisor.publish(lease)

    def _look_for_replica(self, now: float) -> None:
        if self.registration.is_current:
            self._next_wake_s = min(self._next_wake_s, self._replica_wait.look(now))
            self._next_wake_s = min(self._next_wake_s, self.supervisor.look_for_replica(now))

    def _judge(self) -> None:
        if (term := self.succession.term) is not None and self._at.status.done is None:
            term.judge(self._at.status.world)

    def _lead(self) -> None:
        term = self.succession.term
        if term is not None and term is not self._end_read_in:
            read_end(self._at)
            self._end_read_in = term
        if term is None or self._at.status.done is not None:
            return
        written, again_s = term.lead(self._at.status.world, self._at.status.done)
        self._next_wake_s = min(self._next_wake_s, again_s)
        if isinstance(written, WorldEntry):
            self._at.status.set_world(written)
        elif written is not None:
            record_end(self._at, written)

    def _register(self) -> None:
        if (world := self.registration.write()) is not None:
            self.store_events.learn_world(world)

    def _end(self) -> None:
        """Leave the store gracefully: best effort; otherwise the lease expires."""
        if self._watch is not None:
            self._watch.close()
        reaches_store = not self.isolation.is_lost
        try:
            if not reaches_store:
                self.succession.end_term()
            else:
                self.succession.resign()
                self.registration.delete()
            self.registration.end_lease(revoke=reaches_store)
        except CoordinationError as error:
            self.store_events.report(error, "this node's lease will expire")
