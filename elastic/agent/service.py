"""An agent: its loop, its registration, and its permission to train."""

from __future__ import annotations

import contextlib
import logging
import math
import signal
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Protocol

from elastic.agent import exporters
from elastic.agent.ending import Leaving, UnannouncedLeave, park, read_end, record_end
from elastic.agent.exporters import MetricsPage
from elastic.agent.health import Routes, routes_of
from elastic.agent.identity import OOM_KILL, OomKillCounter
from elastic.agent.leader import Leadership, Probed
from elastic.agent.liveness import LIMITS, Heartbeats, LivenessCallbacks, LivenessServer
from elastic.agent.metrics import NodeMetrics, NodeReadings
from elastic.agent.node import (
    LIVENESS,
    BaseEvent,
    ChangeNode,
    Close,
    ConnectionClosed,
    ConnectionDropped,
    ConnectionOpened,
    LeaseEnded,
    NodeContext,
    PushedWorld,
    ReplacementEnded,
    WorkersStart,
    WorldEntry,
    publish_change,
)
from elastic.agent.progress import ProgressWriter
from elastic.agent.roster import NodesEvent
from elastic.agent.succession import LeaderProbed, Succession
from elastic.agent.workers import IN_PROCESS, Workers, WorkerSupervisor
from elastic.errors import (
    CoordinationError,
    ElasticError,
    JoinTimeout,
    LeaseGone,
    NodeRefused,
    RecordError,
    StoreFull,
    StoreUnreachable,
)
from elastic.membership.decision import refusal
from elastic.membership.progress import decode_progress
from elastic.membership.records import (
    Done,
    Keys,
    Member,
    Node,
    NodeState,
    Stop,
    WorldRecord,
    decode,
    encode,
)
from elastic.membership.replicas import why_waiting
from elastic.store.keyvalue import (
    Deleted,
    Disconnected,
    Entry,
    KeyValue,
    Lease,
    Put,
    Reconnected,
    Reset,
    Watch,
    WatchEvent,
)
from elastic.telemetry.events import (
    LeaseLost,
    NodeArrived,
    NodeLeaving,
    StoreProblem,
    Waiting,
    WorldEntered,
)
from elastic.tuning.intervals import (
    ASK_MEMBERS_S,
    FINISH_WITHOUT_STORE_S,
    MAIN_THREAD_SLICE_S,
    NODE_IDLE_S,
    STORE_SILENCE_S,
    peer_silence_s,
    permission_s,
)
from elastic.wire.handshake import Credentials
from elastic.wire.messages import Cause, WorldState

# The same where the store answers that it is full: a few attempts, in case it was freed meanwhile.
FINISH_WHEN_FULL_S = 2.0
# The node's thread retries this long after the store did not respond.
NODE_RETRY_S = 0.5
# A leaving node waits this long for the world without it; otherwise the others detect the end of
# its lease.
LEAVING_WORLD_S = 2.0
# The store counts as unreachable after twice the silence after which its watch is checked.
STORE_AWAY_S = 2 * STORE_SILENCE_S
# The node's thread runs every second (NODE_IDLE_S). After a longer pause than this, the process may
# have been frozen while etcd was reachable: it gets this long to reach etcd again. Its workers'
# permission to train was not extended meanwhile.
FROZEN_S = 5.0

# ----------------------------------------------------------------------------
# Whether a node may join a job, and why it waits: it must run with the same limits and version as
# the others, and a replica may need more nodes than have arrived.


def refuse_if_incompatible(store: KeyValue, keys: Keys, node: Node) -> None:
    """Raises :class:`NodeRefused` if this node is incompatible with the job's nodes."""
    entry = store.get(keys.world)
    others = store.list(keys.nodes).entries
    world = decode(WorldRecord, entry.key, entry.value) if entry is not None else None
    reference = _reference(world, others, but=node.node_id)
    why = refusal(node, reference) if reference is not None else None
    if why is not None:
        raise NodeRefused(
            f"node {node.name} cannot join {keys.root}: {why}",
            hint="start it with the same --nnodes, replica_size, library version and kind of "
            "connections (with TLS or without) as the others, "
            "or use another --rdzv-id",
        )


def _reference(
    world: WorldRecord | None, entries: tuple[Entry, ...], *, but: str
) -> WorldRecord | Node | None:
    """The world if any of its members is alive, else the node that joined first: its limits and
    version apply. Invalid records are ignored."""
    nodes = []
    for entry in entries:
        try:
            nodes.append(decode(Node, entry.key, entry.value))
        except RecordError:
            continue
    # The record of a node that has finished or left may remain after its end.
    ended = (NodeState.FINISHED, NodeState.LEAVING, NodeState.FAILED)
    nodes = [n for n in nodes if n.state not in ended]
    if world is not None and any(n.node_id in world.node_ids for n in nodes):
        return world
    others = (n for n in nodes if n.node_id != but)
    return min(others, key=lambda n: (n.joined_at_s, n.node_id), default=None)


class ReplicaWait:
    """The reason why this node has no place in the world when a replica takes several nodes; shown
    in its log and by its probes. The leader derives it from its decision, and the others from that.

    One per agent, on the node's thread. Reads the other nodes from the store, and only while this
    node may wait.
    """

    def __init__(self, context: NodeContext) -> None:
        self._context = context
        self._ask_at_s = -math.inf

    def look(self, now: float) -> float:
        """Called on every iteration once this node is registered; returns the time of the next
        call."""
        status = self._context.status
        node, world = status.node, status.world
        is_inside = world is not None and node.node_id in world.node_ids
        if node.nodes_per_replica == 1 or is_inside or node.running is not None:
            status.waits_for = ""
            return math.inf
        if now >= self._ask_at_s:
            self._ask_at_s = now + ASK_MEMBERS_S
            if (nodes := self._nodes()) is not None:
                self._report(why_waiting(node, world, nodes))
        return self._ask_at_s

    def _nodes(self) -> list[Node] | None:
        """None while the store is unreachable, which the node's thread reports."""
        try:
            entries = self._context.store.list(self._context.keys.nodes).entries
        except CoordinationError:
            return None
        nodes = []
        for entry in entries:
            with contextlib.suppress(RecordError):  # the leader reports it
                nodes.append(decode(Node, entry.key, entry.value))
        return nodes

    def _report(self, why: str) -> None:
        status = self._context.status
        if why and why != status.waits_for:
            self._context.journal.emit(Waiting(reason=f"{status.node.name} waits: {why}"))
        status.waits_for = why


# ----------------------------------------------------------------------------
# Stops a node that has had no contact with etcd for too long, before the others continue without
# it.
#
# The others may form a world without this node ``takeover_s`` after its last sign of life
# (docs/explanation/protocol.md, section 3), so it stops after half of that time. Workers that need
# no restart leave at their next step boundary, as the last ones of a job do, and save; they have a
# quarter of ``takeover_s`` for it.


class IsolationDetector:
    """Called on every iteration of the node's thread."""

    def __init__(
        self,
        context: NodeContext,
        workers: Workers,
        last_contact_s: Callable[[], float] | None,
    ) -> None:
        self._context = context
        self._workers = workers
        self._last_contact_s = last_contact_s
        self._gone_by_s: float | None = None  # deadline of workers that have been asked to leave
        self._is_lost = False
        self._checked_s = context.clock.monotonic()
        self._excused_s = self._thawed_s = -math.inf
        self.watch_is_cut = False  # logged once, and when contact is back

    @property
    def is_lost(self) -> bool:
        """Whether this node has stopped because it cannot reach etcd, and so cannot notify the
        others."""
        return self._is_lost

    @property
    def reaches_store(self) -> bool:
        """False if etcd has been unreachable for a while: a call would block the node's thread, and
        this node would not stop in time."""
        if not self.watch_is_cut or self._last_contact_s is None:
            return True
        return self._context.clock.monotonic() - self._last_contact_s() <= STORE_AWAY_S

    def require(self) -> None:
        """Raise StoreUnreachable unless :attr:`reaches_store`."""
        if not self.reaches_store:
            raise StoreUnreachable(f"etcd has been unreachable for more than {STORE_AWAY_S:g} s")

    def check(self) -> None:
        """Stop this node if it is cut off, once its workers have left or their time has expired."""
        status, now = self._context.status, self._context.clock.monotonic()
        before_s, self._checked_s = self._checked_s, now
        if self._last_contact_s is not None and now - before_s > FROZEN_S:
            self._excuse(self._last_contact_s(), now)
        if self._gone_by_s is not None:
            if status.workers_left or now >= self._gone_by_s:
                self._stop(now)
            return
        if self._last_contact_s is None or not status.has_workers_in_a_world:
            return
        takeover_s = self._context.options.takeover_s
        if now - self._last_contact_s() <= takeover_s / 2 or now - self._thawed_s <= FROZEN_S:
            return
        if not status.node.in_process:
            self._stop(now)
            return
        self._gone_by_s = now + takeover_s / 4
        self._workers.announced.ask_to_leave("this node has lost etcd")

    def _excuse(self, contact_s: float, now: float) -> None:
        """Once per contact: calls to an unreachable etcd also block the thread."""
        if contact_s > self._excused_s:
            self._excused_s, self._thawed_s = contact_s, now

    def _stop(self, now: float) -> None:
        assert self._last_contact_s is not None
        self._is_lost = True
        error = StoreUnreachable(
            f"no contact with etcd for {now - self._last_contact_s():.0f} s, half of takeover_s="
            f"{self._context.options.takeover_s:g}: this node stops, because the others may "
            "form a world without it",
            hint="check the network between this node and etcd, then start it again",
        )
        self._context.status.fail(error)


# ----------------------------------------------------------------------------
# The permission to train: it ends training on a node whose agent can no longer do so.
#
# An agent can freeze (SIGSTOP, a cgroup's freezer, a suspended machine) while its workers continue
# to train. The others take over the job ``takeover_s`` after the last sign of its node, which is
# not earlier than the last renewal of its lease. So the agent permits its workers to begin steps
# and commit saves until ``permission_s`` after that renewal, and extends the permission while its
# loop runs, it holds its lease, and no world has been formed without its node. The clock is
# CLOCK_BOOTTIME, which advances while processes are frozen and the machine sleeps, and is the same
# for agent and workers.
#
# etcd is only needed to extend the permission: an outage shorter than ``takeover_s / 2``, after
# which the agent stops its workers (:class:`IsolationDetector`), has no effect here.
#
# Workers with a link wait when their permission expires, and continue when it is extended. Those
# of scripts without ``elastic.join()`` are ended by the orphan reaper.

_RENEWALS = 64  # per takeover_s: little of a permission is lost, and messages are few


class PermittedWorkers(Protocol):
    """The operations on this node's workers."""

    @property
    def are_all_connected(self) -> bool: ...

    def permit(self, until_s: float) -> None: ...


class Permission:
    """Renewed on every iteration of the node's thread."""

    def __init__(self, context: NodeContext, workers: PermittedWorkers) -> None:
        self._context = context
        self._workers = workers
        self._granted_until_s = -math.inf
        self.on_permission: Callable[[float], object] = lambda until_s: None

    def renew(self, lease: Lease | None) -> None:
        """Extend the permission if this node holds ``lease`` and has not been excluded."""
        if lease is None or lease.lost or self._is_excluded():
            return
        takeover_s = self._context.options.takeover_s
        until_s = lease.renewed_s + permission_s(takeover_s)
        if until_s < self._granted_until_s + takeover_s / _RENEWALS:
            return
        self._granted_until_s = until_s
        self._workers.permit(until_s)
        self.on_permission(math.inf if self._workers.are_all_connected else until_s)

    def _is_excluded(self) -> bool:
        """Whether the job continues without this node, or has ended."""
        node, world = self._context.status.node, self._context.status.world
        if self._context.status.done is not None:
            return True
        return (
            world is not None
            and node.running is not None
            and world.generation > node.running.generation
            and node.node_id not in world.node_ids
            and world.switch_at_step is None
        )


# ----------------------------------------------------------------------------
# This node's key in the store, and the lease that it is attached to.


class Registration:
    """On the node's thread. ``on_new_lease`` is called once one has been granted: keys under the
    former lease are deleted."""

    def __init__(self, context: NodeContext, on_new_lease: Callable[[], object]) -> None:
        self._context = context
        self._on_new_lease = on_new_lease
        self._lease: Lease | None = None
        self._knows_world = False  # the world has been read since this lease was granted
        self.is_current = False  # the record in the store is ours and up to date

    @property
    def lease(self) -> Lease | None:
        """The lease; None before the first one, and once it is known to be lost."""
        return None if self._lease is None or self._lease.lost else self._lease

    @property
    def current_lease(self) -> Lease | None:
        """The lease to which this node's record is attached, expired or not; None without one."""
        return self._lease if self.is_current else None

    def expire(self) -> None:
        """Mark the record for rewriting."""
        self.is_current = False

    def write(self) -> Entry | None:
        """Write the node's record, under a new lease if there is none.

        Returns the world if it has not been read under this lease yet: the node may have been
        excluded while it had no lease, so its workers' permission is not renewed before the world
        is known. Raises :class:`CoordinationError`.
        """
        if self._lease is None or self._lease.lost:
            self._lease = self._context.store.lease(
                self._context.options.lease_s, on_lost=lambda: self._context.post(LeaseEnded())
            )
            self._on_new_lease()
            self._restore_run()  # with a new lease the store may be a new one, too
        node = self._context.status.node
        lease = None if node.outlives_lease else self._lease
        try:
            while not self._put(node, lease):
                self._restore_run()  # somebody has deleted the job's keys
        except LeaseGone:  # the store detected it before the renewal did
            gone, self._lease = self._lease, None
            gone.close(revoke=False)
            raise
        world = None if self._knows_world else self._context.store.get(self._context.keys.world)
        self._knows_world = self.is_current = True
        return world

    def _restore_run(self) -> None:
        """Write what no node's record has and all nodes need, unless it is there."""
        self._knows_world = False
        self._context.secret.restore(self._context.store, self._context.keys)
        self._context.job_folder.restore(self._context.store, self._context.keys)

    def _put(self, node: Node, lease: Lease | None) -> bool:
        """Write the record, unless the store no longer has the secret that this node has: nodes
        with different secrets would not reach each other."""
        context = self._context
        revision = context.store.compare_and_swap(
            context.keys.node(node.node_id),
            encode(node),
            expected_revision=None,
            lease=lease,
            basis=[context.secret.basis(context.keys)],
        )
        return revision is not None

    def on_lease_ended(self) -> None:
        """The lease no longer exists in the store; it may be an earlier one."""
        if self._lease is None or not self._lease.lost:
            return
        self._context.journal.emit(
            LeaseLost(consequence="this node registers again under the same id"),
            level=logging.WARNING,
        )
        self.is_current = False

    def withdraw(self, *, have_workers_ended: bool) -> None:
        """Delete the node's key, unless it records for the others that this node has finished, or
        left. Raises :class:`CoordinationError`."""
        status, node = self._context.status, self._context.status.node
        if not self.is_current or (node.outlives_lease and status.done is None):
            return
        key, world = self._context.keys.node(node.node_id), status.world
        is_tracked = world is not None and node.node_id in {m.node_id for m in world.tracked}
        leaves = node.state in (NodeState.LEAVING, NodeState.FAILED) and status.done is None
        if leaves and have_workers_ended and is_tracked:
            # The world without this node is not written yet, or has no members. Nodes that start
            # later could not tell its departure from a failure of its network, and would wait for
            # takeover_s. (The leader of the next world deletes the record.)
            # (If the job's keys were deleted since, nothing depends on this node.)
            left = replace(node, running=None, in_process=False, replica_start="", replica=())
            self._put(left, None)
        else:
            self._context.store.delete(key)

    def end_lease(self, *, revoke: bool) -> None:
        """Stop renewing the lease, and revoke it. Raises :class:`CoordinationError`."""
        if self._lease is not None:
            self._lease.close(revoke=revoke)


# ----------------------------------------------------------------------------
# The store's events for a node (the world, the leader, the job's end), and its failures.
#
# On the node's thread: the watch on the job's keys posts its events into the node's inbox.


def watch_job(context: NodeContext) -> Watch:
    """Watch the job's keys, except those that only a leader watches, and post changes to the
    inbox."""
    keys = context.keys
    return context.store.watch(
        [
            *(keys.leader, keys.world, keys.done, keys.stop),
            *(keys.hang_verdict, keys.hang_stacks, keys.profile),
        ],
        lambda event: context.post(BaseEvent(event)),
        name="elastic-watch-world",
    )


class StoreEvents:
    """Handles the watch's events, and reports the store's failures."""

    def __init__(
        self,
        context: NodeContext,
        *,
        succession: Succession,
        registration: Registration,
        supervisor: WorkerSupervisor,
        isolation: IsolationDetector,
    ) -> None:
        self._context = context
        self._succession = succession
        self._registration = registration
        self._supervisor = supervisor
        self._isolation = isolation

    # ── the watch ────────────────────────────────────────────────────────────────────────

    def handle(self, event: WatchEvent) -> None:
        """An event of the watch on the job's keys."""
        keys, status = self._context.keys, self._context.status
        self._isolation.watch_is_cut = isinstance(event, Disconnected)
        match event:
            case Reset(snapshot, reason):
                self._on_reset({e.key: e for e in snapshot.entries}, reason)
            case Put(entry) if entry.key == keys.leader:
                self._succession.learn(entry)
            case Put(entry) if entry.key == keys.world:
                status.read_world(entry, self._context.clock.monotonic())
            case Put(entry) if entry.key == keys.done:
                record_end(self._context, decode(Done, entry.key, entry.value))
            case Put(entry) if entry.key == keys.stop:
                status.set_stop(decode(Stop, entry.key, entry.value))
            case Put(entry):
                self._supervisor.on_entry(entry)
            case Deleted(key, _) if key == keys.stop:
                status.set_stop(None)
            case Deleted(key, revision) if key == keys.leader:
                self._succession.learn_absent(revision)
            case Deleted(key, revision) if key == keys.world:
                if revision > status.world_entry.mod_revision:
                    status.set_world_revision(0)
            case Disconnected(error):
                self.report(StoreUnreachable(error), "training continues; reconnecting")
            case Reconnected():
                self._context.journal.emit(StoreProblem(error="", consequence="the store is back"))

    def _on_reset(self, entries: dict[str, Entry], reason: str) -> None:
        keys, status = self._context.keys, self._context.status
        if reason == "wiped":
            self._context.journal.emit(
                StoreProblem(
                    error="the store was wiped or replaced",
                    consequence="this node registers again",
                ),
                level=logging.WARNING,
            )
            self._registration.expire()
            self._succession.forget()
            status.set_world_revision(0)
        if (leader := entries.get(keys.leader)) is not None:
            self._succession.learn(leader)
        else:
            self._succession.learn_absent()
        if (verdict := entries.get(keys.hang_verdict)) is not None:
            self._supervisor.on_entry(verdict)
        stop = entries.get(keys.stop)
        status.set_stop(decode(Stop, stop.key, stop.value) if stop is not None else None)
        if (done := entries.get(keys.done)) is not None:
            record_end(self._context, decode(Done, done.key, done.value))
        if (world := entries.get(keys.world)) is not None:
            status.read_world(world, self._context.clock.monotonic())
        else:
            status.set_world_revision(0)

    # ── failures ─────────────────────────────────────────────────────────────────────────

    def on_broken_record(self, error: RecordError) -> bool:
        """A record is invalid. Returns whether the node continues, and retries."""
        if self._context.status.node.running is None and self._context.status.world is None:
            self._context.status.fail(error)  # a joining node cannot handle it in a meaningful way
            return False
        self.report(error, "training continues")
        return True

    def on_failed_call(self, error: CoordinationError) -> bool:
        """The store has refused a call or not responded. Returns whether the node continues, and
        retries."""
        if isinstance(error, LeaseGone):
            self._registration.expire()
        elif not isinstance(error, StoreUnreachable) and self._context.status.node.running is None:
            self._context.status.fail(error)
            return False
        consequence = "training continues; trying again"
        if error.hint and not isinstance(error, StoreUnreachable):
            consequence += f"; {error.hint}"
        self.report(error, consequence)
        return True

    def report(self, error: ElasticError, consequence: str) -> None:
        """Write a problem of the store to the journal, unless it is the current one."""
        known, self._context.status.store_problem = self._context.status.store_problem, error
        if known is None or error.message != known.message:
            self._context.journal.emit(
                StoreProblem(error=error.message, consequence=consequence), level=logging.WARNING
            )


# ----------------------------------------------------------------------------
# The node's thread: owns its key and lease, learns the world, performs a leader's tasks.
#
# It is fed through one inbox by watches, lease, liveness server, probes and the main thread, so it
# handles one event at a time.


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
        self._context = context
        status, options, secret = context.status, context.options, context.secret
        node = status.node
        self._heartbeats = Heartbeats(node.node_id, context.clock)
        self.liveness = LivenessServer(
            node.address,
            self._liveness_callbacks(),
            credentials=Credentials(
                key=lambda: secret.key(LIVENESS), identity=node.node_id, tls=context.tls
            ),
            limits=replace(LIMITS, silence_s=peer_silence_s(options.lease_s)),
            clock=context.clock,
        )
        self.succession = Succession(self._context, self.liveness)
        self.supervisor = WorkerSupervisor(self._context, oom_kills, metrics)
        self.registration = Registration(self._context, self.supervisor.register_again)
        self._replica_wait = ReplicaWait(self._context)
        workers = self.supervisor.workers
        self.isolation = IsolationDetector(self._context, workers, last_contact_s)
        self.permission = Permission(self._context, workers)
        self._unannounced_leave = UnannouncedLeave(
            self._context,
            lambda: workers.announced.current,
            workers.announced.ask_to_leave,
            lambda: self.isolation.watch_is_cut or bool(status.store_problem),
        )
        self._progress = ProgressWriter(
            self._context,
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
        post = self._context.post
        return LivenessCallbacks(
            on_opened=lambda node_id, is_leader: post(ConnectionOpened(node_id, is_leader)),
            on_closed=lambda node_id, was_leader: post(ConnectionClosed(node_id, was_leader)),
            on_silent=lambda node_id, was_leader: post(
                ConnectionClosed(node_id, was_leader, fell_silent=True)
            ),
            on_dropped=lambda node_id: post(ConnectionDropped(node_id)),
            on_world=lambda record: post(PushedWorld(record)),
            on_heartbeat=self._heartbeats.record,
            on_error=self._context.status.fail,
        )

    def node_states(self) -> Mapping[NodeState, int] | None:
        """The number of nodes in each state, if this one leads. From any thread, without a lock."""
        term = self.succession.term
        return term.roster.states() if term is not None else None

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        self.liveness.start()
        self.supervisor.start()
        self._progress.start()
        self._watch = watch_job(self._context)
        self._thread.start()

    def close(self) -> None:
        """Resign, delete the node's key, end the lease, join. Idempotent."""
        self._context.post(Close())
        if self._thread.is_alive():
            self._thread.join()
        self.liveness.close()
        self._progress.close()
        self.supervisor.close()
        self.succession.join_threads()

    # ── the thread ───────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        try:
            while not self._may_end():
                self._turn()
        except BaseException as error:
            self._context.status.fail(error)
            raise
        finally:
            self._end()
            self._context.status.watchdog.rest()

    def _may_end(self) -> bool:
        """Whether the thread may end: it is closing and, if this node leaves, a world without it
        exists or the time for that has expired. So the last node to leave gracefully leaves an
        empty world behind, not one of dead members for which a later start would wait."""
        if self._close_by_s is None:
            return False
        status, node = self._context.status, self._context.status.node
        world = status.world
        return (
            node.state not in (NodeState.LEAVING, NodeState.FAILED)
            or world is None
            or node.node_id not in world.node_ids
            or status.done is not None
            or self.isolation.is_lost
            or bool(status.store_problem)
            or self._context.clock.monotonic() >= self._close_by_s
        )

    def _turn(self) -> None:
        for message in self._take():
            self._guarded(lambda message=message: self._handle(message))  # type: ignore[misc]
            self.supervisor.announce(self._context.status.world)
        if self._guarded(self._duties):
            self._context.status.store_problem = None
        self.supervisor.announce(self._context.status.world)
        self.permission.renew(self.registration.current_lease)
        self._heartbeats.send_if_due(self.supervisor.heartbeat, self.liveness.report)
        self.isolation.check()
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
            self._next_wake_s = self._context.clock.monotonic() + NODE_RETRY_S
        return False

    def _take(self) -> list[object]:
        """All messages in the inbox; blocks until there is one or a deadline has passed."""
        self._context.status.watchdog.heartbeat()
        return self._context.inbox.take(
            max(0.0, self._next_wake_s - self._context.clock.monotonic())
        )

    def _handle(self, message: object) -> None:
        term = self.succession.term
        match message:
            case BaseEvent(event):
                self.store_events.handle(event)
            case NodesEvent():
                if term is not None:
                    term.on_nodes(message, self._context.status.world)
            case Probed():
                if term is not None:
                    term.on_probed(message)
            case ConnectionOpened(node_id, is_leader):
                self.succession.on_connection_opened(node_id, is_leader)
            case ConnectionClosed(node_id, was_leader, fell_silent):
                self.succession.on_connection_closed(node_id, was_leader, fell_silent=fell_silent)
            case ConnectionDropped(node_id):
                self.succession.connections.dropped(node_id)
            case LeaderProbed():
                self.succession.on_probed(message, reaches_store=self.isolation.reaches_store)
            case WorkersStart():
                self.supervisor.forget_workers()
            case PushedWorld(record):
                self._context.status.read_pushed_world(record, self._context.clock.monotonic())
            case ChangeNode(change):
                self._context.status.change_node(change)
                self.registration.expire()
            case LeaseEnded():
                self.registration.on_lease_ended()
            case Close():
                self._close_by_s = self._context.clock.monotonic() + LEAVING_WORLD_S
            case _:
                self.supervisor.handle(message)

    def _duties(self) -> None:
        now = self._context.clock.monotonic()
        self._next_wake_s = now + (NODE_IDLE_S if self._close_by_s is None else NODE_RETRY_S / 5)
        if self.isolation.is_lost:
            return
        self.isolation.require()
        if not self.registration.is_current and self._context.status.node.nproc > 0:
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
        if (term := self.succession.term) is not None and self._context.status.done is None:
            term.judge(self._context.status.world_entry)

    def _lead(self) -> None:
        term = self.succession.term
        if term is not self._end_read_in:
            if term is not None:
                read_end(self._context)
            self._end_read_in = term
        if term is None or self._context.status.done is not None:
            return
        written, again_s = term.lead(self._context.status.world_entry, self._context.status.done)
        self._next_wake_s = min(self._next_wake_s, again_s)
        if isinstance(written, WorldEntry):
            self._context.status.set_world(written)
        elif written is not None:
            record_end(self._context, written)

    def _register(self) -> None:
        if (world := self.registration.write()) is not None:
            self._context.status.read_world(world, self._context.clock.monotonic())

    def _end(self) -> None:
        """Leave the store gracefully: best effort; otherwise the lease expires."""
        if self._watch is not None:
            self._watch.close()
        reaches_store = not self.isolation.is_lost
        try:
            if not reaches_store:
                self.succession.end_term()
            else:
                # (Otherwise this thread has died, and the workers may still run.)
                is_closed = self._close_by_s is not None
                # First: without a leader, others campaign once all have recorded their departure.
                try:
                    self.registration.withdraw(have_workers_ended=is_closed)
                except StoreFull as error:  # it still accepts deletions
                    self.store_events.report(error, "this node's lease will expire")
                self.succession.resign()
            self.registration.end_lease(revoke=reaches_store)
        except CoordinationError as error:
            self.store_events.report(error, "this node's lease will expire")


# ----------------------------------------------------------------------------
# torchrun's main thread waits until its node is in a world that it has not run yet.


class WorldWait:
    """One per node. Reads the node's status, and queries the store for the state of its members."""

    def __init__(self, context: NodeContext, loop: NodeLoop) -> None:
        self._store = context.store
        self._keys = context.keys
        self._options = context.options
        self._status = context.status
        self._clock = context.clock
        self._loop = loop

    def run(self) -> WorldRecord | None:
        """Block until this node is in a world that it has not run yet.

        None: the job runs without this node and changes worlds without a restart: workers are
        to be started now, and join when they are ready.

        Raises:
            JoinTimeout: none within ``join_timeout_s``, and no healthy world that is full.
            JobFailed, BudgetSpent: the job has ended without success.
            JobSucceeded: it has ended with success.
        """
        status = self._status
        deadline = self._clock.monotonic() + self._options.join_timeout_s
        ask_at_s = 0.0
        while True:
            status.watchdog.heartbeat()
            with status.changed:
                status.raise_if_over()
                if not self._loop.alive:
                    raise CoordinationError("this node's service was closed while it waited")
                world = status.world
                if world is not None and self.is_for_us(world):
                    return world
                now = self._clock.monotonic()
                if self._is_spare(world) or status.stop is not None:
                    deadline = now + self._options.join_timeout_s
            # Not under the lock: this calls the store.
            if now >= deadline:
                raise self._join_timeout(world)
            if world is not None and now >= ask_at_s:
                if self._is_to_be_joined(world):
                    return None
                ask_at_s = now + ASK_MEMBERS_S
            with status.changed:
                if status.world is world:
                    status.changed.wait(min(MAIN_THREAD_SLICE_S, max(0.0, deadline - now)))

    def is_for_us(self, world: WorldRecord) -> bool:
        """Whether this node starts workers for this world."""
        # (A world whose members keep their workers is never entered by starting some: if it
        # contains this node, it was written before the leader detected their end.)
        return (
            world.state is WorldState.ACTIVE
            and world.mode != IN_PROCESS
            and self._status.node.node_id in world.node_ids
            and world.generation > self._status.node.arrived_for
        )

    def _is_to_be_joined(self, world: WorldRecord) -> bool:
        """Whether the members keep their workers, so that ours warm up and join them."""
        if self._status.node.node_id in world.node_ids or self._options.mode != IN_PROCESS:
            return False
        return world.mode == IN_PROCESS or self._members_keep_workers(world)

    def _members_keep_workers(self, world: WorldRecord) -> bool:
        """Whether all members of a first world have reported that their workers are ready."""
        try:
            # Asked twice a second, by every spare: of a script that keeps no workers, the first
            # member alone says so.
            first = self._store.get(self._keys.node(world.node_ids[0])) if world.members else None
            if first is not None and not decode(Node, first.key, first.value).in_process:
                return False
            entries = self._store.list(self._keys.nodes).entries
            nodes = [decode(Node, entry.key, entry.value) for entry in entries]
        except CoordinationError:
            return False
        members = [n for n in nodes if n.node_id in world.id_set]
        return len(members) > 0 and all(n.in_process for n in members)

    def _is_spare(self, world: WorldRecord | None) -> bool:
        """Whether a healthy world has no room for this node, or lacks the other nodes of its
        replica: a spare waits without a time limit."""
        return (
            world is not None
            and world.state is WorldState.ACTIVE
            and self._status.node.node_id not in world.node_ids
            and (len(world.members) >= world.max_nodes or world.nodes_per_replica > 1)
        )

    def _join_timeout(self, world: WorldRecord | None) -> JoinTimeout:
        node = self._status.node
        members = f"the last world: {world.reason}" if world else "no world was ever formed"
        problem = self._status.store_problem
        report = f"; the store: {problem.message}" if problem is not None else ""
        why = self._why_waiting()
        return JoinTimeout(
            f"no world with this node within join_timeout_s={self._options.join_timeout_s:g} "
            f"under {self._keys.root} (min {node.min_nodes}, max {node.max_nodes}; "
            f"{f'not admitted: {why}; ' if why else ''}{members}{report})",
            hint="start more nodes with the same --rdzv-id, lower the minimum of --nnodes, "
            "or raise join_timeout_s",
        )

    def _why_waiting(self) -> str:
        """The leader's reason not to admit this node; empty if there is none."""
        try:
            entry = self._store.get(self._keys.progress)
            progress = decode_progress(entry.key, entry.value) if entry is not None else None
        except CoordinationError:
            return ""
        mine = self._status.node.node_id
        waiting = progress.waiting if progress is not None else ()
        return next((w.reason for w in waiting if w.node_id == mine), "")

    def must_restart(self, world: WorldRecord, node: Node, since_s: float) -> bool:
        """Whether workers that could change worlds in process cannot enter this one."""
        is_member = node.node_id in world.node_ids
        if node.running is None:  # ready, and in no world yet
            # The world in which a worker died stays the newest until the leader learns that its
            # replacement is ready.
            is_over = world.generation <= node.arrived_for
            return is_member and world.mode != IN_PROCESS and not is_over
        if world.generation <= node.running.generation or node.state is NodeState.LEAVING:
            return False
        if not is_member and self._leaves_at_switch(world, since_s):
            return False
        return not is_member or world.mode != IN_PROCESS

    def _leaves_at_switch(self, world: WorldRecord, since_s: float) -> bool:
        """Whether the workers continue until a planned world without this node begins, as those of
        a leaving node do: ending them earlier would interrupt a step of the others."""
        left_s = since_s + self._options.leave_grace_s - self._clock.monotonic()
        # (A world without members: the last replica leaves, all its nodes at the same boundary.)
        is_planned = world.switch_at_step is not None or not world.members
        return is_planned and not self._status.workers_left and left_s > 0

    def raise_if_paused_for_long(self, world: WorldRecord, since_s: float) -> None:
        paused_s = self._clock.monotonic() - since_s
        if world.state is WorldState.PAUSED and paused_s > self._options.join_timeout_s:
            raise self._join_timeout(world)


# ----------------------------------------------------------------------------
# The node's side of the protocol, for torchrun's main thread.
#
# Arrive, wait for a world, enter it, check for a newer one, leave or finish. The work happens on
# the thread of the service (below); the two share the node's status.


class NodeService:
    """One node of the job. Start once, close once."""

    def __init__(
        self,
        context: NodeContext,
        *,
        last_contact_s: Callable[[], float] | None = None,
        oom_kills: OomKillCounter | None = None,
        metrics: NodeMetrics | None = None,
    ) -> None:
        self._context = context
        self._journal = context.journal
        self._oom_kills = oom_kills if oom_kills is not None else OomKillCounter()
        self.status = context.status
        self.loop = NodeLoop(
            context, oom_kills=self._oom_kills, last_contact_s=last_contact_s, metrics=metrics
        )
        self.supervisor = self.loop.supervisor
        self.readings = NodeReadings(
            status=self.status,
            metrics=metrics if metrics is not None else NodeMetrics(context.clock),
            node_states=self.loop.node_states,
            etcd_contact_age_s=lambda: (
                context.clock.monotonic() - last_contact_s() if last_contact_s is not None else None
            ),
        )
        self.world_wait = WorldWait(context, self.loop)

    @property
    def node_id(self) -> str:
        return self.status.node.node_id

    @property
    def member(self) -> Member:
        """This node as a member of a world."""
        return self.status.node.as_member()

    @property
    def announced_world(self) -> WorldRecord | None:
        """The newest world with this node that was announced to its workers: they run it, or are
        about to."""
        return self.status.announced_world or self.status.running

    def before_announcing(self, act: Callable[[], object]) -> None:
        """Call ``act`` before a new world is announced to workers, on the node's thread."""
        self.status.before_announcing = act

    def position(self) -> dict[str, int | None]:
        """The generation that this node's workers run, and the step that they have reported."""
        running, step_rate = self.status.node.running, self.status.step_rate
        return {
            "generation": running.generation if running is not None else None,
            "step": step_rate.step if step_rate is not None else None,
        }

    def peer_addresses(self, world: WorldRecord | None) -> tuple[str, ...]:
        """The addresses of the other nodes of a world, that of rank 0 first.

        None: those of the world that runs without this node.
        """
        world = world if world is not None else self.status.world
        members = world.members if world is not None else ()
        return tuple(m.liveness_host for m in members if m.node_id != self.node_id)

    def start(self) -> None:
        """Listen and begin to learn; the node registers with its first arrival."""
        port = self.loop.liveness.port
        self.status.change_node(lambda node: replace(node, liveness_port=port))
        self.loop.start()

    def arrive(
        self,
        *,
        nproc: int,
        role: str,
        ports: tuple[int, ...],
        failure: str | None,
        failure_exit_code: int | None,
    ) -> None:
        """Register that this node waits for a world, and why it left the last one.

        Raises:
            NodeRefused: this node is incompatible with the job.
            CoordinationError: the store cannot be read.
        """
        node = self.status.node
        if node.running is None:
            refuse_if_incompatible(
                self._context.store, self._context.keys, replace(node, nproc=nproc)
            )
        self.status.stopping = True  # until new workers are started
        after = node.running.generation if node.running else node.arrived_for
        is_oom_kill = failure_exit_code == -signal.SIGKILL and (
            node.failure_is_oom_kill or self._oom_kills.has_killed()
        )
        kernel_log = (
            self._context.kernel_log.excerpt().lines if failure_exit_code is not None else ()
        )
        if is_oom_kill and OOM_KILL not in (failure or ""):
            failure = f"{failure or 'a worker was ended by SIGKILL'}: {OOM_KILL}"
        is_recovery = after > 0 and failure is None  # of others: the leader's log has their origin
        self._journal.emit(
            NodeArrived(after_generation=after, failure=failure, exit_code=failure_exit_code),
            level=logging.DEBUG if is_recovery else logging.INFO,
        )
        self.change(
            lambda node: replace(
                node,
                nproc=nproc,
                role=role,
                ports=ports,
                state=NodeState.ARRIVED,
                in_process=False,
                running=None,
                replica_start="",
                replica=(),
                mesh="",
                arrived_for=after,
                # A worker without an error file, as after sys.exit(), has announced its error.
                failure=failure if failure_exit_code is None else failure or node.failure,
                failure_exit_code=failure_exit_code,
                failure_step=self.status.failure_step if failure_exit_code is not None else None,
                failure_is_oom_kill=is_oom_kill,
                failure_kernel_log=node.failure_kernel_log or kernel_log,
            )
        )
        # After the change: while the node still counts as running its last world, the next one
        # without it would be announced to the workers that are started now.
        self._context.post(WorkersStart())

    def warm_up(self) -> None:
        """The main thread starts workers that are in no world yet."""
        self._begin_start()
        self.change(lambda node: replace(node, state=NodeState.STARTING, running=None))

    def _begin_start(self) -> None:
        """torchrun is about to start the workers: called before the node's state changes."""
        self.status.starts += 1
        self.status.stopping = False
        self.status.failure_step = None
        self._oom_kills.mark()
        self._context.kernel_log.mark()

    def enter(self, world: WorldRecord, *, waited_s: float) -> None:
        """The main thread passes ``world`` to its workers."""
        self._begin_start()
        self._journal.emit(
            WorldEntered(
                generation=world.generation,
                first_rank=world.first_rank_of(self.node_id),
                size=world.size,
                waited_s=waited_s,
            ),
            level=logging.DEBUG if self.status.starts > 1 else logging.INFO,
        )
        self.change(
            lambda node: replace(
                node,
                state=NodeState.STARTING,
                running=world,
                failure=None,
                failure_exit_code=None,
                failure_step=None,
                failure_is_oom_kill=False,
                failure_kernel_log=(),
            )
        )

    def newer_world(self) -> bool:
        """Whether the workers of this node run a world that is no longer the newest.

        Raises like :meth:`WorldWait.run` once the job has failed.
        """
        with self.status.changed:
            self.status.raise_if_failed()
            entry, node = self.status.world_entry, self.status.node
        world, running = entry.world, node.running
        if world is None:
            return False
        if node.in_process:
            restarts = self.world_wait.must_restart(world, node, entry.since_s)
            self.world_wait.raise_if_paused_for_long(world, entry.since_s)
        else:
            restarts = running is not None and world.generation > running.generation
            # (Its workers wait for the rest of a replica, and it was taken into a first world.)
            restarts |= bool(node.replica_start) and self.world_wait.is_for_us(world)
        restarts = restarts or self.status.replica_is_lost
        self.status.stopping = self.status.stopping or restarts
        return restarts

    def on_permission(self, permit: Callable[[float], object]) -> None:
        """Call ``permit`` with the end of the workers' permission whenever it is extended."""
        self.loop.permission.on_permission = permit

    def allow_replacement(self, is_allowed: bool) -> None:
        """Whether a single worker that dies from now on can be replaced."""
        # A death ends the collectives of all workers of a replica: if a replica takes several
        # nodes, the siblings have no state to keep.
        self.status.can_replace = is_allowed and self.status.node.nodes_per_replica == 1

    @property
    def is_replacing(self) -> bool:
        """Whether workers have died and their replacements are not ready yet."""
        return bool(self.status.to_replace)

    def is_to_be_replaced(self, pid: int) -> bool | None:
        """Whether this failed worker is to be replaced while its siblings keep their processes.

        None: the node's thread has not decided it yet.
        """
        return self.status.is_to_be_replaced(pid)

    def has_failed_with_0(self, pid: int) -> bool | None:
        """Whether this worker, which has ended with exit code 0, has left others that train.

        None: the node's thread does not know of its end yet.
        """
        return self.status.has_failed_with_0(pid)

    def replacement_started(self, pid: int) -> None:
        """A process was started in the place of a dead worker."""
        self.status.unconnected.add(pid)

    def replacement_ended(self, pid: int, local_rank: int, exit_code: int) -> None:
        """Notify the node's thread that a worker has ended, unless the link has noticed it."""
        if pid in self.status.unconnected:
            self._context.post(ReplacementEnded(pid, local_rank, exit_code))

    @property
    def has_first_rank(self) -> bool:
        """Whether rank 0 of the current world is one of this node's workers."""
        running = self.status.running
        return running is not None and running.node_ids[:1] == (self.node_id,)

    @property
    def can_leave_gracefully(self) -> bool:
        """Whether the workers can be asked to leave at a step boundary."""
        return self.status.node.in_process and self.status.node.running is not None

    @property
    def has_left(self) -> bool:
        """Whether the workers have left the job, after :meth:`leave`."""
        return self.status.workers_left

    def expect_end_of_workers(self) -> None:
        """The workers are about to be ended deliberately: that is not a failure."""
        self.status.stopping = True

    @property
    def is_stopped(self) -> bool:
        """Whether `elastic stop` has stopped the job that this node's workers train."""
        return self.status.stop is not None and self.status.running is not None

    @property
    def job_is_done(self) -> bool:
        """Whether the job has ended with success."""
        return self.status.done is not None and self.status.done.exit_code == 0

    def leave(self, reason: str, *, failed: bool = False) -> None:
        """Let the others continue without this node. Safe in a signal handler."""
        state = NodeState.FAILED if failed else NodeState.LEAVING
        self._context.post(ChangeNode(lambda node: replace(node, state=state)))
        self._journal.emit(NodeLeaving(reason=reason, failed=failed))

    def finished(self) -> None:
        """This node's workers succeeded."""
        self.change(lambda node: replace(node, state=NodeState.FINISHED))

    def finish(self, *, patience_s: float = FINISH_WITHOUT_STORE_S) -> Done | WorldRecord | None:
        """This node's workers succeeded: wait until those of every live member have.

        Returns how the job ended, or the world in which this node is to run the end of the script
        again, because another one was lost in it. None if the store was unreachable for
        ``patience_s``, or is full: the outcome is unknown, and :attr:`NodeStatus.store_problem`
        says why.
        """
        self.finished()
        status, problem_since_s = self.status, None
        # A full store does not recover by itself. (Its last answer may precede this node's end.)
        when_full_s = FINISH_WHEN_FULL_S if math.isfinite(patience_s) else patience_s
        with status.changed:
            while status.done is None:
                status.watchdog.heartbeat()
                if status.fatal is not None or not self.loop.alive:
                    return None
                if (world := status.world) is not None and self._is_to_run_the_end_in(world):
                    return world
                now = self._context.clock.monotonic()
                problem_since_s = (problem_since_s or now) if status.store_problem else None
                limit_s = when_full_s if isinstance(status.store_problem, StoreFull) else patience_s
                if problem_since_s is not None and now - problem_since_s > limit_s:
                    return None
                status.changed.wait(MAIN_THREAD_SLICE_S)
            return status.done

    def _is_to_run_the_end_in(self, world: WorldRecord) -> bool:
        running = self.status.node.running
        is_newer = running is not None and world.generation > running.generation
        return is_newer and world.cause is Cause.UNFINISHED and self.world_wait.is_for_us(world)

    @property
    def probes(self) -> Routes:
        """The responses of ``/livez``, ``/readyz`` and ``/metrics``."""
        probes = routes_of(self.status)
        return {**probes, "/metrics": self._metrics_page}

    def _metrics_page(self) -> MetricsPage:
        run_id, node = self._context.keys.run_id, self.status.node.name
        return exporters.render(self.readings, run_id=run_id, node=node)

    def close(self) -> None:
        """Leave the store gracefully: resign, delete the key, end the lease. Idempotent."""
        self.loop.close()
        self._context.store.close()
        self._context.kernel_log.close()

    def park(self, leaving: Leaving) -> None:
        """After :meth:`close`, if the job has ended: keep running until SIGTERM."""
        if self.status.done is not None:
            park(self.status, self.status.done, leaving, self._journal, self._context.clock)

    def change(self, change: Callable[[Node], Node]) -> None:
        """Change the node's record immediately, as seen by this thread, and publish it."""
        publish_change(self._context, change)
