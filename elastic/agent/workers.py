"""The supervision of a node's workers: from their start to their end."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import re
import secrets
import signal
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from elastic.agent.hangs import (
    Hangs,
    RanksAreQuiet,
    StacksTaken,
    WorkerHung,
    WorkerUnkillable,
    WorldHung,
)
from elastic.agent.identity import OOM_KILL, OomKillCounter
from elastic.agent.liveness import NodeHeartbeat
from elastic.agent.metrics import NodeMetrics
from elastic.agent.node import STORE, NodeContext, ReplacementEnded, StepTimesReport, publish_change
from elastic.agent.reaper import kill_group
from elastic.errors import CoordinationError, NodeRefused, RecordError
from elastic.hangs.watch import Supervised
from elastic.link.link import (
    IN_STEP,
    Assignment,
    ClientHandshakeRequest,
    CollectiveFailure,
    CountEvents,
    Entered,
    Exiting,
    FlightAsk,
    FlightTrace,
    FolderAnswer,
    FolderAsk,
    Heartbeat,
    InTraining,
    Leave,
    Left,
    LinkServer,
    LocalReplicas,
    MeasureSteps,
    Message,
    Permit,
    ProfileSteps,
    ProgressPage,
    Ready,
    ReplicaFormed,
    ReplicaJoin,
    ReplicaPending,
    ReplicaRendezvous,
    SigtermAnswer,
    SigtermAsk,
    StepReport,
    Worker,
    WorkerDeath,
)
from elastic.membership.decision import listed
from elastic.membership.failures import HANG, is_consequence
from elastic.membership.records import (
    FailureReport,
    Node,
    NodeState,
    Profile,
    ReplicaSlots,
    WorldRecord,
    decode,
    encode,
)
from elastic.membership.replicas import take_slot
from elastic.membership.view import StepRate
from elastic.store.keyvalue import Entry, Lease
from elastic.telemetry.events import (
    CollectiveFailed,
    Waiting,
    WorkerDied,
    WorkersNotReady,
    WorldEntered,
)
from elastic.tuning.intervals import (
    ASK_MEMBERS_S,
    NODE_IDLE_S,
)
from elastic.wire.messages import (
    NodeReplica,
    ReplicaSlot,
    WorldState,
)

# The ranks of a replica on one node find each other once all of them are in elastic.join(): in
# milliseconds; the rest is a margin for busy machines. After this, they are ended and replaced.
REPLICA_FORMS_S = 30.0
# The same on GPUs, where they also create CUDA contexts and NCCL communicators: tens of seconds if
# drivers and file systems are slow.
REPLICA_FORMS_ON_DEVICE_S = 300.0
# A node logs the names of workers that keep others waiting for this long, and again after twice the
# time.
NOT_READY_S = 30.0
# The most that a pause of the node's thread counts for REPLICA_FORMS_S and NOT_READY_S: twice
# NODE_IDLE_S. During a longer one the node was frozen.
MAX_COUNTED_S = 2 * NODE_IDLE_S

# ----------------------------------------------------------------------------
# The message that announces a world to one worker of this node.

IN_PROCESS = "in-process"


def assign(at: NodeContext, world: WorldRecord, worker: Worker) -> Assignment | Leave:
    """The world as this worker receives it; without a place in it, the process has to end."""
    node, running = at.status.node, at.status.running
    nodes_leaving = len(running.id_set - world.id_set) if running is not None else 0
    # A world of the other mode is entered by a restart, which ends these processes.
    runs_it = running is not None and running.generation == world.generation
    if node.node_id not in world.node_ids or not (world.mode == IN_PROCESS or runs_it):
        return Leave(
            generation=world.generation,
            nodes=len(world.members),
            nodes_leaving=nodes_leaving,
            switch_at_step=world.switch_at_step,
        )
    return Assignment(
        generation=world.generation,
        nonce=world.nonce,
        lineage=world.lineage,
        rank=world.first_rank_of(node.node_id) + worker.local_rank,
        size=world.size,
        local_rank=worker.local_rank,
        local_size=node.nproc,
        node_rank=world.node_ids.index(node.node_id),
        nodes=len(world.members),
        nodes_leaving=nodes_leaving,
        store_host=world.store_host,
        store_port=world.store_port,
        store_key=at.secret.key(STORE).text,
        store_tls=at.tls.files if at.tls is not None else None,
        switch_at_step=world.switch_at_step,
        state=world.state,
        committed_step=world.committed_step,
        shrinks_from=world.shrinks_from,
    )


# ----------------------------------------------------------------------------
# The worlds that are announced to a node's workers while they keep their processes.
#
# On the node's thread. A world is announced once, and only if it is newer than the workers' one.


class AnnouncedWorlds:
    """Across all starts of a node's workers."""

    def __init__(self, context: NodeContext, server: LinkServer) -> None:
        self._context = context
        self._server = server
        self.newest: WorldRecord | None = None  # announced since the workers were last started
        self.have_to_leave = False  # they were asked to leave: their ends are not deaths

    @property
    def current(self) -> WorldRecord | None:
        """The newest world that they have received: by an announcement, or at their start."""
        return self.newest or self._context.status.running

    @property
    def last_generation(self) -> int:
        """The newest generation that this node was in."""
        node = self._context.status.node
        worlds = [w for w in (self._context.status.running, self.newest) if w is not None]
        known = [w.generation for w in worlds if node.node_id in w.node_ids]
        return max([*known, node.arrived_for])

    def welcome(self, worker: Worker) -> None:
        """Send a worker that has just connected its first world, or a newer one if it was formed
        since the worker started."""
        running, newest = self._context.status.running, self.newest
        if newest is not None and (running is None or newest.generation > running.generation):
            self._send(newest, worker)
        elif running is not None:
            self._send(running, worker)

    def announce(self, world: WorldRecord | None) -> None:
        """Announce the newest world, once, if it concerns workers that need no restart."""
        node = self._context.status.node
        if world is None or not node.in_process:
            return
        if self.newest is not None and world.generation <= self.newest.generation:
            return
        if world.generation <= node.arrived_for:
            return  # it ended when a worker of this node died
        running = node.running
        if running is not None and world.generation <= running.generation:
            return
        is_member = node.node_id in world.node_ids
        if running is None and not is_member:
            return  # a spare: it waits for a world that includes it
        self.newest = world
        if is_member:
            self._context.status.announced_world = world
            self._context.status.before_announcing()  # they may read its data about others
        self._send(world, None)

    def ask_to_leave(self, reason: str) -> None:
        """Ask all workers to leave at their next boundary and save, as a job's last ones do."""
        newest = self.current
        assert newest is not None
        self.newest = replace(
            newest,
            generation=newest.generation + 1,
            members=(),
            mode=IN_PROCESS,
            switch_at_step=None,
            state=WorldState.ACTIVE,
            reason=reason,
        )
        self.have_to_leave = True
        self._send(self.newest, None)

    def forget(self) -> None:
        """The workers are restarted."""
        self.newest = self._context.status.announced_world = None

    def _send(self, world: WorldRecord, to: Worker | None) -> None:
        for worker in self._server.workers() if to is None else (to,):
            self._server.send(assign(self._context, world, worker), worker)


# ----------------------------------------------------------------------------
# This node's failure report in the store: written under its lease, removed once handled.

_ERROR_CHARACTERS = 500
_MAX_UNREACHABLE = 64  # every node may report as many: half of a large job may be unreachable


class FailureReporter:
    """One per agent. At most one report at a time, of the newest generation that has failed."""

    def __init__(self, context: NodeContext) -> None:
        self._context = context
        self._report: FailureReport | None = None  # to be written, or written
        self._is_written = False

    def has_reported(self, generation: int) -> bool:
        """Whether there is a report for this generation or a later one."""
        return self._report is not None and self._report.generation >= generation

    def report(self, generation: int, error: str, *, unreachable: tuple[str, ...] = ()) -> None:
        """Replace the report; :meth:`publish` writes it. ``unreachable``: ids of nodes."""
        self._report = FailureReport(
            node_id=self._context.status.node.node_id,
            generation=generation,
            error=error[:_ERROR_CHARACTERS],
            unreachable=unreachable[:_MAX_UNREACHABLE],
        )
        self._is_written = False

    def publish(self, lease: Lease) -> None:
        """Write the report, or remove it once a newer world has superseded it."""
        report = self._report
        if report is None:
            return
        key = self._context.keys.failure_report(self._context.status.node.node_id)
        newest = self._context.status.world
        is_answered = newest is not None and newest.generation > report.generation
        if is_answered and newest is not None and newest.switch_at_step is None:
            if self._is_written:
                self._context.store.delete(key)
            self._report = None
        elif not self._is_written:
            self._context.store.put(key, encode(report), lease=lease)
            self._is_written = True

    def register_again(self) -> None:
        """The lease is new: keys of the old one are deleted."""
        self._is_written = False


def nodes_of(world: WorldRecord | None, generation: int, ranks: tuple[int, ...]) -> tuple[str, ...]:
    """The nodes that run these ranks of that generation."""
    if world is None or world.generation != generation:
        return ()
    firsts = itertools.accumulate((m.nproc for m in world.members), initial=0)
    return tuple(
        m.node_id
        for m, first in zip(world.members, firsts, strict=False)
        if any(0 <= rank - first < m.nproc for rank in ranks)
    )


def nodes_at(
    world: WorldRecord | None, generation: int, addresses: tuple[str, ...]
) -> tuple[str, ...]:
    """The nodes of that generation at these addresses; none if several nodes share one."""
    if world is None or world.generation != generation:
        return ()
    at = Counter(m.liveness_host for m in world.members)
    return tuple(
        m.node_id
        for m in world.members
        if m.liveness_host in addresses and at[m.liveness_host] == 1
    )


# ----------------------------------------------------------------------------
# The state of each worker process of a node, by process id.


class KnownWorkers:
    """Filled from the workers' messages on their links; used by the node's thread."""

    def __init__(self, server: LinkServer) -> None:
        self._server = server
        self.ready: set[int] = set()  # they can change worlds without a restart
        self.trained: set[int] = set()  # they have begun to train: others may wait for them
        self.left: set[int] = set()  # they have left the job at a step boundary
        self.entered: dict[int, int] = {}  # pid to generation
        self.starts: dict[int, int] = {}  # pid to the number of the start that it belongs to
        self.ended: set[int] = set()  # they failed or were killed by this agent; end not reported
        self.failed: set[int] = set()  # of them, those that announced their end with an error
        self.hung: dict[int, str] = {}  # pid to the reason why this agent ends it
        self.replicas = LocalReplicas()
        # The time left to workers that wait for the other ranks of their replica on this node,
        # by pid; and those that have formed it.
        self.rendezvous_left_s: dict[int, float] = {}
        self.in_replica: set[int] = set()

    @property
    def present(self) -> set[int]:
        """The pids of workers with a link that take part in the job."""
        return {worker.pid for worker in self._server.workers()} - self.ended

    @property
    def have_left(self) -> bool:
        """Whether all present workers have left the job."""
        return bool(self.left) and self.present <= self.left

    def end(self, worker: Worker) -> None:
        """Count the process as ended from now on, although its end may take a while."""
        self.ended.add(worker.pid)
        self.ready.discard(worker.pid)
        self.entered.pop(worker.pid, None)
        self.replicas.leave(worker.pid)
        self.rendezvous_left_s.pop(worker.pid, None)
        self.in_replica.discard(worker.pid)

    def drop(self, worker: Worker) -> None:
        """Remove a process that has ended."""
        self.end(worker)
        self.ended.discard(worker.pid)
        self.failed.discard(worker.pid)
        self.left.discard(worker.pid)
        self.trained.discard(worker.pid)
        self.starts.pop(worker.pid, None)
        self.hung.pop(worker.pid, None)

    def forget(self) -> None:
        """Reset the state when all workers are restarted."""
        self.ready.clear()
        self.left.clear()
        self.trained.clear()
        self.entered.clear()


# ----------------------------------------------------------------------------
# Workers that are not ready yet: what each one waits for, and the time limit of a rendezvous.
#
# Runs on the node's thread. The ranks of a replica find each other once all of them are in
# elastic.join(), which takes milliseconds. If they do not, for any reason, they are ended, and
# replaced or restarted like any dead worker: otherwise they, and with them all other ranks of the
# job, would wait for the timeout of a collective.


class Readiness:
    """One per agent, across all starts of its workers."""

    def __init__(self, context: NodeContext, known: KnownWorkers, server: LinkServer) -> None:
        self._context = context
        self._known = known
        self._server = server
        self._checked_s = context.clock.monotonic()
        self._waited_s = 0.0  # while some workers are ready and others are not
        self._reports_at_s = NOT_READY_S

    def check(self) -> None:
        """Called on every iteration of the node's thread.

        A longer pause between two calls, of an agent that was frozen with its workers, is counted
        as a short one.
        """
        now_s = self._context.clock.monotonic()
        passed_s = min(now_s - self._checked_s, MAX_COUNTED_S)
        self._checked_s = now_s
        self._end_late_rendezvous(passed_s)
        self._report(passed_s)

    def _end_late_rendezvous(self, passed_s: float) -> None:
        left_s = self._known.rendezvous_left_s
        for pid in left_s:
            left_s[pid] -= passed_s
        present = {worker.pid: worker for worker in self._server.workers()}
        late = [pid for pid, remaining_s in left_s.items() if remaining_s <= 0]
        for pid in late:
            del left_s[pid]
            if (worker := present.get(pid)) is not None:
                self._end(worker)

    def _end(self, worker: Worker) -> None:
        others = self._known.replicas.siblings(worker.pid)
        self._known.hung[worker.pid] = (
            f"{_name(worker)} has not reached the other ranks of its replica "
            f"({', '.join(map(_name, others))}) in time"
        )
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker.pid, signal.SIGKILL)

    def _report(self, passed_s: float) -> None:
        """Report the workers for which ready ones wait."""
        node, known = self._context.status.node, self._known
        is_waiting = node.state is NodeState.STARTING and bool(known.ready & known.present)
        if not is_waiting:
            self._waited_s, self._reports_at_s = 0.0, NOT_READY_S
            return
        self._waited_s += passed_s
        if self._waited_s < self._reports_at_s:
            return
        self._reports_at_s = 2 * self._waited_s
        here = {
            worker.local_rank: worker
            for worker in self._server.workers()
            if worker.pid not in known.ended
        }
        waits = (
            self._wait_of(local_rank, here.get(local_rank)) for local_rank in range(node.nproc)
        )
        self._context.journal.emit(
            WorkersNotReady(
                waited_s=round(self._waited_s, 1), reason="; ".join(filter(None, waits))
            ),
            level=logging.WARNING,
        )

    def _wait_of(self, local_rank: int, worker: Worker | None) -> str:
        """What the worker has not done yet; empty if it is ready."""
        if worker is None:
            return f"local rank {local_rank} has not called elastic.join()"
        pid, known = worker.pid, self._known
        if pid in known.ready:
            return ""
        if pid in known.rendezvous_left_s:
            return f"{_name(worker)} waits for the other ranks of its replica"
        if known.replicas.has_joined(pid) and pid not in known.in_replica:
            return f"{_name(worker)} waits for the other ranks of its replica"
        return f"{_name(worker)} has not called run.retry()"


def _name(worker: Worker) -> str:
    return f"local rank {worker.local_rank} (pid {worker.pid})"


# ----------------------------------------------------------------------------
# The rendezvous of a replica's ranks: on this node, or at the first of the replica's nodes.
#
# Runs on the node's thread. Workers that were started for a world find their replica by its order
# of ranks. Workers that were started while others train find it through the key ``replicas``: each
# node takes a slot in the oldest incomplete replica, and waits until that is complete
# (docs/decisions/0030).


class ReplicaFormation:
    """One per agent, across all starts of its workers."""

    def __init__(self, context: NodeContext, known: KnownWorkers, server: LinkServer) -> None:
        self._context = context
        self._known = known
        self._server = server
        self._ask_at_s = -math.inf

    @property
    def _node(self) -> Node:
        return self._context.status.node

    def forget(self) -> None:
        """Reset the state when the workers are restarted."""
        self._context.status.replica_is_lost = False

    # ── requests of workers ──────────────────────────────────────────────────────────────

    def join(self, worker: Worker, request: ReplicaJoin) -> None:
        """Handle a worker's request for the other ranks of its replica."""
        node, size = self._node, request.size
        workers = self._known.replicas.join(worker, size, node.nproc)
        if not workers:
            return
        if node.running is None and (refusal := self._refusal(request.mesh)) is not None:
            self._context.status.fail(refusal)
            return
        publish_change(self._context, lambda n: replace(n, mesh=request.mesh))
        if size <= node.nproc:
            nonce = secrets.token_hex(8)
            for one in workers:
                self._known.rendezvous_left_s[one.pid] = _rendezvous_limit_s(request)
                point = ReplicaRendezvous(nonce=nonce, rank=one.local_rank % size, size=size)
                self._server.send(point, one)
        elif (running := self._context.status.running) is not None:
            self._form_in_world(running)
        else:
            start = secrets.token_hex(8)
            publish_change(self._context, lambda n: replace(n, replica_start=start, replica=()))
            for one in workers:
                self._server.send(ReplicaPending(), one)

    def _refusal(self, mesh: str) -> NodeRefused | None:
        """The error that ends this node if the job that it joins runs with another mesh."""
        node, keys = self._node, self._context.keys
        try:
            nodes = _nodes_of(self._context.store.list(keys.nodes).entries).values()
        except CoordinationError:
            return None  # the group of the next world compares the meshes, too
        others = (n for n in nodes if n.running is not None and n.mesh not in ("", mesh))
        if (other := min(others, key=lambda n: n.joined_at_s, default=None)) is None:
            return None
        return NodeRefused(
            f"node {node.name} cannot join {keys.root}: its workers call elastic.join(mesh=…) with "
            f"the dimensions {mesh}, the workers of {other.name} with {other.mesh}",
            hint="pass the same mesh, in the same order, on every node",
        )

    def _form_in_world(self, world: WorldRecord) -> None:
        """Form a replica in a world for which the workers of all its nodes were started."""
        per_replica = world.nodes_per_replica
        index = world.node_ids.index(self._node.node_id) // per_replica
        members = world.members[index * per_replica : (index + 1) * per_replica]
        first = members[0]
        self._meet(
            f"{world.nonce}-{index}",
            tuple(member.node_id for member in members),
            first.liveness_host,
            first.replica_port,
        )

    def _meet(self, nonce: str, node_ids: tuple[str, ...], host: str, port: int) -> None:
        node = self._node
        first_rank = node_ids.index(node.node_id) * node.nproc
        publish_change(self._context, lambda n: replace(n, replica=node_ids))
        for worker in self._server.workers():
            point = ReplicaRendezvous(
                nonce=nonce,
                rank=first_rank + worker.local_rank,
                size=len(node_ids) * node.nproc,
                store_host=host,
                store_port=port,
                store_key=self._context.secret.key(STORE).text,
                store_tls=self._context.tls.files if self._context.tls is not None else None,
            )
            self._server.send(point, worker)

    # ── workers that were started while others train ─────────────────────────────────────

    def look(self, now: float) -> float:
        """Called on every iteration once this node is registered; returns the time of the next
        call.

        Until its workers are in a world, it takes a slot, and checks whether the replica is lost.
        Raises CoordinationError.
        """
        node = self._node
        if not node.replica_start or node.running is not None:
            return math.inf
        if now >= self._ask_at_s:
            self._ask_at_s = now + ASK_MEMBERS_S
            self._look(node)
        return self._ask_at_s

    def _look(self, node: Node) -> None:
        keys, store = self._context.keys, self._context.store
        entry = store.get(keys.replicas)
        # Read after the slots: a node publishes the id of its start before it takes a slot.
        nodes = _nodes_of(store.list(keys.nodes).entries)
        known = decode(ReplicaSlots, entry.key, entry.value).replicas if entry is not None else ()
        own_slot = ReplicaSlot(node_id=node.node_id, start=node.replica_start)
        replicas = take_slot(
            known,
            own_slot,
            {n.node_id: n.replica_start for n in nodes.values()},
            per_replica=node.nodes_per_replica,
            nonce=secrets.token_hex(8),
        )
        if node.replica:
            # Only recorded slots: each start of the same node's workers has a different slot.
            recorded = tuple(replica for replica in replicas if replica in known)
            self._context.status.replica_is_lost = _ids_of(recorded, own_slot) != node.replica
            return
        if replicas != known:
            record = encode(ReplicaSlots(replicas=replicas))
            revision = entry.mod_revision if entry is not None else 0
            swapped = store.compare_and_swap(keys.replicas, record, expected_revision=revision)
            if swapped is None:
                return  # another node was faster: retry later
        replica = next(r for r in replicas if own_slot in r.slots)
        if len(replica.slots) == node.nodes_per_replica:
            first = nodes[replica.slots[0].node_id]
            ids = tuple(slot.node_id for slot in replica.slots)
            self._meet(replica.nonce, ids, first.address, first.replica_port)


def _nodes_of(entries: Iterable[Entry]) -> dict[str, Node]:
    nodes = {}
    for entry in entries:
        with contextlib.suppress(RecordError):  # the leader reports it
            node = decode(Node, entry.key, entry.value)
            nodes[node.node_id] = node
    return nodes


def _rendezvous_limit_s(request: ReplicaJoin) -> float:
    return REPLICA_FORMS_ON_DEVICE_S if request.on_device else REPLICA_FORMS_S


def _ids_of(replicas: tuple[NodeReplica, ...], own_slot: ReplicaSlot) -> tuple[str, ...]:
    replica = next((r for r in replicas if own_slot in r.slots), None)
    return tuple(slot.node_id for slot in replica.slots) if replica is not None else ()


# ----------------------------------------------------------------------------
# The consequence of a worker's end: a failure of its node, or a replacement.
#
# Runs on the node's thread. The other nodes are notified at once, before torchrun detects the
# death.

HUNG_EXIT_CODE = 1
EXITED_IN_TRAINING_CODE = 1  # for a worker that has ended with 0
_KILLED_DATA_WORKER = re.compile(r"DataLoader worker .*killed by signal: Killed")


@dataclass(frozen=True)
class WorkerFailed:
    """A worker's failure, as written to the node's record."""

    text: str | None  # None: it exited without a word, and torchrun's report has none either
    exit_code: int
    is_oom_kill: bool
    kernel_log: tuple[str, ...]


# This many replacements per worker of a node may die before all workers are ready. After that,
# torchrun restarts all workers and counts the restart: workers that the kernel kills at each start
# are not replaced endlessly.
MAX_REPLACED_STARTS = 3


class WorkerDeaths:
    """One per agent, across all starts of its workers."""

    def __init__(
        self,
        context: NodeContext,
        known: KnownWorkers,
        announced: AnnouncedWorlds,
        oom_kills: OomKillCounter,
    ) -> None:
        self._context = context
        self._known = known
        self._announced = announced
        self._oom_kills = oom_kills

    def on_exit_notice(self, worker: Worker, notice: Exiting) -> None:
        """A worker is about to end with an error: exclude its node now. Until its process has
        ended, which may take seconds, peers would wait for it in the next world."""
        known, status = self._known, self._context.status
        is_leaving = self._announced.have_to_leave or status.node.state is NodeState.LEAVING
        is_trained_with = status.node.state in (NodeState.READY, NodeState.STARTING)
        if notice.clean or is_leaving or status.stopping or not is_trained_with:
            return
        if known.starts.get(worker.pid) != status.starts or not self._is_waited_for(
            worker, notice.error
        ):
            return  # torchrun restarts it: the others have not trained with it
        siblings = known.replicas.siblings(worker.pid)
        known.end(worker)
        known.failed.add(worker.pid)
        kernel_log = self._context.kernel_log.excerpt()
        # The kernel prefers the process with most memory: of a data loader's, or the worker.
        is_killed = _KILLED_DATA_WORKER.search(notice.error) is not None
        is_oom_kill = is_killed and self._oom_kills.has_killed()
        text = f"{notice.error}: {OOM_KILL}" if is_oom_kill else notice.error
        status.failure_step = notice.step
        self._emit_died(worker, text, str(kernel_log))
        failure = WorkerFailed(text, notice.exit_code, is_oom_kill, kernel_log.lines)
        self._publish_failure(worker, siblings, failure)

    def _emit_died(self, worker: Worker, reason: str, kernel_log: str = "") -> None:
        pid, local_rank = worker.pid, worker.local_rank
        self._context.journal.emit(
            WorkerDied(pid=pid, local_rank=local_rank, reason=reason, kernel_log=kernel_log)
        )

    def on_ended(self, worker: Worker, death: WorkerDeath) -> None:
        """A process has ended: notify the other nodes before torchrun detects it."""
        known, status = self._known, self._context.status
        notice = death.exit_notice
        is_waited_for = self._is_waited_for(worker, notice.error if notice is not None else "")
        is_reported = worker.pid in known.failed
        hung = known.hung.get(worker.pid)
        hung = hung and f"{HANG}{hung}"
        start = known.starts.get(worker.pid, status.starts)
        siblings = known.replicas.siblings(worker.pid)
        known.drop(worker)
        if self._announced.have_to_leave or status.node.state is NodeState.LEAVING:
            if known.have_left:
                status.note_workers_left()
            return
        if status.stopping or start != status.starts:
            return  # torchrun ends them, or has ended them, to restart them in another world
        if worker.pid in status.to_replace or is_reported:
            # It has announced its failure, or was ended with another rank of its replica.
            kill_group(worker.pid)
            return
        is_unknown = death.exit_code is None and death.signal is None
        left_others = self._left_others(worker, death)
        if left_others:
            status.ended_in_training.add(worker.pid)
        elif death.exit_code == 0 or (is_unknown and notice is not None and notice.clean):
            return
        kill_group(worker.pid)
        is_failure = status.node.state in (NodeState.READY, NodeState.STARTING) and (
            is_waited_for or self._was_replacing(worker, death, siblings)
        )
        is_killed = death.signal == signal.SIGKILL and hung is None
        kernel_log = self._context.kernel_log.excerpt()
        # Evaluated once per failure: the counter only includes earlier ones.
        is_oom_kill = (
            is_failure
            and is_killed
            and (self._oom_kills.has_killed() or kernel_log.has_killed(worker.pid))
        )
        error = hung or (notice.error if notice is not None else "")
        text = error or describe_death(worker, death)
        if left_others:
            text = f"{text} during training, without an exception"
        if is_oom_kill:
            text = f"{text}: {OOM_KILL}"
        status.failure_step = notice.step if notice is not None else None
        self._emit_died(worker, text, str(kernel_log))
        # Otherwise torchrun restarts it: the others have not trained with it.
        if is_failure:
            # A worker that this agent ended was not killed from outside: it failed by itself.
            exit_code = exit_code_of(death) if hung is None else HUNG_EXIT_CODE
            exit_code = exit_code or EXITED_IN_TRAINING_CODE
            published = text if error or not death.exit_code else None
            failure = WorkerFailed(published, exit_code, is_oom_kill, kernel_log.lines)
            self._publish_failure(worker, siblings, failure)

    def _is_waited_for(self, worker: Worker, error: str = "") -> bool:
        """Whether others wait for a worker that ends with ``error``: it can change worlds in
        process, or it has trained without run.retry, and its peers are to be restarted. They have
        noticed an error that only states that a peer is gone themselves."""
        known = self._known
        return worker.pid in known.ready or (
            worker.pid in known.trained and not is_consequence(error)
        )

    def _left_others(self, worker: Worker, death: WorkerDeath) -> bool:
        """Whether a process has ended with exit code 0 while other ranks train with it.

        By ``os._exit(0)`` in the middle of training, for example: torchrun would count its node as
        finished, and the others would wait for it.
        """
        world = self._announced.current or self._context.status.running
        is_alone = world is None or world.size == 1
        return (
            death.exit_code == 0
            and death.exit_notice is None
            and worker.pid in self._context.status.in_training
            and not is_alone
        )

    def on_unkillable(self, pid: int, reason: str) -> None:
        """A killed worker is blocked in the kernel: it makes no more progress, but its end, for
        which torchrun waits, may never come.

        The state excludes the node from worlds, also from those that restart all workers. Once the
        process has ended, torchrun restarts the workers, and the node arrives again.
        """
        status, generation = self._context.status, self._announced.last_generation
        if status.node.state in (NodeState.FAILED, NodeState.FINISHED):
            return
        hung = self._known.hung.get(pid, f"a worker (pid {pid}) was ended by SIGKILL")
        failure = f"{hung}; {reason}"
        publish_change(
            self._context,
            lambda n: replace(
                n,
                state=NodeState.FAILED,
                in_process=False,
                running=None,
                replica_start="",
                replica=(),
                arrived_for=generation,
                failure=f"{HANG}{failure}",
                failure_exit_code=HUNG_EXIT_CODE,
            ),
        )
        self._context.journal.emit(Waiting(reason=f"{status.node.name} waits: {failure}"))

    def on_ended_unconnected(self, ended: ReplacementEnded) -> None:
        """Replace a replacement that was killed before it had connected to the link."""
        signum = -ended.exit_code if ended.exit_code < 0 else None
        worker = Worker(ended.pid, ended.local_rank, token=0)
        death = WorkerDeath(ended.pid, ended.exit_code if signum is None else None, signum, None)
        kill_group(ended.pid)
        if self._context.status.stopping or not self._was_replacing(worker, death, ()):
            return
        self._context.status.to_replace.add(ended.pid)
        self._emit_died(worker, describe_death(worker, death))

    def _publish_failure(
        self,
        worker: Worker,
        siblings: tuple[Worker, ...],
        failure: WorkerFailed,
    ) -> None:
        """Publish the failure in the node's record."""
        status, generation = self._context.status, self._announced.last_generation
        is_replaced = self._can_be_replaced({worker.pid, *(w.pid for w in siblings)})
        if is_replaced:  # before the state: the main thread reads both
            self._announced.newest = None
            status.to_replace.add(worker.pid)
            self._end_replica(worker, siblings)
        publish_change(
            self._context,
            lambda n: replace(
                n,
                state=NodeState.STARTING if is_replaced else NodeState.ARRIVED,
                in_process=False,
                running=None,
                replica_start="",
                replica=(),
                arrived_for=generation,
                failure=failure.text,
                failure_exit_code=failure.exit_code,
                failure_step=status.failure_step,
                failure_is_oom_kill=failure.is_oom_kill,
                failure_kernel_log=failure.kernel_log,
            ),
        )

    def _can_be_replaced(self, replica: set[int]) -> bool:
        """Whether other workers can wait with their state for replacements of these."""
        status, known = self._context.status, self._known
        return (
            status.can_replace
            and (status.node.in_process or bool(status.to_replace))
            and bool((known.present - replica) & known.ready)
            and not known.left
        )

    def _was_replacing(
        self, worker: Worker, death: WorkerDeath, siblings: tuple[Worker, ...]
    ) -> bool:
        """Whether the replacement of a dead worker was killed before it was ready, and can be
        replaced again. A replacement that exits would fail again: torchrun restarts all."""
        status = self._context.status
        if death.signal in (None, signal.SIGTERM) or not status.to_replace:
            return False
        is_rare = len(status.to_replace) < MAX_REPLACED_STARTS * status.node.nproc
        return is_rare and self._can_be_replaced({worker.pid, *(w.pid for w in siblings)})

    def _end_replica(self, dead: Worker, siblings: tuple[Worker, ...]) -> None:
        """End the other ranks of the replica: they can neither train nor provide a complete state,
        so all its processes are replaced."""
        for worker in siblings:
            reason = f"ended because local rank {dead.local_rank} of the same replica ended"
            self._emit_died(worker, reason)
            # Its death may be reported after the first replacement has joined, which must not reach
            # the dead rank.
            self._known.end(worker)
            self._context.status.to_replace.add(worker.pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.pid, signal.SIGKILL)


def describe_death(worker: Worker, death: WorkerDeath) -> str:
    """Which process ended, and how."""
    who = f"local rank {worker.local_rank} (pid {worker.pid})"
    if death.signal is not None:
        return f"{who} was ended by {signal.Signals(death.signal).name}"
    if death.exit_code is not None:
        return f"{who} ended with exit code {death.exit_code}"
    return f"{who} disappeared"


def exit_code_of(death: WorkerDeath) -> int:
    """The exit code; negative for a signal, as in torch."""
    if death.signal is not None:
        return -death.signal
    return death.exit_code if death.exit_code is not None else 1


# ----------------------------------------------------------------------------
# This node's workers, according to their links: which exist, their progress and their reports.
#
# Everything here runs on the node's thread; the link's thread only posts into its inbox. Workers
# that call ``run.retry`` report *ready*: from then on their node changes worlds without a restart.


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
        self._context = context
        self._metrics = metrics if metrics is not None else NodeMetrics(context.clock)
        oom_kills = oom_kills if oom_kills is not None else OomKillCounter()
        self.server = make_server(
            on_message=lambda worker, message: context.post(LinkEvent(worker, message)),
            on_death=lambda worker, death: context.post(WorkerEnded(worker, death)),
            on_error=context.status.fail,
        )
        self._known = KnownWorkers(self.server)
        self.announced = AnnouncedWorlds(context, self.server)
        self.deaths = WorkerDeaths(context, self._known, self.announced, oom_kills)
        self.replicas = ReplicaFormation(context, self._known, self.server)
        self.readiness = Readiness(context, self._known, self.server)
        self.reporter = FailureReporter(context)
        self._permit: Permit | None = None  # the last one

    # ── messages from workers ────────────────────────────────────────────────────────────

    def on_message(self, worker: Worker, message: Message) -> None:
        """A message from the link."""
        world = self._context.status.world
        self._metrics.on_worker_message(worker.pid, worker.local_rank, message, world)
        if worker.pid in self._known.ended:
            return  # sent before this agent killed it
        match message:
            case ClientHandshakeRequest():
                self._known.starts[worker.pid] = self._context.status.starts
                self._context.status.unconnected.discard(worker.pid)
                self._context.status.workers_joined = True
                if self._context.status.to_replace:
                    self._context.status.undecided.add(worker.pid)
                self._welcome(worker)
            case Ready(max_ranks=max_ranks):
                self._on_ready(worker, max_ranks)
            case ReplicaJoin():
                self.replicas.join(worker, message)
            case ReplicaFormed():
                self._known.rendezvous_left_s.pop(worker.pid, None)
                self._known.in_replica.add(worker.pid)
            case Heartbeat():
                self._on_heartbeat(worker, message)
            case Entered(generation=generation, step=step):
                self._on_entered(worker, generation, step)
            case CollectiveFailure():
                self._on_failure(worker, message)
            case Left():
                self._known.left.add(worker.pid)
                if self._known.have_left:
                    self._context.status.note_workers_left()
            case SigtermAsk():
                leaving = (
                    self._node.state is NodeState.LEAVING and not self._context.status.stopping
                )
                self.server.send(SigtermAnswer(leaving=leaving), worker)
            case FolderAsk(folder=folder):
                # If etcd does not answer, this raises an error, and the worker asks again.
                agreed = self._context.job_folder.agree(
                    self._context.store, self._context.keys, folder
                )
                self.server.send(FolderAnswer(folder=agreed), worker)
            case InTraining(value=value):
                training = self._context.status.in_training
                self._known.trained |= {worker.pid} if value else set()
                (training.add if value else training.discard)(worker.pid)
            case Exiting():
                self.deaths.on_exit_notice(worker, message)
            case _:
                pass

    @property
    def _node(self) -> Node:
        return self._context.status.node

    def _welcome(self, worker: Worker) -> None:
        """The message to a worker that has just connected."""
        if self._permit is not None:
            self.server.send(self._permit, worker)
        if self._context.options.straggler_action != "off":
            self.server.send(
                MeasureSteps(window_s=self._context.options.straggler_window_s), worker
            )
        if self._metrics.collects_worker_events:
            self.server.send(CountEvents(), worker)
        self.announced.welcome(worker)

    def _on_ready(self, worker: Worker, max_ranks: int) -> None:
        self._known.ready.add(worker.pid)
        self._context.status.undecided.add(worker.pid)
        if len(self._known.ready & self._known.present) < self._node.nproc:
            return
        if self._node.state is NodeState.STARTING:
            self._context.status.to_replace.clear()
            publish_change(
                self._context,
                lambda n: replace(n, in_process=True, state=NodeState.READY, max_ranks=max_ranks),
            )

    def _on_heartbeat(self, worker: Worker, heartbeat: Heartbeat) -> None:
        # While it builds a group, a worker still has the step time of an earlier world.
        entered = self._known.entered.get(worker.pid, heartbeat.generation)
        is_stepping = heartbeat.phase == IN_STEP or heartbeat.step_time_s > 0
        if worker.local_rank == 0 and is_stepping and entered == heartbeat.generation:
            self._context.status.stepping_generation = heartbeat.generation
            self._context.status.steps_in_process = worker.pid in self._known.ready
        # Without the duration of a step, the beginning of a later one cannot be predicted.
        if worker.local_rank == 0 and heartbeat.generation and heartbeat.step_time_s > 0:
            now = self._context.clock.monotonic()
            self._context.status.step_rate = StepRate(
                heartbeat.generation, heartbeat.step, heartbeat.step_time_s, now
            )

    def _on_entered(self, worker: Worker, generation: int, step: int) -> None:
        entered = self._known.entered
        entered[worker.pid] = generation
        now = self._context.clock.monotonic()
        if worker.local_rank == 0 and (step_rate := self._context.status.step_rate) is not None:
            self._context.status.step_rate = StepRate(generation, step, step_rate.step_time_s, now)
        count = sum(entered.get(pid) == generation for pid in self._known.present)
        if count < self._node.nproc:
            return
        world = self.announced.newest
        if world is None or world.generation != generation:
            return
        self._context.journal.emit(
            WorldEntered(
                generation=generation,
                first_rank=world.first_rank_of(self._node.node_id),
                size=world.size,
                waited_s=0.0,
            ),
            level=logging.DEBUG,
        )
        self._context.status.failure_step = None
        publish_change(
            self._context,
            lambda n: replace(
                n,
                running=world,
                failure=None,
                failure_exit_code=None,
                failure_step=None,
                failure_is_oom_kill=False,
                failure_kernel_log=(),
            ),
        )

    def _on_failure(self, worker: Worker, failure: CollectiveFailure) -> None:
        generation, error = failure.generation, failure.error
        newest = self.announced.current
        if newest is not None and generation < newest.generation and not newest.switch_at_step:
            return  # already handled
        if self.reporter.has_reported(generation):
            return
        self._context.journal.emit(
            CollectiveFailed(generation=generation, local_rank=worker.local_rank, error=error),
            level=logging.DEBUG,  # the leader's log has the lost node and the reason
        )
        unreachable = (
            *nodes_of(newest, generation, failure.missing),
            *nodes_at(newest, generation, failure.unreachable),
        )
        if failure.missing and newest is not None:
            # Ranks differ from world to world, and a node that never arrives stays the same.
            names = [m.name for m in newest.members if m.node_id in unreachable]
            error = f"{error} ({listed(names)})" if names else error
        self.reporter.report(generation, error, unreachable=unreachable)

    def is_hung(self, pid: int, reason: str) -> None:
        """A worker is about to be ended."""
        self._known.hung[pid] = reason

    def world_is_hung(self, generation: int, reason: str) -> None:
        """The workers wait for each other, and all are alive: the same ranks form another world."""
        world = self.announced.current
        if world is not None and world.generation <= generation:
            self.reporter.report(generation, reason)

    # ── ended workers ────────────────────────────────────────────────────────────────────

    def on_ended(self, worker: Worker, death: WorkerDeath) -> None:
        """A process has ended."""
        self._metrics.on_worker_ended(worker.pid)
        self.deaths.on_ended(worker, death)
        self._context.status.undecided.discard(worker.pid)
        self._context.status.in_training.discard(worker.pid)

    def on_ended_unconnected(self, ended: ReplacementEnded) -> None:
        """Handle the end of a replacement that had not connected when torchrun polled it."""
        status = self._context.status
        if ended.pid not in self._known.starts and ended.pid not in status.to_replace:
            self.deaths.on_ended_unconnected(ended)
        status.unconnected.discard(ended.pid)

    # ── messages to workers ──────────────────────────────────────────────────────────────

    def forget(self) -> None:
        """The workers are restarted."""
        self._known.forget()
        self.announced.forget()
        self.replicas.forget()
        self._context.status.workers_left = False
        self._context.status.to_replace.clear()
        self._context.status.undecided.clear()
        self._context.status.unconnected.clear()
        self._context.status.in_training.clear()
        self._context.status.ended_in_training.clear()

    def permit(self, until_s: float) -> None:
        """Permit the workers to train until ``until_s`` of this machine's boot time."""
        self._permit = Permit(until_s=until_s)
        self.server.send(self._permit)

    @property
    def are_all_connected(self) -> bool:
        """Whether every worker of this node has a link, and so respects its permission."""
        return len(self.server.workers()) >= self._node.nproc > 0


# ----------------------------------------------------------------------------
# The interface between the node's thread and the parts that follow its workers.
#
# Hang detection may be off: that is handled here, so that callers need not check.


class WorkerSupervisor:
    """One per agent. On the node's thread, except :meth:`supervise` and :meth:`write_link_key`."""

    def __init__(
        self,
        context: NodeContext,
        oom_kills: OomKillCounter,
        metrics: NodeMetrics | None = None,
    ) -> None:
        self._context = context
        self._keys = context.keys
        self.workers = Workers(context, oom_kills, metrics)
        self._hangs = Hangs(context) if context.options.hang_detection != "off" else None
        self._step_times = StepTimesReport(context)

    @property
    def link_path(self) -> str:
        """The path of the workers' link."""
        return self.workers.server.path

    @property
    def checkpoint_step(self) -> int | None:
        """The step of the last checkpoint that a worker of this node has reported as committed."""
        return self._hangs.watch.checkpoint_step if self._hangs is not None else None

    @property
    def planned_steps(self) -> int | None:
        """The number of steps of the entire job, as reported by a worker of this node."""
        return self._hangs.watch.planned_steps if self._hangs is not None else None

    @property
    def heartbeat(self) -> NodeHeartbeat:
        """The state of this node's workers, for the leader."""
        status = self._context.status
        return NodeHeartbeat(
            generation=status.stepping_generation,
            step=status.step_rate.step if status.step_rate is not None else None,
            has_joined=status.workers_joined,
        )

    def write_link_key(self) -> None:
        """Workers are about to start. From any thread."""
        self.workers.server.keep_key()

    def supervise(self, workers: Iterable[Supervised]) -> None:
        """The processes that torchrun supervises. From its thread."""
        if self._hangs is not None:
            self._hangs.watch.supervise(tuple(workers))

    def start(self) -> None:
        self.workers.server.start()
        if self._hangs is not None:
            self._hangs.watch.start()

    def close(self) -> None:
        if self._hangs is not None:
            self._hangs.watch.close()
        self.workers.server.close()

    def check(self) -> None:
        """Called on every iteration of the node's thread."""
        self.workers.readiness.check()

    def handle(self, message: object) -> None:
        """A message of a worker, or of one of the threads that watch workers."""
        match message:
            case LinkEvent():
                self._on_link_event(message)
            case WorkerEnded(worker, death):
                self._step_times.on_ended(worker.pid)
                if self._hangs is not None:
                    self._hangs.watch.remove(worker.pid)
                self.workers.on_ended(worker, death)
            case ReplacementEnded():
                self.workers.on_ended_unconnected(message)
            case RanksAreQuiet():
                if self._hangs is not None:
                    self._hangs.on_quiet(message)
                if message.ranks:
                    self.workers.server.send(FlightAsk())
            case StacksTaken():
                if self._hangs is not None:
                    self._hangs.on_stacks_taken(message)
            case WorkerHung(pid, reason):
                self.workers.is_hung(pid, reason)
            case WorkerUnkillable(pid, reason):
                self.workers.deaths.on_unkillable(pid, reason)
            case WorldHung(generation, reason):
                self.workers.world_is_hung(generation, reason)

    def _on_link_event(self, event: LinkEvent) -> None:
        worker = event.worker
        match event.message:
            case ProgressPage() as page:
                if self._hangs is not None:
                    self._hangs.on_page(worker, page)
            case FlightTrace(generation=generation, entries=entries):
                if self._hangs is not None:
                    self._hangs.watch.learn_flight(worker.pid, generation, entries)
            case StepReport(times=times):
                self._step_times.on_report(worker.pid, worker.local_rank, times)
            case message:
                self.workers.on_message(worker, message)

    def on_entry(self, entry: Entry) -> None:
        """A record of the store: one that belongs to the response to a hang, or any other."""
        if entry.key == self._keys.profile:
            profile = decode(Profile, entry.key, entry.value)
            self.workers.server.send(ProfileSteps(profile.steps, profile.ranks))
        if self._hangs is None:
            return
        if entry.key == self._keys.hang_verdict:
            self._hangs.on_verdict(entry)
        elif entry.key.startswith(self._keys.hang_stacks):
            self._hangs.on_stacks(entry)

    def announce(self, world: WorldRecord | None) -> None:
        """Announce the world of the job to the workers, unless they know it. After every
        message."""
        self.workers.announced.announce(world)
        if self._hangs is not None:
            self._hangs.watch_world(self.workers.announced.current)

    def look_for_replica(self, now: float) -> float:
        """Find the nodes of this node's replica if its workers wait for them; returns the time of
        the next call. Raises CoordinationError."""
        return self.workers.replicas.look(now)

    def forget_workers(self) -> None:
        """torchrun is about to restart them."""
        self.workers.forget()

    def register_again(self) -> None:
        """The lease is new: keys of the old one are deleted."""
        self.workers.reporter.register_again()
        if self._hangs is not None:
            self._hangs.register_again()

    def publish(self, lease: Lease) -> None:
        """Write changes to the store. Raises :class:`CoordinationError`."""
        self.workers.reporter.publish(lease)
        if self._hangs is not None:
            self._hangs.publish(lease)
        self._step_times.publish(lease)
