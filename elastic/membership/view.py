"""The leader's view of a job: nodes, members and their status, and the rate of steps."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property

from elastic.membership.failures import is_consequence, is_of_code
from elastic.membership.records import (
    Done,
    FailureReport,
    Member,
    Node,
    NodeState,
    Outcome,
    WorldRecord,
    group_of,
)
from elastic.tracebacks import exception_line
from elastic.tuning.intervals import (
    JOIN_TIMEOUT_S,
    JOIN_WINDOW_S,
    LAST_CALL_S,
    TAKEOVER_S,
    TERMINATION_GRACE_S,
    leave_grace_s,
)
from elastic.tuning.options import AgentOptions
from elastic.wire.messages import Cause, WorldReference, WorldState

# Time for an announcement from the leader to the last worker, with a margin: milliseconds if pushed
# over a connection, tens of milliseconds through a watch of a busy etcd.
ANNOUNCEMENT_S = 0.5
# Links report a step at least once per second. An older report means that the workers make no steps
# (an evaluation, a checkpoint): extrapolating it would delay the switch by minutes.
EXTRAPOLATE_S = 1.5
# A peer's collective fails at the moment a worker dies, and its report often precedes that of the
# dead worker's agent, which has this long.
FAILURE_SETTLE_S = 0.05
# In restart mode, a failing script closes its connections, which breaks its peers, before its
# interpreter has ended. Its agent has this long after the peers' reports to report its error.
ORIGIN_SETTLE_S = 1.0
# By how much the starts of workers may differ. (On a busy machine by a fifth of their duration.)
MAX_START_SKEW_S = 10.0
# A node with a live lease that the leader cannot reach for this long is excluded.
SUSPECT_S = 15.0
# The same if connections of other members' workers to that node have timed out as well: a few
# probes are then sufficient.
CUT_OFF_S = 3.0

# ----------------------------------------------------------------------------
# The leader's view, and its possible decisions: the arguments and results of ``decide``.
#
# All times are seconds on the caller's monotonic clock.


# Without a world that it runs: the node's workers are about to be in one.
BEFORE_RUNNING = (NodeState.ARRIVED, NodeState.STARTING, NodeState.READY)


class Liveness(Enum):
    """The last result of probing a node's liveness port."""

    ALIVE = "alive"  # it responds, or was never suspected
    SUSPECT = "suspect"  # silent, or being probed: the lease will decide
    DEAD = "dead"  # refused, or its host reports the process as ended: proof


@dataclass(frozen=True, kw_only=True)
class NodeView:
    """A node whose key exists."""

    node: Node
    liveness: Liveness = Liveness.ALIVE
    state_since_s: float  # when the leader first saw it in its current state
    suspect_since_s: float | None = None  # when it became SUSPECT; None: not, or not known


@dataclass(frozen=True, kw_only=True)
class MissingMember:
    """A member of the current world, or a node that is leaving, whose key is missing: its lease has
    expired."""

    member: Member
    proved_dead: bool  # refused, or its host reports so; False: silent
    last_sign_s: float  # the last answer, key or event from it
    finished: bool = False  # the last state it was seen in was FINISHED
    is_known: bool = True  # False: this leader has never seen its key, and knows no more of it
    running: WorldReference | None = None  # the world that its workers ran when it was seen last
    is_overdue: bool = False  # its key exists, but it has been silent for too long

    @property
    def may_step(self) -> bool:
        """Whether its workers may be in a group."""
        has_stopped = self.finished or (self.is_known and self.running is None)
        return not (self.proved_dead or has_stopped)


@dataclass(frozen=True, kw_only=True)
class View:
    """All data of the leader at one moment."""

    world: WorldRecord | None
    world_since_s: float  # when the leader first saw this generation
    nodes: tuple[NodeView, ...]  # every node key, members and others, any order
    missing: tuple[MissingMember, ...]  # nodes tracked by `world` without a node key
    done: Done | None = None
    stopped: str = ""  # why no node is admitted, for users: `elastic stop`
    quarantined: Mapping[str, float] = field(default_factory=dict)  # node_id or name -> until
    quarantine_reasons: Mapping[str, str] = field(default_factory=dict)  # node_id -> in words
    failure_reports: tuple[FailureReport, ...] = ()  # of running workers (in-process mode)
    # Node ids of stragglers, and why; only if they may be excluded.
    stragglers: Mapping[str, str] = field(default_factory=dict)
    failing_since_s: float | None = None  # when the leader saw the first report of this world
    # The next attempt of the same members, after several of whose groups none could be built.
    retry_at_s: float | None = None

    @cached_property
    def ids_by_name(self) -> Mapping[str, set[str]]:
        """The nodes that are here by their names, which agents of one machine may share."""
        ids: dict[str, set[str]] = defaultdict(set)
        for n in self.nodes:
            if n.liveness is not Liveness.DEAD and n.node.state is not NodeState.FINISHED:
                ids[n.node.name].add(n.node.node_id)
        return ids


@dataclass(frozen=True, kw_only=True)
class Policy:
    """The parameters of the rules.

    ``min_nodes`` and ``max_nodes`` are the leader's own. The job uses those of its first node,
    which are part of every world: a leader with different ones is refused, too.
    """

    min_nodes: int
    max_nodes: int
    last_call_s: float = LAST_CALL_S
    join_window_s: float = JOIN_WINDOW_S
    join_timeout_s: float = JOIN_TIMEOUT_S
    takeover_s: float = TAKEOVER_S
    failure_settle_s: float = FAILURE_SETTLE_S
    origin_settle_s: float = ORIGIN_SETTLE_S
    suspect_s: float = SUSPECT_S
    cut_off_s: float = CUT_OFF_S
    leave_grace_s: float = leave_grace_s(TERMINATION_GRACE_S)

    @property
    def leave_s(self) -> float:
        """The longest time that nodes are waited for whose workers leave or are ended. Their agents
        kill them after ``leave_grace_s``; if an agent is frozen, their permission to train has
        expired by ``takeover_s``."""
        return self.takeover_s + self.leave_grace_s

    @classmethod
    def of(cls, node: Node, options: AgentOptions) -> Policy:
        """The rules of a job that ``node`` leads."""
        return cls(
            min_nodes=node.min_nodes,
            max_nodes=node.max_nodes,
            last_call_s=options.last_call_s,
            join_window_s=min(JOIN_WINDOW_S, options.last_call_s),
            join_timeout_s=options.join_timeout_s,
            takeover_s=options.takeover_s,
            leave_grace_s=options.leave_grace_s,
        )


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """The next world: its nodes in rank order."""

    generation: int  # larger than any that a node or the store has seen
    nodes: tuple[Node, ...]
    state: WorldState
    mode: str  # "restart" | "in-process"
    cause: Cause
    reason: str
    min_nodes: int  # the job's, from its first node
    max_nodes: int
    library: str  # the job's version of this library
    tls: bool = False  # the job's nodes connect with TLS
    replica_size: int = 1  # ranks that hold the model once
    planned: bool = False  # switch at a step boundary (in-process joins and leaves)
    outside: tuple[Node, ...] = ()  # other nodes: their memory may hold the job's newest state
    # Without nodes: all members of the last world were asked to leave. With nodes: all have left.
    left_in_order: bool = False
    leaving: tuple[Member, ...] = ()  # without nodes: those whose workers may still step


@dataclass(frozen=True, kw_only=True)
class Wait:
    """Nothing to do before ``until_s`` (None: before something changes)."""

    reason: str
    until_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class End:
    """The job has ended."""

    outcome: Outcome
    reason: str
    exit_code: int
    is_final: bool = True  # False: not recorded, so that a later start under this id continues


Decision = Proposal | Wait | End


# ----------------------------------------------------------------------------
# The status of each member of the current world: running, out, or gone and why. Also decides
# whether to wait for the cause of a failure.

MAX_FAILURE_CHARS = 300  # a reason is shown in every node's log
MAX_SENTENCES = 12


@dataclass(frozen=True, kw_only=True)
class Gone:
    """A member that is not in the next world."""

    node_id: str
    cause: Cause  # LOST or LEFT
    sentence: str
    proved: bool  # it certainly makes no more progress
    last_sign_s: float
    # If not proved: the node ids of each group in which it may still step.
    groups: tuple[frozenset[str], ...] = ()
    is_overdue: bool = False  # it renews its lease, but has been silent for too long
    failed: bool = False  # its workers failed, and its agent does not restart them


@dataclass(frozen=True, kw_only=True)
class MemberStatus:
    """The members of ``world``, each in one place, in rank order."""

    world: WorldRecord
    running: tuple[NodeView, ...]  # run this generation, or are about to
    out: tuple[NodeView, ...]  # left it: their workers failed or were stopped
    gone: tuple[Gone, ...]
    # Names of the nodes that finished, in this or an earlier world of the job, and still respond;
    # and of members that finished and then left.
    finished: tuple[str, ...]
    ended: tuple[str, ...]  # names of all members that finished
    ended_since_s: tuple[float, ...]  # since when they have, as far as this leader knows
    ended_before_s: tuple[float, ...]  # since when the finished nodes that are not members have
    peers: frozenset[str]  # the members that the finished ones ran with, if still reported
    went_on: bool  # a member has run a later world than those that finished
    # Names of the nodes that did not reach the end of the script after others had finished the same
    # training, and the error of each ("": not known); None: it was lost, or left.
    unfinished: Mapping[str, str | None]
    absent: tuple[str, ...]  # names of members that finished before they could enter this world
    failure_reports: tuple[FailureReport, ...]  # of running members, and not superseded yet
    in_groups: frozenset[str]  # ids of all present nodes whose workers run a world, members or not

    @property
    def in_process(self) -> bool:
        """The running members can change worlds without a restart."""
        return bool(self.running) and all(
            n.node.in_process and n.node.state is not NodeState.ARRIVED for n in self.running
        )

    @property
    def has_run(self) -> bool:
        """Whether a member has entered this world, so that its group was built there."""
        return any(
            n.node.running and n.node.running.generation >= self.world.generation
            for n in self.running
        )

    @property
    def pending(self) -> bool:
        """A planned world to which no member has switched yet."""
        return self.world.switch_at_step is not None and not self.has_run

    @property
    def over(self) -> bool:
        """A member has finished, and no member remains that was stepping with it. Joining nodes
        that had not switched when the others finished are no longer needed."""
        are_all_ended = len(self.ended) == len(self.world.members) > 0
        if not (self.finished or are_all_ended) or any(n.node.running for n in self.running):
            return False
        # (In restart mode a member starts with the world, not at a switch, unless no member can.)
        is_known = self.world.mode == "in-process" or self.absent
        peers_known = self.peers if is_known else frozenset()
        if self.went_on or self.unfinished:
            return False
        left = (n.node.node_id for n in self.running + self.out)
        return not any(node_id in peers_known or not peers_known for node_id in left)

    @property
    def unneeded(self) -> bool:
        """No member can enter this world, because others finished before, and no member ran with
        those: the job is over once the workers that wait for them have ended."""
        left = {n.node.node_id for n in self.running + self.out}
        is_apart = bool(self.absent and self.peers) and self.peers.isdisjoint(left)
        return is_apart and not self.unfinished

    @property
    def survivors(self) -> tuple[NodeView, ...]:
        """The members that continue, in rank order.

        In-process members do not wait for one that restarts its workers: it returns as a joining
        node once it is ready. If no member runs any more, all restart together.
        """
        if self.in_process:
            return self.running
        ready = [n for n in self.out if _is_ready(n)]
        if not self.running and self._may_replace and ready:
            # Some of their workers have died and were replaced: the others have the state, and a
            # restart would discard it.
            return tuple(ready)
        place = {node_id: i for i, node_id in enumerate(self.world.node_ids)}
        return tuple(sorted(self.running + self.out, key=lambda n: place[n.node.node_id]))

    @property
    def replacing(self) -> tuple[NodeView, ...]:
        """No member runs or is ready, but these will be soon: some of their workers were replaced,
        and the others wait with their state."""
        if self.running or not self._may_replace or any(_is_ready(n) for n in self.out):
            return ()
        return tuple(n for n in self.out if n.node.state is NodeState.STARTING)

    @property
    def _may_replace(self) -> bool:
        """If a replica takes several nodes, a death ends the collectives of all its workers."""
        return self.world.nodes_per_replica == 1

    @property
    def changed(self) -> bool:
        """The world cannot continue unchanged."""
        if self.world.state is WorldState.PAUSED and not self.in_process:
            return bool(self.gone)  # its members wait for a restart: nothing can be broken
        return bool(self.gone or self.out or self.failure_reports or self.absent)

    @property
    def sentences(self) -> tuple[str, ...]:
        """The problems, for users: all of a few, and the first of many."""
        sentences = tuple(g.sentence for g in self.gone)
        sentences += tuple(f"{name} had finished before" for name in self.absent)
        if self.out and all(is_consequence(n.node.failure) for n in self.out):
            # As after os._exit(0) in a script without elastic.join().
            early = (name for name in self.ended if name not in self.absent)
            sentences += tuple(f"{name} ended with exit code 0 before the others" for name in early)
        if self.world.state is WorldState.ACTIVE or self.in_process:
            name = {n.node.node_id: n.node.name for n in self.running}
            # Peers of a failed worker report only their broken connections to it.
            is_known = bool(self.out or any(g.cause is Cause.LOST for g in self.gone))
            reports = [
                r for r in self.failure_reports if not (is_known and is_consequence(r.error))
            ]
            sentences += tuple(_failure(n.node) for n in self.out)
            sentences += tuple(f"{name[r.node_id]} reports: {r.error}" for r in reports)
        if len(sentences) > MAX_SENTENCES + 1:
            more = len(sentences) - MAX_SENTENCES
            return (*sentences[:MAX_SENTENCES], f"and {more} other nodes like these")
        return sentences

    @property
    def unbroken(self) -> bool:
        """The survivors continue in a group of which no member failed or was lost (leaving is
        neither): the next world can wait for the end of a step."""
        groups = [n.node.running for n in self.running if n.node.running is not None]
        if self.failure_reports or not groups or not (self.pending or self._taken_up(groups)):
            return False
        broken = {n.node.node_id for n in self.out}
        # (A leaving node steps until it has left.)
        broken |= {
            g.node_id for g in self.gone if g.cause is Cause.LOST or g.node_id not in self.in_groups
        }
        ids = ids_in(groups)
        if ids is None:
            return False
        # If a node that was to leave with a pending plan is lost, or its workers died, the old
        # group makes no more steps.
        left = ids - self.world.id_set - self.in_groups
        return not left and broken.isdisjoint(ids)

    def _taken_up(self, groups: list[WorldReference]) -> bool:
        """All members have entered this world: none is still building it with a node that was
        evicted since."""
        entered = all(group.generation >= self.world.generation for group in groups)
        return entered and len(groups) == len(self.running)


def ids_in(groups: Iterable[WorldReference]) -> set[str] | None:
    """The nodes in any of these groups; None if one of them is only known by its name."""
    distinct = {(group.generation, group.nonce): group_of(group) for group in groups}
    ids: set[str] = set()
    for group in distinct.values():
        if group is None:
            return None
        ids.update(group)
    return ids


def _is_ready(n: NodeView) -> bool:
    return n.node.state is NodeState.READY and n.node.in_process


def classify_members(view: View, world: WorldRecord) -> MemberStatus:
    """Classify the members of ``world``."""
    present = {n.node.node_id: n for n in view.nodes}
    missing = {m.member.node_id: m for m in view.missing}
    running, out, gone, absent = [], [], [], []
    groups, members = _Groups(view, world), frozenset(world.node_ids)
    oldest = _oldest_group(view, world)
    # The record of a finished node outlives it, so that a later leader does not take it for lost.
    # A node that is gone cannot end the job in the name of others that were interrupted, however.
    ended_nodes = [n for n in view.nodes if n.node.state is NodeState.FINISHED]
    finished = [n.node.name for n in ended_nodes if n.liveness is Liveness.ALIVE]
    ended: list[str] = []
    ended_since_s: list[float] = []
    for member in world.members:
        n = present.get(member.node_id)
        if n is None:
            m = missing.get(member.node_id) or MissingMember(
                member=member,
                proved_dead=False,
                last_sign_s=view.world_since_s,
                is_known=False,
            )
            if m.finished:
                finished.append(member.name)
                ended.append(member.name)
                ended_since_s.append(m.last_sign_s)
                absent += [member.name] * _is_absent(m.running, world)
            else:
                gone.append(_lease_over(m, groups.possible_for(m)))
        elif n.node.state is NodeState.FINISHED:
            ended.append(member.name)
            ended_since_s.append(n.state_since_s)
            absent += [member.name] * _is_absent(n.node.running, world)
        elif reason := _gone(n):
            gone.append(reason)
        elif _is_out(n.node, world, oldest):
            out.append(n)
        else:
            running.append(n)
    return MemberStatus(
        world=world,
        running=tuple(running),
        out=tuple(out),
        gone=tuple(gone),
        finished=tuple(finished),
        ended=tuple(ended),
        ended_since_s=tuple(ended_since_s),
        ended_before_s=tuple(n.state_since_s for n in ended_nodes if n.node.node_id not in members),
        peers=_peers_of_finished(view),
        went_on=_has_gone_on(view, world),
        unfinished=_unfinished(view, world, gone, set(finished)),
        absent=tuple(absent),
        failure_reports=_failure_reports(view, world, running),
        in_groups=frozenset(
            n.node.node_id
            for n in view.nodes
            if n.liveness is not Liveness.DEAD and n.node.running is not None
        ),
    )


def overdue_as_missing(view: View, now: float, policy: Policy) -> View:
    """The view in which members that have been silent for too long count as missing.

    A suspect usually loses its lease within seconds, and no node is excluded for a slow response.
    But one that keeps renewing its lease, while the leader cannot reach it, would block a broken or
    paused world, or the end of the job, indefinitely.
    """
    if view.world is None:
        return view
    status = classify_members(view, view.world)
    is_ending = bool(status.finished or status.ended)
    is_waited_for = status.changed or is_ending or status.world.state is WorldState.PAUSED
    overdue = {
        n.node.node_id
        for n in (*status.running, *status.out)
        if is_waited_for
        and n.liveness is Liveness.SUSPECT
        and now >= silent_until_s(n, view, status, policy)
    }
    if not overdue:
        return view
    missing = tuple(
        MissingMember(
            member=n.node.as_member(),
            proved_dead=False,
            last_sign_s=n.suspect_since_s or view.world_since_s,
            running=n.node.running,
            is_overdue=True,
        )
        for n in view.nodes
        if n.node.node_id in overdue
    )
    nodes = tuple(n for n in view.nodes if n.node.node_id not in overdue)
    return replace(view, nodes=nodes, missing=view.missing + missing)


def all_entered(view: View) -> View:
    """The view of a leader whose workers change worlds in process, and have begun a step in
    ``view.world``: so have those of all members, although some keys do not say so yet. They may be
    late by seconds if etcd is distant.

    Without this, the loss of a node would restart all workers, as those of a script that keeps
    none, and discard what they have trained.
    """
    world = view.world
    if world is None:
        return view

    def entered(n: NodeView) -> NodeView:
        node, running = n.node, n.node.running
        is_current = node.in_process and running and running.generation >= world.generation
        has_left = node.arrived_for >= world.generation or node.state not in BEFORE_RUNNING
        if is_current or has_left or node.node_id not in world.id_set:
            return n
        return replace(n, node=replace(node, state=NodeState.READY, in_process=True, running=world))

    return replace(view, nodes=tuple(entered(n) for n in view.nodes))


def silent_until_s(n: NodeView, view: View, status: MemberStatus, policy: Policy) -> float:
    """Until when a decision waits for the lease of a suspect. (If it is not known when it fell
    silent, it was not before the time used here.)"""
    since_s = n.suspect_since_s
    if since_s is None:
        since_s = max(n.state_since_s, view.world_since_s)
    if not (status.changed or status.world.state is WorldState.PAUSED) or _would_end(status):
        return since_s + policy.takeover_s  # its workers may train without being reached
    # Neither its agent nor its workers respond: two independent signs of a partition.
    is_cut_off = n.node.node_id in unreachable(status)
    return since_s + (policy.cut_off_s if is_cut_off else policy.suspect_s)


def _would_end(status: MemberStatus) -> bool:
    """Whether the job would be over without its silent members: that is never revoked."""
    remaining = (*status.running, *status.out)
    is_ending = bool(status.finished or status.ended)
    return is_ending and all(n.liveness is Liveness.SUSPECT for n in remaining)


def _is_absent(running: WorldReference | None, world: WorldRecord) -> bool:
    """Whether a member that finished in ``running`` will never enter ``world``, for which its
    workers would have to restart: the other members would wait for it."""
    is_older = running is not None and running.generation < world.generation
    return is_older and world.mode == "restart" and world.cause is not Cause.UNFINISHED


def _has_gone_on(view: View, world: WorldRecord) -> bool:
    """Whether a member has run a later world than any node that finished: those had ended early,
    and the job is not over once the members are lost, or leave."""
    if world.cause is Cause.UNFINISHED:
        return False  # it has only to run the end of the script
    nodes = {n.node.node_id: n.node for n in view.nodes}
    missing = {m.member.node_id: m for m in view.missing}
    ended = {i: node.running for i, node in nodes.items() if node.state is NodeState.FINISHED}
    ended |= {i: m.running for i, m in missing.items() if m.finished}
    last = max((group.generation for group in ended.values() if group is not None), default=None)
    if last is None:
        return False
    # No member has entered a world without those that finished before.
    is_entered = world.id_set.isdisjoint(ended)
    for member in world.members:
        m = missing.get(member.node_id)
        if member.node_id in nodes:
            ran = nodes[member.node_id].last_run
        elif m is not None and m.is_known:
            ran = m.running.generation if m.running is not None else None
        else:
            ran = world.generation if is_entered else None
        if max(ran or 0, member.ran_generation or 0) > last:
            return True
    return False


def _unfinished(
    view: View, world: WorldRecord, gone: Sequence[Gone], finished: AbstractSet[str]
) -> dict[str, str | None]:
    """See :attr:`MemberStatus.unfinished`. Survivors in process exclude a node that fails or dies,
    and are never in that world if they only had to end: then its work after the last step is not
    theirs."""
    names = {member.node_id: member.name for member in world.members}
    if world.cause is Cause.UNFINISHED:
        ended = {
            n.node.node_id: n.node.running for n in view.nodes if n.node.state is NodeState.FINISHED
        }
        ended |= {m.member.node_id: m.running for m in view.missing if m.finished}
        done = {i for i, group in ended.items() if group and group.generation >= world.generation}
        failed = {g.node_id for g in gone if g.failed}
        return {name: "" if i in failed else None for i, name in names.items() if i not in done}
    if not finished:
        return {}
    unfinished: dict[str, str | None] = {names[g.node_id]: "" for g in gone if g.failed}
    groups = (n.node.running for n in view.nodes if n.node.state is NodeState.FINISHED)
    last = max((g for g in groups if g is not None), key=lambda g: g.generation, default=None)
    if last is None or _has_gone_on(view, world):
        return unfinished
    ids = frozenset(group_of(last) or ())
    unfinished |= {
        n.node.name: _error_line(n.node.failure)
        for n in view.nodes
        if n.node.node_id in ids and n.node.has_failed and n.node.state in BEFORE_RUNNING
    }
    lost_in = {names[g.node_id] for g in gone if g.node_id in ids}
    # The record of a node that is gone may have been deleted.
    for broken in (b for b in world.breakages if b.generation == last.generation):
        failures = (f for f in broken.failures if f.node not in finished)
        unfinished |= {f.node: _error_line(f.text) for f in failures}
        lost_in |= set(broken.lost) - finished
    return dict.fromkeys(sorted(lost_in)) | unfinished


def _peers_of_finished(view: View) -> frozenset[str]:
    finished = (n.node for n in view.nodes if n.node.state is NodeState.FINISHED)
    groups = (node.running for node in finished if group_of(node.running) is not None)
    return frozenset(ids_in(group for group in groups if group is not None) or ())


def _lease_over(m: MissingMember, groups: tuple[frozenset[str], ...]) -> Gone:
    how = "silent, and its lease has expired"
    if m.is_overdue:
        how = "silent, although its lease is renewed"
    if m.proved_dead:
        how = "its process is dead"
    return Gone(
        node_id=m.member.node_id,
        cause=Cause.LOST,
        sentence=f"{m.member.name} is lost ({how})",
        proved=m.proved_dead,
        last_sign_s=m.last_sign_s,
        groups=groups,
        is_overdue=m.is_overdue,
    )


class _Groups:
    """The groups in which the workers of missing members of ``world`` may still step."""

    def __init__(self, view: View, world: WorldRecord) -> None:
        self._current = frozenset(world.node_ids)
        ran: dict[int, set[str]] = {}
        for member in world.members:
            if member.ran_generation:
                ran.setdefault(member.ran_generation, set()).add(member.node_id)
        self._ran = {generation: frozenset(ids) for generation, ids in ran.items()}
        # In process, members agree before they report a world: all have entered it if one has.
        # (Workers of restart mode are only about to start when their node reports it.)
        self._is_entered = world.mode == "in-process" and any(
            n.node.running is not None
            and n.node.running.generation >= world.generation
            and n.node.node_id in self._current
            for n in view.nodes
        )

    def possible_for(self, m: MissingMember) -> tuple[frozenset[str], ...]:
        """If this leader has never seen its key, they are the current world, and the one that it
        ran when that was written."""
        if not m.may_step:
            return ()
        if self._is_entered:
            return (self._current,)
        if (ids := group_of(m.running)) is not None:
            return (frozenset(ids),)
        ran = m.running.generation if m.running is not None else m.member.ran_generation
        if ran == 0:
            return (self._current,)
        alone = frozenset((m.member.node_id,))
        return (self._current, alone if ran is None else self._ran.get(ran, alone))


def _gone(n: NodeView) -> Gone | None:
    if n.liveness is Liveness.DEAD:
        cause, sentence = Cause.LOST, f"{n.node.name} is lost (its process is dead)"
    elif n.node.state is NodeState.LEAVING:
        cause, sentence = Cause.LEFT, f"{n.node.name} leaves"
    elif n.node.state is NodeState.FAILED:
        cause, sentence = Cause.LOST, _failure(n.node)
    else:
        return None
    return Gone(
        node_id=n.node.node_id,
        cause=cause,
        sentence=sentence,
        proved=True,
        last_sign_s=n.state_since_s,
        failed=n.node.state is NodeState.FAILED and n.node.has_failed,
    )


def _oldest_group(view: View, world: WorldRecord) -> int:
    """The oldest generation that a member still runs; ``world``'s own unless a switch to it is
    pending."""
    if world.switch_at_step is None:
        return world.generation
    ids = set(world.node_ids)
    groups = (n.node.running for n in view.nodes if n.node.node_id in ids)
    return min((g.generation for g in groups if g is not None), default=world.generation)


def _is_out(node: Node, world: WorldRecord, oldest: int) -> bool:
    """The workers with which this node was to be in ``world`` have ended."""
    if node.running is not None:
        return False
    if node.arrived_for >= min(oldest, world.generation):
        return True
    # An in-process world has no members without ready workers. A member without them lost them
    # before it could enter, regardless of the generation that they ran.
    return world.mode == "in-process" and node.state is not NodeState.READY


def _error_line(failure: str | None) -> str:
    return exception_line(failure or "")[:MAX_FAILURE_CHARS]


def _failure(node: Node) -> str:
    if line := _error_line(node.failure):
        return f"{node.name} failed: {line}"
    if node.failure_exit_code:
        return f"{node.name} failed with exit code {node.failure_exit_code}"
    if node.state is NodeState.FAILED:
        return f"{node.name} failed, and leaves"
    return f"{node.name} left generation {node.arrived_for}"


def _failure_reports(
    view: View, world: WorldRecord, running: list[NodeView]
) -> tuple[FailureReport, ...]:
    """Failure reports for the generation that the reporting node runs. A newer world supersedes
    older reports.

    While a planned switch is pending, members still run the previous world, and their reports
    count. Once one member runs the new world, all of them have joined it, and it supersedes reports
    about the previous world. An immediate world does so from its start.
    """
    nodes = {n.node.node_id: n.node for n in running}
    groups = [n.node.running.generation for n in running if n.node.running is not None]
    switched = world.switch_at_step is None or any(g >= world.generation for g in groups)
    floor = world.generation if switched else min(groups, default=world.generation)
    return tuple(t for t in view.failure_reports if t.node_id in nodes and t.generation >= floor)


def settling_until_s(view: View, status: MemberStatus, now: float, policy: Policy) -> float | None:
    """Until when a decision waits for the cause of a failure; None: it can be made now.

    A failure report with all members alive is held briefly: news of a death may explain it, and a
    world of the same members would have to be torn down at once. The same applies to workers that
    ended because of a peer, while the peer has not reported its own error.
    """
    if (until_s := _origin_known_until_s(status, now, policy)) is not None:
        return until_s
    if (until_s := _all_failed_until_s(view, status, now, policy)) is not None:
        return until_s
    since_s = view.failing_since_s
    if since_s is None or status.gone or status.out or not status.failure_reports:
        return None
    settle_s = policy.failure_settle_s
    if unreachable(status) - {report.node_id for report in status.failure_reports}:
        # Both ends of a broken connection detect it almost at the same time. Without a report of
        # the unreachable node it is not known which of the two to exclude.
        settle_s = max(settle_s, policy.origin_settle_s)
    elif not (status.has_run or status.pending or unreachable(status)):
        # A group could not be built. Members that others release report at once; the one that
        # knows which peer it could not reach may be later.
        settle_s = max(settle_s, policy.origin_settle_s)
    until_s = since_s + settle_s
    return until_s if now < until_s else None


def _all_failed_until_s(
    view: View, status: MemberStatus, now: float, policy: Policy
) -> float | None:
    """A worker that fails with an error of its own is often not the only one: the same statement
    fails on all ranks, within milliseconds. They are one incident, and save their last commit
    together. A fault of the code before the first step is waited for longer: workers do not start
    at the same time, least of all on a busy machine, and if it fails on every node, the job
    ends."""
    by_itself = [n for n in status.out if (n.node.failure_exit_code or 0) > 0]
    if not by_itself or status.gone or not status.running:
        return None
    first_s = min(n.state_since_s for n in by_itself)
    at_first = (0,) if status.in_process else (0, None)  # steps; restart mode may know none
    is_first = not status.world.committed_step and all(
        n.node.failure_step in at_first and is_of_code(n.node.failure) for n in by_itself
    )
    if is_first:
        skew_s = min(MAX_START_SKEW_S, (first_s - view.world_since_s) / 5)
        settle_s = max(policy.origin_settle_s, skew_s)
    elif status.in_process:
        settle_s = policy.failure_settle_s
    else:
        return None
    until_s = first_s + settle_s
    return until_s if now < until_s else None


def unreachable(status: MemberStatus) -> frozenset[str]:
    """Members that others report as unreachable."""
    reports = status.failure_reports
    ids = {n.node.node_id for n in status.running}
    return frozenset(ids & {i for r in reports for i in r.unreachable if i != r.node_id})


def _origin_known_until_s(status: MemberStatus, now: float, policy: Policy) -> float | None:
    """Restart mode, while all known failures are consequences of another member's failure."""
    if status.in_process or status.gone or not status.out or not status.running:
        return None
    if not all(is_consequence(n.node.failure) for n in status.out):
        return None
    until_s = min(n.state_since_s for n in status.out) + policy.origin_settle_s
    return until_s if now < until_s else None


# ----------------------------------------------------------------------------
# The job's step rate, and the switch step of a planned world.
#
# docs/explanation/protocol.md, section 6, "Planned change".


@dataclass(frozen=True)
class StepRate:
    """The last report of one node's workers."""

    generation: int  # the world in which they step
    step: int  # steps committed, which is also the number of the current step
    step_time_s: float  # a recent step's duration; 0: not known
    at_s: float  # when it was reported, on the monotonic clock of this agent


def switch_step(step_rate: StepRate, now: float) -> int:
    """The first step of a planned world.

    Every rank contributes to a collective of the previous step, so all of them must have received
    the plan by then. Ranks differ by at most one step: two ahead is the earliest possible. Too
    early costs one repeated step, too late only makes the joining nodes wait.
    """
    if step_rate.step_time_s <= 0:
        return step_rate.step + 2
    since_s = min(max(0.0, now - step_rate.at_s), EXTRAPOLATE_S)
    ahead = math.ceil(ANNOUNCEMENT_S / step_rate.step_time_s)
    return step_rate.step + int(since_s / step_rate.step_time_s) + max(2, ahead)
