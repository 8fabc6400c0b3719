"""The leader's list of nodes, from their records and connections."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from elastic.agent.liveness import Connections, Verdict
from elastic.errors import RecordError
from elastic.membership.records import (
    Done,
    FailureReport,
    HangFacts,
    Keys,
    Member,
    Node,
    NodeState,
    NodeStepTimes,
    WorldRecord,
    decode,
)
from elastic.membership.view import Liveness, MissingMember, NodeView, View
from elastic.store.keyvalue import Entry, Put, Reset, WatchEvent
from elastic.wire.messages import WorldReference

# ----------------------------------------------------------------------------
# The leader's data about every node: keys, verdicts, failures. State without I/O.
#
# Receives entries of the store and verdicts of probes; provides the :class:`View` that ``decide``
# evaluates, and the nodes whose liveness must be resolved first.


@dataclass(frozen=True)
class Known:
    """A node that has, or had, a key."""

    node: Node
    lease_id: int
    revision: int  # of its key; 0: not known
    state_since_s: float
    last_sign_s: float
    present: bool  # its key exists


@dataclass(frozen=True)
class Failed:
    """The failure of a node's workers in one generation."""

    node_id: str
    node: str  # its name
    text: str | None
    exit_code: int | None
    step: int | None = None  # steps committed by the worker that failed
    is_oom_kill: bool = False
    kernel_log: tuple[str, ...] = ()  # of its node, since its workers had started
    generation: int | None = None  # that they left; None: not known


class Roster:
    """The leader's data about the nodes."""

    def __init__(self, keys: Keys, connections: Connections, own_id: str = "") -> None:
        self._keys = keys
        # The leader's own node: it is alive as it decides. On a busy machine it may be too slow to
        # answer its own probe, and would exclude itself.
        self._own_id = own_id
        self._connections = connections
        self._known: dict[str, Known] = {}
        self._liveness: dict[str, Liveness] = {}
        self._unresolved: dict[str, float] = {}  # node_id -> time of the newest evidence to probe
        self._unreached: set[str] = set()  # nodes that have not been probed yet
        self._missing_since: dict[str, float] = {}
        self._suspect_since: dict[str, float] = {}
        # node_id -> report, since when
        self._failure_reports: dict[str, tuple[FailureReport, float]] = {}
        self._failures: dict[int, dict[str, Failed]] = {}
        # By generation and nonce: those that nodes may run.
        self.worlds: dict[tuple[int, str], WorldRecord] = {}

    def reset(self, keys: Iterable[str], now: float) -> None:
        """Only these keys exist; their records follow. (The store may have lost all, and count
        revisions from 1 again.)"""
        present = set(keys)
        self._failure_reports = {}
        for node_id, known in list(self._known.items()):
            self._known[node_id] = replace(known, revision=0)
            if self._keys.node(node_id) not in present:
                self.delete(node_id, now)

    def put_failure_report(self, key: str, report: FailureReport, now: float) -> None:
        """A node has reported a failure."""
        # The key identifies the node: a record is only about its writer.
        node_id = key.removeprefix(self._keys.failure_reports)
        self._failure_reports[node_id] = replace(report, node_id=node_id), now

    def learn_worlds(self, worlds: Iterable[WorldRecord]) -> None:
        """Worlds that this agent has seen, for the nodes that name them as what they run."""
        new = {(w.generation, w.nonce): w for w in worlds}
        if new.keys() <= self.worlds.keys():
            return
        # Of the earlier ones, those that nodes still run.
        running = (known.node.running for known in self._known.values())
        kept = {(w.generation, w.nonce): w for w in running if isinstance(w, WorldRecord)}
        self.worlds = kept | new
        for node_id, known in self._known.items():
            self._known[node_id] = replace(known, node=self._with_world(known.node))

    def _with_world(self, node: Node) -> Node:
        running = node.running
        if running is None or isinstance(running, WorldRecord):
            return node
        world = self.worlds.get((running.generation, running.nonce))
        return replace(node, running=world) if world is not None else node

    def put(self, node: Node, lease_id: int, now: float, *, revision: int = 0) -> None:
        """A node's key was written, or read: each of its records counts once, and in their order
        (``revision``; 0: not known)."""
        before = self._known.get(node.node_id)
        if before is not None and before.present and 0 < revision <= before.revision:
            return
        node = self._with_world(node)
        same_state = before is not None and before.present and before.node.state == node.state
        since = before.state_since_s if before is not None and same_state else now
        self._known[node.node_id] = Known(node, lease_id, revision, since, now, True)
        self._missing_since.pop(node.node_id, None)
        # A record is not proof of life: it may have been sent before its writer died, or the leader
        # cannot reach it. Until it has answered once, it is not admitted.
        if node.node_id == self._own_id:
            self._liveness[node.node_id] = Liveness.ALIVE
        elif node.node_id not in self._liveness:
            self._liveness[node.node_id] = Liveness.SUSPECT
            self._unreached.add(node.node_id)
        elif self._liveness[node.node_id] is not Liveness.ALIVE:
            self._unresolved[node.node_id] = now  # newer than the verdict: probe again
        self._remember_failure(node)

    def _remember_failure(self, node: Node) -> None:
        # (A node that replaces only some of its workers is starting, or ready.)
        if node.running is None and node.failure_exit_code is not None:
            failed = Failed(
                node.node_id,
                node.name,
                node.failure,
                node.failure_exit_code,
                node.failure_step,
                node.failure_is_oom_kill,
                node.failure_kernel_log,
                node.arrived_for,
            )
            self._failures.setdefault(node.arrived_for, {}).setdefault(node.node_id, failed)

    def delete(self, node_id: str, now: float) -> None:
        """A node key is gone: suspect the node."""
        known = self._known.get(node_id)
        if known is not None:
            self._known[node_id] = replace(known, present=False)
        self._missing_since[node_id] = now
        self.suspect(node_id, now)

    def delete_failure_report(self, node_id: str) -> None:
        """A report was withdrawn, or its node's lease has expired."""
        self._failure_reports.pop(node_id, None)

    def failure_report_of(self, node_id: str) -> FailureReport | None:
        """The current report of this node."""
        return self._failure_reports[node_id][0] if node_id in self._failure_reports else None

    def suspect(self, node_id: str, now: float) -> None:
        """There is evidence that this node is dead: resolve it before deciding."""
        if node_id == self._own_id:
            self._liveness[node_id] = Liveness.ALIVE
        elif self._liveness.get(node_id) is not Liveness.DEAD:
            self._unresolved[node_id] = now

    def connection_opened(self, node_id: str, now: float) -> None:
        """It has completed a handshake: newer than any verdict against it."""
        is_alive = self._liveness.get(node_id, Liveness.ALIVE) is Liveness.ALIVE
        if not is_alive or node_id in self._unresolved:
            self._unresolved[node_id] = now

    def resolve(
        self, node_id: str, verdict: Verdict, now: float, *, probed_s: float | None = None
    ) -> Liveness | None:
        """Apply the verdict of a probe that began at ``probed_s`` (None: now). Returns the node's
        state if it has changed."""
        if node_id not in self._liveness and node_id not in self._unresolved:
            return None  # forgotten since it was probed: the new world does not include it
        if self._is_outdated(node_id, verdict, now if probed_s is None else probed_s):
            return None
        before = self._liveness.get(node_id, Liveness.ALIVE)
        liveness = self._judge(node_id, verdict, before)
        self._liveness[node_id] = liveness
        is_first = node_id in self._unreached
        self._unreached.discard(node_id)
        if liveness is Liveness.SUSPECT:
            self._suspect_since.setdefault(node_id, now)
        else:
            self._suspect_since.pop(node_id, None)
        self._unresolved.pop(node_id, None)
        if liveness is Liveness.ALIVE:
            self._connections.answered(node_id)
            self._touch(node_id, now)
        return liveness if liveness is not before or is_first else None

    def _is_outdated(self, node_id: str, verdict: Verdict, probed_s: float) -> bool:
        """Whether the evidence that made this node suspect is newer than the probe, so that the
        node must be probed again: it may have answered just before its connection closed, or
        refused just before it connected. (Silence revokes nothing, and a process that ended does
        not return.)"""
        is_answer = verdict.liveness is Liveness.ALIVE or verdict.refused
        return is_answer and self._unresolved.get(node_id, -math.inf) > probed_s

    def _judge(self, node_id: str, verdict: Verdict, before: Liveness) -> Liveness:
        """A refusal proves a death if the lease or the connection is lost, too. Silence after such
        a proof changes nothing as long as the lease or the connection stays lost."""
        is_lost = node_id in self._missing_since or self._connections.is_lost(node_id)
        is_proof = verdict.refused or before is Liveness.DEAD
        if verdict.liveness is Liveness.SUSPECT and is_proof and is_lost:
            return Liveness.DEAD
        return verdict.liveness

    def _touch(self, node_id: str, now: float) -> None:
        known = self._known.get(node_id)
        if known is None:
            return  # a member without a lease: its workers' permission to train ends regardless
        self._known[node_id] = replace(known, last_sign_s=now)
        if node_id in self._missing_since:
            self._missing_since[node_id] = now

    def find(self, node_id: str) -> Known | None:
        return self._known.get(node_id)

    def states(self) -> Counter[NodeState]:
        """The number of nodes with a key in each state. From any thread, without a lock."""
        return Counter(known.node.state for known in self._known.copy().values() if known.present)

    def with_keys(self) -> tuple[str, ...]:
        return tuple(node_id for node_id, known in self._known.items() if known.present)

    def is_alive(self, node_id: str) -> bool:
        """Whether it has a key, and no evidence suggests that it is dead."""
        known = self._known.get(node_id)
        return (
            known is not None
            and known.present
            and node_id not in self._unresolved
            and self._liveness.get(node_id) is Liveness.ALIVE
        )

    def is_dead(self, node_id: str) -> bool:
        """Whether the current evidence proves that it is dead."""
        return self._liveness.get(node_id) is Liveness.DEAD

    def unreached(self) -> frozenset[str]:
        """New nodes, to be probed at once. Decisions do not wait for them."""
        return frozenset(self._unreached)

    def unresolved(self) -> frozenset[str]:
        """Suspected nodes; nothing is decided before they are resolved."""
        return frozenset(self._unresolved)

    def silent(self) -> tuple[str, ...]:
        """Nodes to probe periodically: silent, alive without a key, or dead with one. Not nodes
        that have finished or left, whose keys outlive them."""
        return tuple(
            node_id
            for node_id, liveness in self._liveness.items()
            if node_id != self._own_id
            and (
                liveness is Liveness.SUSPECT
                or (liveness is Liveness.ALIVE and node_id in self._missing_since)
                or (liveness is Liveness.DEAD and node_id not in self._missing_since)
            )
            and not self.has_ended(node_id)
        )

    def has_ended(self, node_id: str) -> bool:
        """Whether it has finished, or left: a record without a lease says so."""
        known = self._known.get(node_id)
        return known is not None and (
            known.node.state is NodeState.FINISHED or (known.present and not known.lease_id)
        )

    def unneeded(self, world: WorldRecord | None, *, is_over: bool = False) -> tuple[str, ...]:
        """Nodes that have finished or left and do not respond, whose records remain although no
        decision after ``world`` needs them. (None: before the first world, or after the last.)
        ``is_over``: also those that respond, or have just stopped: they learn of the job's end."""
        if world is not None and not world.members:
            return ()  # it has not gone on without them
        needed = world.id_set if world is not None else frozenset()
        return tuple(
            node_id
            for node_id, known in self._known.items()
            if known.present
            and node_id not in needed
            and self.has_ended(node_id)
            and node_id not in self._unresolved
            and (is_over or self._liveness.get(node_id) is not Liveness.ALIVE)
        )

    @property
    def has_failure_reports(self) -> bool:
        """Whether workers of some node have reported a failure that is not superseded by a world
        yet."""
        return bool(self._failure_reports)

    def unresponsive(self, world: WorldRecord, *, since_s: float) -> tuple[str, ...]:
        """Members whose keys exist, but that have not responded to a probe since then."""
        return tuple(
            node_id
            for node_id in world.node_ids
            if (known := self._known.get(node_id)) is not None
            and known.present
            and self._suspect_since.get(node_id, math.inf) <= since_s
        )

    def suspect_members_without_key(self, world: WorldRecord | None, now: float) -> None:
        """Probe nodes that the world depends on, and whose key this leader has never seen."""
        for member in world.tracked if world is not None else ():
            known = self._known.get(member.node_id)
            if (known is None or not known.present) and member.node_id not in self._missing_since:
                self._missing_since[member.node_id] = now
                self.suspect(member.node_id, now)

    def suspect_members(self, world: WorldRecord, now: float) -> None:
        """A member failed or reported a failure: possibly because another one died."""
        for member in world.members:
            self.suspect(member.node_id, now)

    def unregistered(self, world: WorldRecord | None) -> tuple[str, ...]:
        """Members that respond, but whose key was never seen: they will register."""
        return tuple(
            m.node_id
            for m in (world.tracked if world is not None else ())
            if m.node_id not in self._known and self._liveness.get(m.node_id) is Liveness.ALIVE
        )

    def forget_non_members(self, world: WorldRecord | None) -> None:
        """Drop nodes that have no key and are not in the world, also where the last that was heard
        of one is the end of its connection: nodes come and go for the life of a job."""
        members = {m.node_id for m in world.tracked} if world is not None else set()
        kept = members | {node_id for node_id, known in self._known.items() if known.present}
        tables: tuple[dict[str, Any], ...] = (
            self._known,
            self._liveness,
            self._unresolved,
            self._missing_since,
            self._suspect_since,
            self._failure_reports,
        )
        for table in tables:
            for node_id in table.keys() - kept:
                del table[node_id]
        self._unreached &= kept
        self._connections.retain_only(kept)

    def nodes_that_run(self, world: WorldReference) -> tuple[str, ...]:
        """The nodes with a key that report to run this world."""
        return tuple(
            node_id
            for node_id, known in self._known.items()
            if known.present
            and (running := known.node.running) is not None
            and (running.generation, running.nonce) == (world.generation, world.nonce)
        )

    def highest_running(self) -> WorldReference | None:
        """The newest world that any node reports to run."""
        running = [
            k.node.running for k in self._known.values() if k.present and k.node.running is not None
        ]
        return max(running, key=lambda world: world.generation, default=None)

    def failures_since(self, generation: int) -> tuple[Failed, ...]:
        """The failures of workers in this and later generations, one per node and generation, the
        first to fail first. Failures of earlier generations are dropped."""
        self._failures = {g: failed for g, failed in self._failures.items() if g >= generation}
        return tuple(f for g in sorted(self._failures) for f in self._failures[g].values())

    def view(
        self,
        world: WorldRecord | None,
        world_since_s: float,
        *,
        done: Done | None,
        quarantined: Mapping[str, float],
    ) -> View:
        """The input of ``decide``."""
        nodes, missing = [], []
        members = {m.node_id: m for m in world.tracked} if world is not None else {}
        for node_id, known in self._known.items():
            liveness = self._liveness.get(node_id, Liveness.ALIVE)
            # A response overrides a missing key: the node will write the key again.
            if known.present or (node_id in members and liveness is Liveness.ALIVE):
                nodes.append(
                    NodeView(
                        node=known.node,
                        liveness=liveness,
                        state_since_s=known.state_since_s,
                        suspect_since_s=self._suspect_since.get(node_id),
                    )
                )
        seen = {n.node.node_id for n in nodes}
        for node_id, member in members.items():
            if node_id not in seen:
                missing.append(self._missing(member, world_since_s))
        return View(
            world=world,
            world_since_s=world_since_s,
            nodes=tuple(nodes),
            missing=tuple(missing),
            done=done,
            quarantined=quarantined,
            failure_reports=tuple(report for report, _ in self._failure_reports.values()),
            failing_since_s=self._failing_since_s(world),
        )

    def _failing_since_s(self, world: WorldRecord | None) -> float | None:
        """When the first failure occurred that is not superseded by this world."""
        if world is None:
            return None
        floor = world.generation if world.switch_at_step is None else 0
        since = (s for t, s in self._failure_reports.values() if t.generation >= floor)
        return min(since, default=None)

    def _missing(self, member: Member, world_since_s: float) -> MissingMember:
        known = self._known.get(member.node_id)
        return MissingMember(
            member=member,
            proved_dead=self._liveness.get(member.node_id) is Liveness.DEAD,
            last_sign_s=self._missing_since.get(member.node_id, world_since_s),
            finished=known is not None and known.node.state is NodeState.FINISHED,
            is_known=known is not None,
            running=known.node.running if known is not None else None,
        )


# ----------------------------------------------------------------------------
# The nodes' records about themselves, decoded on the thread of the leader's watch.
#
# A new leader receives those of all nodes at once. Decoding thousands of them would delay the
# node's thread, which renews the permission to train.

NodeRecord = Node | FailureReport | HangFacts | NodeStepTimes


@dataclass(frozen=True)
class NodesEvent:
    """Something changed under ``nodes/``, ``failure_reports/``, ``hangs/`` or ``step_times/``."""

    event: WatchEvent
    records: Mapping[str, NodeRecord | RecordError]  # by key: those of the event's entries


def watched_prefixes(keys: Keys) -> list[str]:
    """The keys that a leader watches."""
    return [keys.nodes, keys.failure_reports, keys.hangs, keys.step_times]


def decoded(keys: Keys, event: WatchEvent) -> NodesEvent:
    """The event with its records."""
    entries: tuple[Entry, ...] = ()
    match event:
        case Reset(snapshot):
            entries = snapshot.entries
        case Put(entry):
            entries = (entry,)
    return NodesEvent(event, {entry.key: read(keys, entry) for entry in entries})


def read(keys: Keys, entry: Entry) -> NodeRecord | RecordError:
    """The record, or why it is unreadable. A failure report is only about the node of its key."""
    kinds: tuple[tuple[str, type[NodeRecord]], ...] = (
        (keys.failure_reports, FailureReport),
        (keys.hangs, HangFacts),
        (keys.step_times, NodeStepTimes),
    )
    kind = next((cls for prefix, cls in kinds if entry.key.startswith(prefix)), Node)
    try:
        return decode(kind, entry.key, entry.value)
    except RecordError as error:
        return error
