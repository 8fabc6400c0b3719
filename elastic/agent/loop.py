"""The node's thread: owns its key and lease, learns the world, does a leader's duties.

Fed through one inbox by watches, lease, liveness server, probes and the main thread, so no two
things ever happen at once here.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace

from elastic.agent.hangs import Hangs, RanksAreQuiet, StacksTaken, WorkerHung, WorldHung
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
from elastic.agent.workers import LinkSaid, WorkerEnded, Workers
from elastic.clock import Clock
from elastic.errors import (
    CoordinationError,
    ElasticError,
    LeaseGone,
    RecordError,
    StoreUnreachable,
)
from elastic.events import FailureTimelineWritten, JobEnded, LeaseLost, StoreProblem
from elastic.hangs.report import ReportFolder
from elastic.hangs.watch import Supervised
from elastic.leadership.leader import NodesEvent
from elastic.leadership.prober import Probed
from elastic.leadership.progress_writer import ProgressWriter
from elastic.leadership.succession import LeaderProbed, Succession
from elastic.link.protocol import FlightTrace, ProgressPage, StepReport
from elastic.liveness.channel import LIMITS, LivenessServer
from elastic.membership import failure_timeline
from elastic.membership.decision import Policy
from elastic.membership.records import Done, Keys, NodeState, decode, encode
from elastic.node.context import NodeContext
from elastic.node.oom_kills import OomKillCounter
from elastic.node.run_secret import LIVENESS, RunSecret
from elastic.node.status import NodeStatus, WorldEntry
from elastic.node.step_times import StepTimesReport
from elastic.secure_channel.tls import Tls
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
from elastic.telemetry.journal import EventSink
from elastic.tuning.agent_intervals import LEAVING_WORLD_S, NODE_IDLE_S, NODE_RETRY_S
from elastic.tuning.agent_options import AgentOptions
from elastic.tuning.timeouts import peer_silence_s


class NodeLoop:
    """The thread ``elastic-node``. Errors that end it are on the board."""

    def __init__(
        self,
        *,
        store: KeyValue,
        keys: Keys,
        secret: RunSecret,
        options: AgentOptions,
        policy: Policy,
        status: NodeStatus,
        clock: Clock,
        journal: EventSink,
        last_contact_s: Callable[[], float] | None,
        oom_kills: OomKillCounter,
        tls: Tls | None = None,
    ) -> None:
        self._at = NodeContext(
            store=store,
            keys=keys,
            secret=secret,
            options=options,
            policy=policy,
            status=status,
            clock=clock,
            journal=journal,
            post=self.post,
            tls=tls,
        )
        self._inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
        node = status.node
        self._liveness = LivenessServer(
            node.node_id,
            node.address,
            lambda node_id, was_leader: self.post(ConnectionClosed(node_id, was_leader)),
            status.fail,
            on_world=lambda record: self.post(PushedWorld(record)),
            on_opened=lambda node_id, is_leader: self.post(ConnectionOpened(node_id, is_leader)),
            on_dropped=lambda node_id: self.post(ConnectionDropped(node_id)),
            on_silent=lambda node_id, was_leader: self.post(
                ConnectionClosed(node_id, was_leader, fell_silent=True)
            ),
            key=lambda: secret.key(LIVENESS),
            tls=tls,
            limits=replace(LIMITS, silence_s=peer_silence_s(options.lease_s)),
            clock=clock,
        )
        self._succession = Succession(self._at, self._liveness)
        self._workers = Workers(self._at, oom_kills) if options.mode == "in-process" else None
        self._hangs = Hangs(self._at) if options.hang_detection != "off" else None
        self._step_times = StepTimesReport(self._at)
        self._isolation = IsolationDetector(self._at, self._workers, last_contact_s)
        self.permission = Permission(self._at, self._workers)
        self._progress = ProgressWriter(
            self._at,
            lambda: self._lease if self._registered and self._succession.term else None,
            lambda: self._hangs.checkpoint_step if self._hangs is not None else None,
        )
        self._lease: Lease | None = None
        self._registered = False  # the record in the store is ours and up to date
        self._knows_world = False  # the world has been read since this lease was granted
        self._watch: Watch | None = None
        self._close_by_s: float | None = None  # set once: the end, at the latest
        self._next_wake_s = 0.0
        self._thread = threading.Thread(target=self._run, name="elastic-node", daemon=True)

    @property
    def liveness_port(self) -> int:
        return self._liveness.port

    @property
    def link_path(self) -> str:
        """Where workers say hello; empty in restart mode."""
        return self._workers.path if self._workers is not None else ""

    def keep_link_key(self) -> None:
        """Workers are about to start. From any thread."""
        if self._workers is not None:
            self._workers.keep_key()

    def supervise(self, workers: Iterable[Supervised]) -> None:
        """The processes that torchrun supervises. From its thread."""
        if self._hangs is not None:
            self._hangs.supervise(workers)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        self._liveness.start()
        if self._workers is not None:
            self._workers.start()
        if self._hangs is not None:
            self._hangs.start()
        self._progress.start()
        keys = self._at.keys
        self._watch = self._at.store.watch(
            [keys.leader, keys.world, keys.done, keys.hang_verdict, keys.hang_stacks],
            lambda event: self.post(BaseEvent(event)),
            name="elastic-watch-world",
        )
        self._thread.start()

    def post(self, message: object) -> None:
        """Put into the inbox; from any thread, also from a signal handler."""
        self._inbox.put(message)

    def close(self) -> None:
        """Resign, delete the node's key, end the lease, join. Idempotent."""
        self.post(Close())
        if self._thread.is_alive():
            self._thread.join()
        self._liveness.close()
        self._progress.close()
        if self._hangs is not None:
            self._hangs.close()
        if self._workers is not None:
            self._workers.close()
        self._succession.join_threads()

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
        """Closing, and if this node leaves: the world goes on without it, or time is up. So
        the last one to leave in order leaves an empty world behind, not one of dead members
        that a later start would have to wait for."""
        if self._close_by_s is None:
            return False
        status, node = self._at.status, self._at.status.node
        world = status.world.world
        return (
            node.state not in (NodeState.LEAVING, NodeState.FAILED)
            or world is None
            or node.node_id not in world.node_ids
            or status.done is not None
            or self._isolation.is_lost
            or bool(status.store_problem)
            or self._at.clock.monotonic() >= self._close_by_s
        )

    def _turn(self) -> None:
        for message in self._take():
            self._guarded(lambda message=message: self._handle(message))  # type: ignore[misc]
            self._tell_workers()
        if self._guarded(self._duties):
            self._at.status.store_problem = ""
        self._tell_workers()
        self.permission.renew(self._lease if self._registered else None)
        self._isolation.check()

    def _tell_workers(self) -> None:
        if self._workers is not None:
            self._workers.learn(self._at.status.world.world)
            if self._hangs is not None:
                self._hangs.learn(self._workers.world)

    def _guarded(self, work: Callable[[], None]) -> bool:
        """Run; trouble with the store is reported, and tried again."""
        try:
            work()
        except RecordError as error:
            self._on_broken_record(error)
        except CoordinationError as error:
            self._on_store_problem(error)
        else:
            return True
        return False

    def _take(self) -> list[object]:
        """Everything in the inbox; blocks until there is something or a deadline has come."""
        self._at.status.watchdog.beat()
        messages: list[object] = []
        timeout = max(0.0, self._next_wake_s - self._at.clock.monotonic())
        try:
            messages.append(self._inbox.get(timeout=timeout))
            while True:
                messages.append(self._inbox.get_nowait())
        except queue.Empty:
            return messages

    def _handle(self, message: object) -> None:
        term = self._succession.term
        match message:
            case BaseEvent(event):
                self._on_base(event)
            case NodesEvent(event):
                if term is not None:
                    term.on_nodes(event, self._at.status.world.world)
            case Probed():
                if term is not None:
                    term.on_probed(message)
            case ConnectionOpened(node_id, is_leader):
                self._succession.on_connection_opened(node_id, is_leader)
            case ConnectionClosed(node_id, was_leader, fell_silent):
                self._succession.on_connection_closed(node_id, was_leader, fell_silent=fell_silent)
            case ConnectionDropped(node_id):
                self._succession.on_connection_dropped(node_id)
            case LeaderProbed():
                self._succession.on_probed(message, reaches_store=self._isolation.reaches_store)
            case LinkSaid(worker, ProgressPage() as page):
                if self._hangs is not None:
                    self._hangs.on_page(worker, page)
            case LinkSaid(worker, FlightTrace() as trace):
                if self._hangs is not None:
                    self._hangs.on_flight(worker, trace)
            case LinkSaid(worker, StepReport(times=times)):
                self._step_times.on_report(worker.pid, worker.local_rank, times)
            case LinkSaid(worker, said):
                if self._workers is not None:
                    self._workers.on_said(worker, said)
            case WorkerEnded(worker, death):
                if self._hangs is not None:
                    self._hangs.on_ended(worker.pid)
                self._step_times.on_ended(worker.pid)
                if self._workers is not None:
                    self._workers.on_ended(worker, death)
            case RanksAreQuiet():
                if self._hangs is not None:
                    self._hangs.on_quiet(message)
                if message.ranks and self._workers is not None:
                    self._workers.ask_for_flights()
            case StacksTaken():
                if self._hangs is not None:
                    self._hangs.on_stacks_taken(message)
            case WorkerHung(pid, reason):
                if self._workers is not None:
                    self._workers.is_hung(pid, reason)
            case WorldHung(generation, reason):
                if self._workers is not None:
                    self._workers.world_is_hung(generation, reason)
            case WorkersStart():
                if self._workers is not None:
                    self._workers.forget()
            case PushedWorld(record):
                self._on_pushed(record)
            case ChangeNode(change):
                self._at.status.change_node(change)
                self._registered = False
            case LeaseEnded():
                self._on_lease_lost()
            case Close():
                self._close_by_s = self._at.clock.monotonic() + LEAVING_WORLD_S

    def _duties(self) -> None:
        now = self._at.clock.monotonic()
        self._next_wake_s = now + (NODE_IDLE_S if self._close_by_s is None else NODE_RETRY_S / 5)
        if self._isolation.is_lost:
            return
        self._isolation.require()
        if not self._registered and self._at.status.node.nproc > 0:
            self._register()
        if self._workers is not None and self._lease is not None and not self._lease.lost:
            self._workers.reporter.publish(self._lease)
        if self._hangs is not None and self._lease is not None and not self._lease.lost:
            self._hangs.publish(self._lease)
        if self._lease is not None and not self._lease.lost:
            self._step_times.publish(self._lease)
        self._succession.duties(self._lease if self._registered else None, now)
        term, wake_s = self._succession.term, self._succession.wake_s
        if wake_s is not None:
            self._next_wake_s = min(self._next_wake_s, max(wake_s, now))
        if term is None or self._at.status.done is not None:
            return
        written, again_s = term.lead(self._at.status.world, self._at.status.done)
        self._next_wake_s = min(self._next_wake_s, again_s)
        if isinstance(written, WorldEntry):
            self._at.status.set_world(written)
        elif written is not None:
            self._set_done(written)

    def _register(self) -> None:
        if self._lease is None or self._lease.lost:
            self._lease = self._at.store.lease(
                self._at.options.lease_s, on_lost=lambda: self.post(LeaseEnded())
            )
            if self._workers is not None:
                self._workers.reporter.register_again()
            if self._hangs is not None:
                self._hangs.register_again()
            self._knows_world = False
            # With a new lease the store may be a new one, too.
            self._at.secret.restore(self._at.store, self._at.keys)
        node = self._at.status.node
        try:
            self._at.store.put(self._at.keys.node(node.node_id), encode(node), lease=self._lease)
        except LeaseGone:  # the store knew before its renewal did
            lease, self._lease = self._lease, None
            lease.close(revoke=False)
            raise
        if not self._knows_world:
            # Without a lease this node may have been given up: its workers' permission is not
            # renewed before that is known.
            entry = self._at.store.get(self._at.keys.world)
            self._knows_world = True
            if entry is not None:
                self._learn_world(entry)
        self._registered = True
        if self._succession.term is not None:
            self._succession.term.on_own_record(node, self._lease.id)

    # ── what the store says ──────────────────────────────────────────────────────────────

    def _on_base(self, event: WatchEvent) -> None:
        self._isolation.watch_is_cut = isinstance(event, Disconnected)
        match event:
            case Reset(snapshot, reason):
                self._on_reset({e.key: e for e in snapshot.entries}, reason)
            case Put(entry) if entry.key == self._at.keys.leader:
                self._succession.learn(entry)
            case Put(entry) if entry.key == self._at.keys.world:
                self._learn_world(entry)
            case Put(entry) if entry.key == self._at.keys.done:
                self._set_done(decode(Done, entry.key, entry.value))
            case Put(entry) if entry.key == self._at.keys.hang_verdict:
                if self._hangs is not None:
                    self._hangs.on_verdict(entry)
            case Put(entry) if entry.key.startswith(self._at.keys.hang_stacks):
                if self._hangs is not None:
                    self._hangs.on_stacks(entry)
            case Deleted(key, revision) if key == self._at.keys.leader:
                self._succession.learn_absent(revision)
            case Deleted(key, revision) if key == self._at.keys.world:
                if revision > self._at.status.world.mod_revision:
                    self._at.status.set_world_revision(0)
            case Disconnected(error):
                self._report_problem(StoreUnreachable(error), "training goes on; reconnecting")
            case Reconnected():
                self._at.journal.emit(StoreProblem(error="", consequence="the store is back"))

    def _on_reset(self, entries: dict[str, Entry], reason: str) -> None:
        if reason == "wiped":
            self._at.journal.emit(
                StoreProblem(
                    error="the store was wiped or replaced",
                    consequence="this node registers again",
                ),
                level=logging.WARNING,
            )
            self._registered = False
            self._succession.forget()
            self._at.status.set_world_revision(0)
        leader = entries.get(self._at.keys.leader)
        if leader is not None:
            self._succession.learn(leader)
        else:
            self._succession.learn_absent()
        done, world = entries.get(self._at.keys.done), entries.get(self._at.keys.world)
        verdict = entries.get(self._at.keys.hang_verdict)
        if verdict is not None and self._hangs is not None:
            self._hangs.on_verdict(verdict)
        if done is not None:
            self._set_done(decode(Done, done.key, done.value))
        if world is not None:
            self._learn_world(world)
        else:
            self._at.status.set_world_revision(0)

    def _learn_world(self, entry: Entry) -> None:
        self._at.status.learn_world(entry, self._at.clock.monotonic())

    def _on_pushed(self, record: bytes) -> None:
        """The leader's world, ahead of the watch."""
        self._at.status.learn_pushed(record, self._at.clock.monotonic())

    def _set_done(self, done: Done) -> None:
        if self._at.status.done is None and failure_timeline.is_wanted(done):
            self._write_timeline(done)
        if self._at.status.set_done(done):
            self._at.journal.emit(
                JobEnded(outcome=done.outcome.value, reason=done.reason, exit_code=done.exit_code)
            )

    def _write_timeline(self, done: Done) -> None:
        """Before the end is known to the main thread, whose error shows it."""
        keys, options = self._at.keys, self._at.options
        page = failure_timeline.render(done, keys.root, done_key=keys.done)
        folder = options.hang_report_folder or os.environ.get("ELASTIC_JOURNAL")
        name = f"failure-timeline-{self._at.status.node.name}"
        path, problem = ReportFolder(folder).write_page(name, page)
        said = f"(this page is {path})" if path else f"({problem})"
        self._at.status.timeline = f"{page}\n{said}"
        event = FailureTimelineWritten(timeline=page, report=path, problem=problem)
        self._at.journal.emit(event, level=logging.WARNING if problem else logging.DEBUG)

    def _on_lease_lost(self) -> None:
        if self._lease is None or not self._lease.lost:
            return  # an earlier lease; this node has registered again since
        self._at.journal.emit(
            LeaseLost(consequence="this node registers again under the same id"),
            level=logging.WARNING,
        )
        self._registered = False

    # ── trouble ──────────────────────────────────────────────────────────────────────────

    def _on_broken_record(self, error: RecordError) -> None:
        if self._at.status.node.running is None and self._at.status.world.world is None:
            self._at.status.fail(error)  # a joining node cannot do anything sensible with it
            return
        self._report_problem(error, "training goes on")
        self._next_wake_s = self._at.clock.monotonic() + NODE_RETRY_S

    def _on_store_problem(self, error: CoordinationError) -> None:
        if isinstance(error, LeaseGone):
            self._registered = False
        elif not isinstance(error, StoreUnreachable) and self._at.status.node.running is None:
            self._at.status.fail(error)
            return
        self._report_problem(error, "training goes on; trying again")
        self._next_wake_s = self._at.clock.monotonic() + NODE_RETRY_S

    def _report_problem(self, error: ElasticError, consequence: str) -> None:
        if error.message != self._at.status.store_problem:
            self._at.status.store_problem = error.message
            self._at.journal.emit(
                StoreProblem(error=error.message, consequence=consequence), level=logging.WARNING
            )

    def _end(self) -> None:
        """Leave the store in order: best effort, the lease does the rest."""
        if self._watch is not None:
            self._watch.close()
        reaches_store = not self._isolation.is_lost
        try:
            if not reaches_store:
                self._succession.end_term()
            else:
                self._succession.resign()
                if self._registered:
                    self._at.store.delete(self._at.keys.node(self._at.status.node.node_id))
            if self._lease is not None:
                self._lease.close(revoke=reaches_store)
        except CoordinationError as error:
            self._report_problem(error, "this node's lease will end by itself")
