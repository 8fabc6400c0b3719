"""The decision on the next world: who survives, who joins, what the job waits for."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from elastic.errors import JobFailed
from elastic.membership.budget import Failure, error_line
from elastic.membership.records import (
    BreakageRecord,
    Member,
    Node,
    NodeState,
    Outcome,
    WorldRecord,
    group_of,
)
from elastic.membership.replicas import (
    Arrangement,
    arrange,
    incomplete,
    incomplete_replica,
    waiting_for_others,
    whole_replicas,
)
from elastic.membership.view import (
    BEFORE_RUNNING,
    Decision,
    End,
    Liveness,
    MemberStatus,
    NodeView,
    Policy,
    Proposal,
    View,
    Wait,
    classify_members,
    ids_in,
    overdue_as_missing,
    settling_until_s,
    silent_until_s,
)
from elastic.tuning.options import NODE_TLS
from elastic.wire.messages import Cause, MemoryLocation, WorldReference, WorldState

# ----------------------------------------------------------------------------
# The nodes that may join the next world: those that are not in the current one.


@dataclass(frozen=True, kw_only=True)
class JoiningNodes:
    """Nodes outside the current world, and why some of them are not admitted."""

    eligible: tuple[NodeView, ...]  # oldest first
    admissible_from_s: float | None  # when the first of those that only have to wait is eligible
    skipped: Mapping[str, str]  # id of each live node that is not admitted -> why, in a sentence


def refusal(node: Node, reference: WorldRecord | Node) -> str | None:
    """Why ``node`` is incompatible with a job: a sentence, or None if it is compatible.

    ``reference`` is the job's world or, before the first one, its first node. Versions are
    compatible within one major.minor; torch may differ between nodes.
    """
    if (sentence := _other_replicas(node, reference)) is not None:
        return sentence
    if (node.min_nodes, node.max_nodes) != (reference.min_nodes, reference.max_nodes):
        return (
            f"{node.name} was started with {node.min_nodes} to {node.max_nodes} nodes, "
            f"the job runs with {reference.min_nodes} to {reference.max_nodes}"
        )
    if reference.library and _major_minor(node.library) != _major_minor(reference.library):
        return (
            f"{node.name} has torch-elastic-harness {node.library}, "
            f"the job runs with {reference.library}"
        )
    if node.tls != reference.tls:
        names = ", ".join(NODE_TLS)
        return (
            f"{node.name} has TLS between nodes ({names}), the job runs without"
            if node.tls
            else f"{node.name} has no TLS between nodes ({names} are not set), the job runs with it"
        )
    return None


def _other_replicas(node: Node, reference: WorldRecord | Node) -> str | None:
    """Why the replicas differ. Compared before min and max, which replicas round."""
    if node.replica_size != reference.replica_size:
        return (
            f"{node.name} was started with replica_size={node.replica_size}, "
            f"the job runs with replica_size={reference.replica_size}"
        )
    is_known = isinstance(reference, Node) or bool(reference.members)
    if is_known and node.nodes_per_replica != reference.nodes_per_replica:
        return (
            f"{node.name} has {node.nproc} workers: a replica of {node.replica_size} ranks would "
            f"take {node.nodes_per_replica} such nodes, the job's replicas take "
            f"{reference.nodes_per_replica}"
        )
    return None


def _major_minor(version: str) -> str:
    """The major.minor of a version."""
    match = re.match(r"\d+\.\d+", version)
    return match.group() if match else version


def by_seniority(nodes: Iterable[NodeView]) -> tuple[NodeView, ...]:
    """Oldest first; the id breaks ties, so that all leaders agree."""
    return tuple(sorted(nodes, key=lambda n: (n.node.joined_at_s, n.node.node_id)))


def first_node(view: View) -> Node | None:
    """The node that sets min, max and version of a job that has no world yet."""
    arrived = (n for n in view.nodes if _can_join(n.node, False) and n.liveness is Liveness.ALIVE)
    return next((n.node for n in by_seniority(arrived)), None)


def find_joining_nodes(
    view: View, reference: WorldRecord | Node, now: float, *, in_process: bool
) -> JoiningNodes:
    """Divide the nodes outside ``view.world`` into those that may join and the others.

    ``in_process``: the members keep their processes, so a joining node must be ready first.
    """
    members = set(view.world.node_ids) if view.world else set()
    eligible, ends = [], []
    skipped: dict[str, str] = {}
    for n in by_seniority(n for n in view.nodes if n.node.node_id not in members):
        if n.liveness is Liveness.DEAD:
            continue
        name, node_id = n.node.name, n.node.node_id
        until = quarantined_until(n.node, view)
        is_quarantined = until is not None and now < until
        why = view.quarantine_reasons.get(node_id, "")
        quarantined = f"{name} is quarantined" + f": {why}" * bool(why)
        if not _can_join(n.node, in_process):
            if is_quarantined:
                skipped[node_id] = quarantined
            elif n.node.failure_exit_code is not None and n.node.running is None:
                failure = Failure(name, n.node.failure, n.node.failure_exit_code)
                skipped[node_id] = (
                    f"the script failed on {name} before it was ready, and is started again: "
                    f"{error_line(failure)}"
                )
        elif view.stopped:
            skipped[node_id] = f"{name} waits: {view.stopped}"
        elif sentence := refusal(n.node, reference):
            skipped[node_id] = sentence
        elif n.liveness is Liveness.SUSPECT:
            if n.suspect_since_s is not None:  # otherwise it has just arrived, and is being probed
                skipped[node_id] = f"the leader cannot reach {name}"
        elif until is not None and is_quarantined:
            skipped[node_id] = quarantined
            ends.append(until)
        else:
            eligible.append(n)
    return JoiningNodes(
        eligible=tuple(eligible),
        admissible_from_s=min(ends, default=None),
        skipped=skipped,
    )


def quarantined_until(node: Node, view: View) -> float | None:
    """When the quarantine of this node ends, if there is one: of its id, or of its name.

    Agents of one machine may share a name, which then identifies none of them.
    """
    quarantined = view.quarantined
    ends = [quarantined[node.node_id]] if node.node_id in quarantined else []
    if node.name in quarantined and view.ids_by_name[node.name] <= {node.node_id}:
        ends.append(quarantined[node.name])
    return max(ends, default=None)


def _can_join(node: Node, in_process: bool) -> bool:
    # A ready in-process node can also be restarted into a world of the other mode; a node whose
    # workers are not ready would make an in-process world wait for it.
    if node.state is NodeState.READY:
        # A node that still runs a world that continued without it has not received that yet,
        # because it was cut off. Its workers are about to be restarted: the job does not wait for
        # them.
        return node.in_process and node.running is None
    # Its workers wait for the rest of a replica, which may not come: they can be restarted.
    waits = node.state is NodeState.STARTING and bool(node.replica_start) and node.running is None
    return (node.state is NodeState.ARRIVED or waits) and not in_process


# ----------------------------------------------------------------------------
# Turns chosen nodes into a proposal, a proposal into a record, and both into texts for users.

LINEAGE_LENGTH = 32
_LISTED = 12  # names, or sentences about nodes


def propose(
    view: View,
    reference: WorldRecord | Node,
    nodes: Sequence[NodeView],
    cause: Cause,
    reason: str,
    *,
    planned: bool = False,
    restarts: bool = False,
) -> Proposal:
    """The world of ``nodes``, with the limits of the job (``reference``).

    ``restarts``: workers that could change worlds in process restart nevertheless. So do the
    workers of a replica that connected in a different replica, or in a different order.
    """
    state = WorldState.PAUSED if cause is Cause.PAUSED else WorldState.ACTIVE
    if reference is view.world and reference.cause is Cause.UNFINISHED and nodes:
        # The nodes that run the end of the script do so again.
        ids = {n.node.node_id for n in nodes}
        cause = Cause.UNFINISHED if ids <= reference.id_set else cause
    can_stay = bool(nodes) and all(n.node.in_process for n in nodes)
    in_process = can_stay and not restarts and _have_met(nodes, reference.nodes_per_replica)
    return Proposal(
        generation=_newest_generation(view) + 1,
        nodes=tuple(n.node for n in nodes),
        state=state,
        mode="in-process" if in_process else "restart",
        cause=cause,
        reason=reason,
        min_nodes=reference.min_nodes,
        max_nodes=reference.max_nodes,
        library=reference.library,
        tls=reference.tls,
        replica_size=reference.replica_size,
        planned=planned and (in_process or not nodes),
        outside=_outside(view, nodes),
        leaving=() if nodes else _leaving(view),
    )


def _leaving(view: View) -> tuple[Member, ...]:
    """The members whose workers may still step while no world has members. Every group that may
    step has a member of the last world: nodes that it has excluded need not be listed, and may
    have left already."""
    ended = (NodeState.FINISHED, NodeState.FAILED)
    members = view.world.id_set if view.world is not None else frozenset()
    present = (
        n.node.as_member()
        for n in _running(view)
        if n.node.node_id in members and n.node.state not in ended
    )
    return (*present, *(m.member for m in view.missing if m.may_step))


def _outside(view: View, nodes: Sequence[NodeView]) -> tuple[Node, ...]:
    """Living nodes that are not in the next world, such as one that restarts its workers."""
    members = {n.node.node_id for n in nodes}
    ending = (NodeState.LEAVING, NodeState.FAILED, NodeState.FINISHED)
    return tuple(
        n.node
        for n in view.nodes
        if n.node.node_id not in members
        and n.liveness is Liveness.ALIVE
        and n.node.state not in ending
    )


def _have_met(nodes: Sequence[NodeView], per_replica: int) -> bool:
    """Whether the workers of ``nodes`` already form these replicas: in the world that they run, or
    because they connected while others trained."""
    if per_replica == 1:
        return True
    replicas = (nodes[i : i + per_replica] for i in range(0, len(nodes), per_replica))
    groups = {id(n.node.running): group_of(n.node.running) or () for n in nodes}
    formed = {
        key: {ids[i : i + per_replica] for i in range(0, len(ids), per_replica)}
        for key, ids in groups.items()
    }
    return all(_is_formed(replica, formed) for replica in replicas)


def _is_formed(replica: Sequence[NodeView], formed: Mapping[int, set[tuple[str, ...]]]) -> bool:
    """``formed``: the replicas of each world, by the identity of its record."""
    ids = tuple(n.node.node_id for n in replica)
    return all(ids in formed[id(n.node.running)] for n in replica) or all(
        n.node.replica == ids for n in replica
    )


def _newest_generation(view: View) -> int:
    # After a wipe only the nodes know the highest generation. Restarting below a node's
    # `arrived_for` would make that node appear to have left every new world.
    seen = [n.node.arrived_for for n in view.nodes]
    seen += [n.node.running.generation for n in view.nodes if n.node.running]
    return max([view.world.generation if view.world else 0, *seen])


def world_of(
    proposal: Proposal,
    last: WorldRecord | None,
    *,
    nonce: str,
    time_s: float,
    switch_at_step: int | None = None,
    committed_step: int | None = None,
    breakages: tuple[BreakageRecord, ...] = (),
) -> WorldRecord:
    """The record that replaces ``last``. The first node hosts the group's store.

    ``committed_step`` is the known progress of the job, if any: the record's lower bound never
    decreases, unless all nodes have left in order: a job that saved nothing can then start over.
    """
    known = last.committed_step if last is not None else None
    if proposal.left_in_order and proposal.nodes:
        known = None
    host = proposal.nodes[0] if proposal.nodes else None
    lineage = (*last.lineage, last.generation) if last else ()
    return WorldRecord(
        generation=proposal.generation,
        members=tuple(_member_of(n, last) for n in proposal.nodes),
        store_host=host.address if host else "",
        store_port=host.ports[proposal.generation % len(host.ports)] if host else 0,
        nonce=nonce,
        mode=proposal.mode,
        switch_at_step=switch_at_step,
        state=proposal.state,
        min_nodes=proposal.min_nodes,
        max_nodes=proposal.max_nodes,
        library=proposal.library,
        tls=proposal.tls,
        outside=tuple(_memory_of(node) for node in proposal.outside if node.memory_port),
        replica_size=proposal.replica_size,
        lineage=lineage[-LINEAGE_LENGTH:],
        cause=proposal.cause,
        reason=proposal.reason,
        time_s=time_s,
        breakages=breakages,
        committed_step=_floor(known, committed_step),
        left_in_order=proposal.left_in_order and not proposal.nodes,
        leaving=proposal.leaving,
    )


def _member_of(node: Node, last: WorldRecord | None) -> Member:
    ran = 0  # the workers of a joining node run no world
    if last is not None and node.node_id in last.node_ids:
        ran = node.running.generation if node.running is not None else node.arrived_for
    return replace(node.as_member(), ran_generation=ran)


def _memory_of(node: Node) -> MemoryLocation:
    return MemoryLocation(
        node_id=node.node_id, name=node.name, host=node.address, port=node.memory_port
    )


def _floor(before: int | None, now: int | None) -> int | None:
    return max(before or 0, now or 0) or before


def names(nodes: Iterable[NodeView]) -> str:
    """``n1, n2``"""
    return listed([n.node.name for n in nodes]) or "nobody"


def listed(texts: Sequence[str], separator: str = ", ") -> str:
    """All of a few, and the first of many: records and log lines of large jobs stay short.

    >>> listed(["n1", "n2"])
    'n1, n2'
    >>> listed([f"n{i}" for i in range(1, 1001)])
    'n1, n2, n3, n4, n5, n6, n7, n8, n9, n10, n11, n12 and 988 more'
    """
    if len(texts) <= _LISTED + 1:
        return separator.join(texts)
    return f"{separator.join(texts[:_LISTED])} and {len(texts) - _LISTED} more"


def verb(nodes: Sequence[NodeView], stem: str) -> str:
    """``join`` for several, ``joins`` for one."""
    return stem if len(nodes) > 1 else f"{stem}s"


def count(nodes: Sequence[NodeView]) -> str:
    """``2 (n1, n2)``"""
    return f"{len(nodes)} ({names(nodes)})" if nodes else "0"


def also(reason: str, candidates: JoiningNodes) -> str:
    """The reason, and why waiting nodes are not admitted."""
    skipped = listed([*candidates.skipped.values()], "; ")
    return f"{reason}; {skipped}" if skipped else reason


# ----------------------------------------------------------------------------
# The next world if members survive: docs/explanation/protocol.md, section 2, rules 2 to 8.

Nodes = tuple[NodeView, ...]
NO_CANDIDATES = JoiningNodes(eligible=(), admissible_from_s=None, skipped={})


@dataclass(frozen=True)
class SurvivingWorld:
    """One decision about a world with survivors (``status``)."""

    view: View
    status: MemberStatus
    now: float
    policy: Policy

    @property
    def world(self) -> WorldRecord:
        return self.status.world

    def decide(self) -> Decision:
        """Everything that happened at once makes one world: lost, left, failed and joining."""
        candidates = self._candidates()
        if (stepping := self._may_step_alone()) is not None:
            return stepping
        if self.world.state is WorldState.PAUSED:
            return self._after_pause(candidates)
        if (smaller := self._without_surplus()) is not None:
            return smaller
        if not self.status.changed and not candidates.eligible:
            return self._steady(candidates)
        if (until_s := settling_until_s(self.view, self.status, self.now, self.policy)) is not None:
            return Wait(reason="; ".join(self.status.sentences), until_s=until_s)
        if (pause := self._until_next_attempt(candidates)) is not None:
            return pause
        survivors = self._reachable()
        if isinstance(survivors, Wait):
            return survivors
        if self.status.changed:
            return self._after_change(survivors, candidates)
        return self._join(survivors, candidates)

    def _until_next_attempt(self, candidates: JoiningNodes) -> Wait | None:
        """Wait if the same members could not connect to each other several times."""
        status, until_s = self.status, self.view.retry_at_s
        is_same = not (status.gone or status.out or status.absent or candidates.eligible)
        if until_s is None or self.now >= until_s or not is_same:
            return None
        why = "; ".join(status.sentences)
        return Wait(reason=f"{why}; the next attempt begins after a pause", until_s=until_s)

    def waiting(self) -> dict[str, str]:
        """The ids of the nodes that wait outside the world -> why, in words."""
        candidates = self._joining_nodes()
        waiting = dict(candidates.skipped)
        if self._may_be_ending:
            why = "the job is ending"
        elif self._is_full(self.status.survivors):
            why = self.full_reason
        else:
            return waiting
        # A node whose replica is incomplete would wait in a world with room, too.
        nodes = [n.node for n in candidates.eligible]
        few = incomplete_replica(self.world, nodes, self.world.nodes_per_replica)
        return waiting | {n.node_id: few.get(n.node_id, why) for n in nodes}

    # ── nodes ────────────────────────────────────────────────────────────────────────────

    def _candidates(self) -> JoiningNodes:
        joining = self._joining_nodes()
        if not self._may_be_ending:
            return joining
        from_s = self.now if joining.eligible else joining.admissible_from_s
        if from_s is not None:
            from_s = max(from_s, self._ending_until_s)
        return replace(NO_CANDIDATES, admissible_from_s=from_s)

    def _joining_nodes(self) -> JoiningNodes:
        in_process = self.status.in_process
        return find_joining_nodes(self.view, self.world, self.now, in_process=in_process)

    @property
    def _ending_until_s(self) -> float:
        """Members that have finished are about to end the job: no node joins it, so that the others
        are not restarted in its last steps. If those train on for this long, they finished early.
        """
        return max(self.status.ended_since_s, default=-math.inf) + self.policy.join_timeout_s

    @property
    def _may_be_ending(self) -> bool:
        return self.now < self._ending_until_s

    def _arranged(self, survivors: Nodes, candidates: JoiningNodes) -> Arrangement:
        """The survivors' replicas and the oldest joining nodes that fit, excluded stragglers last.

        In-process workers of a broken replica restart before they rejoin, because its collectives
        are dead: no other node waits for them. If no complete replica has the state, all restart.
        """
        slow = self.view.stragglers
        waiting = tuple(sorted(candidates.eligible, key=lambda n: n.node.node_id in slow))
        arranged = self._arrange(survivors, waiting)
        if self.world.nodes_per_replica == 1:
            return arranged
        if self.status.in_process and _hold_the_state(arranged):
            arranged = self._arrange(survivors, waiting, repairs=False)
            first = self._left_behind(arranged, survivors)
        elif self.status.in_process:
            first = tuple(n for n in survivors if n.node.running is not None)
        else:
            first = self._left_behind(arranged, survivors)
        others = without(survivors, first)
        return self._arrange(first, others + waiting) if first else arranged

    def _left_behind(self, arrangement: Arrangement, survivors: Nodes) -> Nodes:
        """Survivors of a group that may still step with a lost member, none of them in the next
        world: one must leave that group for it (docs/explanation/protocol.md, section 3)."""
        chosen = {n.node.node_id for n in arrangement.nodes}
        groups = {group for g in self.status.gone for group in g.groups}
        bound = {i for group in groups if chosen.isdisjoint(group) for i in group}
        return tuple(n for n in survivors if n.node.node_id in bound)

    def _arrange(self, survivors: Nodes, waiting: Nodes, *, repairs: bool = True) -> Arrangement:
        world = self.world
        return arrange(
            world,
            survivors,
            waiting,
            per_replica=world.nodes_per_replica,
            max_nodes=self._max_nodes,
            repairs=repairs,
        )

    @property
    def _max_nodes(self) -> int:
        """The limit of the job, or of its script: batches cannot be split among any number of
        ranks."""
        limit = self._max_ranks
        if not limit:
            return self.world.max_nodes
        nproc = max(m.nproc for m in self.world.members)
        return max(min(self.world.max_nodes, limit // nproc), len(self.status.survivors))

    def _without_surplus(self) -> Proposal | None:
        """As many members as can split their batches, if there are more in a first world: its
        workers know that they exceed their limit, and wait for this one."""
        status, world = self.status, self.world
        limit = min((n.node.max_ranks for n in status.running), default=0)
        is_waiting = status.in_process and status.unbroken and not status.changed
        if not is_waiting or not 0 < world.shrinks_from <= limit < world.size:
            return None
        nproc, per_replica = max(m.nproc for m in world.members), world.nodes_per_replica
        rest = status.survivors[: limit // nproc // per_replica * per_replica]
        surplus = without(status.survivors, rest)
        reason = f"{_split_among(limit)}: {self._waiting(surplus)}"
        return self._next(rest, Cause.LEFT, reason)

    @property
    def _max_ranks(self) -> int:
        """As the workers report it: the smallest limit; 0: none is known."""
        return min((n.node.max_ranks for n in self.view.nodes if n.node.max_ranks), default=0)

    @property
    def full_reason(self) -> str:
        """Why the world has no room for further nodes."""
        if self._max_nodes == self.world.max_nodes:
            return "the world is full"
        return f"{_split_among(self._max_ranks)}: it has no room for more nodes"

    def _restarts(self, arrangement: Arrangement) -> bool:
        """Whether workers that can change worlds without a restart cannot do so now."""
        is_split = self.world.nodes_per_replica > 1 and self.status.in_process
        return is_split and not _hold_the_state(arrangement)

    def _enough(self, nodes: Nodes) -> bool:
        # Finished nodes count while the job may be ending: none would replace them. If it has gone
        # on for longer, they had ended early.
        status, since_s = self.status, self.now - self.policy.join_timeout_s
        counted = len(status.ended) * self._may_be_ending
        counted += sum(ended_s > since_s for ended_s in status.ended_before_s)
        # (Not without nodes: the last ones may hold no complete replica.)
        needed = 1 if self.world.cause is Cause.UNFINISHED else self.world.min_nodes
        return bool(nodes) and len(nodes) + counted >= needed

    def _reachable(self) -> Nodes | Wait:
        """The survivors, unless one is suspect: then its lease decides, within seconds.

        Building a world with a node that is probably dead costs more than that wait. A suspect that
        keeps renewing its lease is missing after a while (``overdue_as_missing``). It does not
        delay joining nodes for longer either if its world is intact: then it stays a member.
        """
        survivors = self.status.survivors
        suspects = tuple(n for n in survivors if n.liveness is Liveness.SUSPECT)
        limits = (silent_until_s(n, self.view, self.status, self.policy) for n in suspects)
        until_s = max(limits, default=-math.inf)
        if self.now >= until_s:
            return survivors
        return Wait(reason=f"{names(suspects)} may be dead: the lease decides", until_s=until_s)

    def _may_step_alone(self) -> Wait | None:
        """Wait for members that fell silent in a group without a survivor, which nothing stops.

        This happens when survivors were about to join them: by a plan that was not executed, or a
        restart that they had not started. The others wait, as after the loss of all.
        """
        survivors = {n.node.node_id for n in self.status.survivors}
        alone = [
            g for g in self.status.gone if any(survivors.isdisjoint(group) for group in g.groups)
        ]
        until_s = max((g.last_sign_s for g in alone), default=-math.inf) + self.policy.takeover_s
        if self.now >= until_s:
            return None
        who = "; ".join(g.sentence for g in alone)
        reason = (
            f"workers that nobody has joined may still run: {who}; "
            f"it is taken over {self.policy.takeover_s:g} s after the last sign"
        )
        return Wait(reason=reason, until_s=until_s)

    def _without_quarantined(self, survivors: Nodes, candidates: JoiningNodes) -> Nodes:
        """Rule 5: a member that is reported repeatedly is quarantined, provided that the rest can
        continue."""
        rest = tuple(n for n in survivors if not self._is_quarantined(n.node))
        enough = bool(rest) and self._enough(self._arranged(rest, candidates).nodes)
        return rest if enough else survivors

    def _is_quarantined(self, node: Node) -> bool:
        until = quarantined_until(node, self.view)
        return until is not None and self.now < until

    # ── decisions ────────────────────────────────────────────────────────────────────────

    def _steady(self, candidates: JoiningNodes) -> Wait:
        reason = self._runs()
        if suspects := [n for n in self.status.running if n.liveness is Liveness.SUSPECT]:
            reason += f"; {names(suspects)} may be dead: the lease decides"
        return Wait(reason=also(reason, candidates), until_s=candidates.admissible_from_s)

    def _after_change(self, survivors: Nodes, candidates: JoiningNodes) -> Proposal:
        rest = self._without_quarantined(survivors, candidates)
        left_out = without(survivors, rest)
        if self._is_last_replica_leaving(rest):
            reason = f"{self._why(())}; no complete replica remains"
            return self._next((), Cause.PAUSED, reason, planned=True)
        arrangement = self._arranged(rest, candidates)
        if not self._enough(arrangement.nodes):
            return self._pause(rest, arrangement)
        reason = self._why_arranged(arrangement, candidates)
        if left_out:
            reason += f"; {names(left_out)} quarantined"
        causes = {g.cause for g in self.status.gone}
        causes |= {Cause.LEFT} if self.status.absent else set()
        cause = next((c for c in (Cause.LOST, Cause.LEFT) if c in causes), Cause.FAILURE)
        planned = self._can_reach_boundary(rest)
        restarts = self._restarts(arrangement)
        return self._next(arrangement.nodes, cause, reason, planned=planned, restarts=restarts)

    def _can_reach_boundary(self, survivors: Nodes) -> bool:
        """Whether all ranks can complete their step and leave the world before the next one."""
        is_stepping = self.world.state is not WorldState.PAUSED or self.status.pending
        is_everyone = len(survivors) == len(self.status.survivors)
        return is_stepping and self.status.unbroken and is_everyone

    def _is_last_replica_leaving(self, survivors: Nodes) -> bool:
        """Whether no complete replica would remain. Then all nodes leave at a step boundary, and
        save, like the last ones of a job."""
        if not self.status.in_process or not self.status.unbroken or not survivors:
            return False
        return self._restarts(self._arranged(survivors, NO_CANDIDATES))

    def _pause(self, survivors: Nodes, arrangement: Arrangement) -> Proposal:
        """In process, complete replicas agree and save; if nodes only leave, at a step boundary.
        Nodes that restart all stay members: the world records whose workers may still run."""
        if self.status.in_process and not self._restarts(arrangement):
            nodes = tuple(n for replica in arrangement.intact for n in replica)
            planned = self._can_reach_boundary(survivors)
            return self._next(nodes, Cause.PAUSED, self._too_few(survivors), planned=planned)
        restarts = self.world.nodes_per_replica > 1
        return self._next(survivors, Cause.PAUSED, self._too_few(survivors), restarts=restarts)

    def _join(self, survivors: Nodes, candidates: JoiningNodes) -> Decision:
        """Only joining nodes, and no failure: there is time to admit several together."""
        arrangement = self._arranged(survivors, candidates)
        nodes = arrangement.nodes
        joining = without(nodes, survivors)
        if not joining and self._is_full(survivors):
            return self._replace_stragglers(survivors, candidates)
        if not joining:
            # (If enough nodes for a replica wait, they wait for each other's workers.)
            few = self._incomplete(candidates.eligible) or self._waiting(candidates.eligible)
            reason = f"{self._runs()}; {few}"
            return Wait(reason=also(reason, candidates), until_s=candidates.admissible_from_s)
        if (late := self._until_all_run(survivors, joining)) is not None:
            return late
        until = min(n.state_since_s for n in joining) + self.policy.join_window_s
        if not self._is_full(nodes) and self.now < until:
            reason = f"{self._why(joining)}; waiting {self.policy.join_window_s:g} s for more nodes"
            return Wait(reason=reason, until_s=until)
        reason = self._why_arranged(arrangement, candidates)
        return self._next(nodes, Cause.JOINED, reason, planned=True)

    def _is_full(self, nodes: Nodes) -> bool:
        return len(nodes) + self.world.nodes_per_replica > self._max_nodes

    def _replace_stragglers(self, survivors: Nodes, candidates: JoiningNodes) -> Proposal | Wait:
        """In a full world, let waiting nodes replace a straggler and the nodes of its replica. The
        world keeps its size; a node that was excluded for this replaces no other."""
        stragglers, per_replica = self.view.stragglers, self.world.nodes_per_replica
        spares = tuple(n for n in candidates.eligible if n.node.node_id not in stragglers)
        others = whole_replicas(spares, per_replica, have_met=self.status.in_process)
        replicas = self._arranged(survivors, NO_CANDIDATES).intact
        slow_replicas = [
            replica for replica in replicas if any(n.node.node_id in stragglers for n in replica)
        ][: len(others)]
        slow = tuple(n for replica in slow_replicas for n in replica)
        rest = without(survivors, slow)
        if not slow or not rest:
            return Wait(reason=f"{self._waiting(candidates.eligible)}: {self.full_reason}")
        joining = tuple(n for replica in others[: len(slow_replicas)] for n in replica)
        if (late := self._until_all_run(survivors, joining)) is not None:
            return late
        why = "; ".join(stragglers[n.node.node_id] for n in slow if n.node.node_id in stragglers)
        reason = f"{names(joining)} {verb(joining, 'replace')} {names(slow)}: {why}"
        return self._next(rest + joining, Cause.LEFT, reason, planned=True)

    def _until_all_run(self, survivors: Nodes, joining: Nodes) -> Wait | None:
        late = [n for n in survivors if not self._has_entered(n.node)]
        if not late:
            return None
        plan = f"{names(late)} {verb(late, 'run')} generation {self.world.generation}"
        return Wait(reason=f"{self._waiting(joining)} until {plan}")

    def _has_entered(self, node: Node) -> bool:
        """Whether a node has entered this world: joining nodes wait until the last plan has been
        executed."""
        if not self.status.in_process:
            return node.state is not NodeState.ARRIVED
        return node.running is not None and node.running.generation >= self.world.generation

    def _after_pause(self, candidates: JoiningNodes) -> Decision:
        """Rule 4: enough nodes again, fewer still, or nothing to do but wait for them."""
        resumes = self._enough(self._arranged(self.status.survivors, candidates).nodes)
        if not resumes and not self.status.changed:
            return self._paused_wait(candidates)
        survivors = self._reachable()
        if isinstance(survivors, Wait):
            return survivors
        arrangement = self._arranged(survivors, candidates)
        if not resumes:
            return self._pause(survivors, arrangement)
        reason = self._why_arranged(arrangement, candidates)
        return self._next(
            arrangement.nodes,
            Cause.RESUMED,
            reason,
            planned=self._can_reach_boundary(survivors),
            restarts=self._restarts(arrangement),
        )

    def _paused_wait(self, candidates: JoiningNodes) -> Wait | End:
        until = self.view.world_since_s + self.policy.join_timeout_s
        survivors = count(self.status.survivors)
        needed = f"paused with {survivors} of at least {self.world.min_nodes} nodes"
        if self.now >= until:
            reason = f"{needed}, and too few arrived within {self.policy.join_timeout_s:g} s"
            reason = also(reason, candidates)
            return End(outcome=Outcome.FAILURE, reason=reason, exit_code=1, is_final=False)
        wake = until if candidates.admissible_from_s is None else candidates.admissible_from_s
        if waiting := self._incomplete(candidates.eligible):
            needed += f"; {waiting}"
        return Wait(reason=also(needed, candidates), until_s=min(until, wake))

    def _next(
        self,
        nodes: Nodes,
        cause: Cause,
        reason: str,
        *,
        planned: bool = False,
        restarts: bool = False,
    ) -> Proposal:
        return propose(
            self.view, self.world, nodes, cause, reason, planned=planned, restarts=restarts
        )

    # ── reasons ──────────────────────────────────────────────────────────────────────────

    def _why(self, joining: Nodes) -> str:
        reasons = list(self.status.sentences)
        if joining:
            reasons.append(f"{names(joining)} {verb(joining, 'join')}")
        return "; ".join(reasons) or "enough nodes again"

    def _why_arranged(self, arrangement: Arrangement, candidates: JoiningNodes) -> str:
        """The reason, including the changes to replicas over several nodes."""
        survivors, nodes = self.status.survivors, arrangement.nodes
        reason = self._why(without(nodes, survivors))
        if self.world.nodes_per_replica == 1:
            return reason
        waiting = without(candidates.eligible, nodes)
        left = tuple(n for n in without(survivors, nodes) if not self._is_quarantined(n.node))
        if not self.status.in_process or self._restarts(arrangement):
            waiting += left
        elif left:
            reason += f"; {names(left)} {verb(left, 'restart')}: a replica has lost nodes"
        incomplete_replica = self._incomplete(waiting)
        return f"{reason}; {incomplete_replica}" if incomplete_replica else reason

    def _incomplete(self, waiting: Nodes) -> str:
        """The nodes that wait although there may be room; empty if there are none."""
        few = incomplete(waiting, self.world.nodes_per_replica)
        return waiting_for_others([n.node.name for n in few], self.world.nodes_per_replica) * (
            len(few) > 0
        )

    def _runs(self) -> str:
        return f"generation {self.world.generation} runs on {names(self.status.running)}"

    def _too_few(self, survivors: Nodes) -> str:
        why = "; ".join(self.status.sentences)
        return f"{why}; {count(survivors)} of at least {self.world.min_nodes} nodes remain"

    @staticmethod
    def _waiting(nodes: Nodes) -> str:
        return f"{names(nodes)} {verb(nodes, 'wait')}"


def _split_among(limit: int) -> str:
    return f"the global batch can be split among at most {limit} ranks"


def without(nodes: Nodes, others: Nodes) -> Nodes:
    """Those that are not among the others, in their order."""
    ids = {n.node.node_id for n in others}
    return tuple(n for n in nodes if n.node.node_id not in ids)


def _hold_the_state(arrangement: Arrangement) -> bool:
    """Whether an intact replica has been in a group. (Members of a plan that was not executed have
    not.)"""
    return any(all(n.node.running for n in replica) for replica in arrangement.intact)


# ----------------------------------------------------------------------------
# Decides the next world: docs/explanation/protocol.md, section 2, as a pure function.
#
# ``decide(view, now, policy)`` evaluates the leader's view and returns the next world with its
# cause in words, what it waits for and until when, or that the job has ended. No clock, no I/O, no
# randomness: equal arguments give equal results.
#
# Arguments and results are in ``view.py``, and so is ``classify_members``, for the members of the
# current world; ``find_joining_nodes`` does the same for the nodes outside it. ``SurvivingWorld``
# decides if a member survives; otherwise ``decide`` does.


def decide(view: View, now: float, policy: Policy) -> Decision:
    """The next world, or what the job waits for, or its end."""
    if view.done is not None:
        return Wait(reason=f"the job is over: {view.done.reason}")
    if (running := adoptable(view)) is not None:
        return Wait(reason=f"generation {running.generation} runs, but the store has lost it")
    world = view.world
    if world is None:
        return _first_world(view, now, policy)
    view = overdue_as_missing(view, now, policy)
    status = classify_members(view, world)
    if (unfinished := _finish_again(view, status, now, policy)) is not None:
        return unfinished
    if status.over:
        return _still_ending(view, now, policy) or _success(status)
    if status.unneeded:
        reason = f"{'; '.join(status.sentences)}; the job ends"
        return propose(view, world, (), Cause.PAUSED, reason)
    if (leaving := _stepping_apart(view, status, now, policy)) is not None:
        return leaving
    if (replacing := _replacing(status, now, policy)) is not None:
        return replacing
    if not status.survivors:
        return _without_survivors(view, status, now, policy)
    return SurvivingWorld(view, status, now, policy).decide()


def waiting_nodes(view: View, now: float, policy: Policy) -> dict[str, str]:
    """The ids of the nodes that are not admitted -> why, for users. Not those that are about to
    join."""
    reference = view.world or first_node(view)
    if view.done is not None or reference is None:
        return {}
    if view.world is not None:
        status = classify_members(view, view.world)
        if status.survivors:
            return SurvivingWorld(view, status, now, policy).waiting()
    return dict(find_joining_nodes(view, reference, now, in_process=False).skipped)


def _still_ending(view: View, now: float, policy: Policy) -> Wait | None:
    """In a world without members, workers of restart mode that it ends: after the end of the job
    they would continue, and wait for those that have finished."""
    if view.world is None or view.world.members:
        return None
    finished = NodeState.FINISHED
    ending = tuple(
        n for n in _running(view) if not n.node.in_process and n.node.state is not finished
    )
    return _wait_for_workers(view, ending, "ending workers", now, policy)


def _running(view: View) -> Iterator[NodeView]:
    """Nodes whose workers may be in a group."""
    return (n for n in view.nodes if n.node.running is not None and n.liveness is not Liveness.DEAD)


def _wait_for_workers(
    view: View, nodes: Sequence[NodeView], what: str, now: float, policy: Policy
) -> Wait | None:
    """Wait until the workers of these nodes have ended: for as long as that can take."""
    since_s = view.world_since_s if view.world is not None and not view.world.members else -math.inf
    until_s = max((max(n.state_since_s, since_s) for n in nodes), default=0.0) + policy.leave_s
    if not nodes or now >= until_s:
        return None
    return Wait(reason=f"{names(nodes)} still {what}", until_s=until_s)


def adoptable(view: View) -> WorldReference | None:
    """The world to write back into a store that was wiped or restored: the newest one that a node
    still runs, if the store has none that is as new."""
    running = (n.node.running for n in view.nodes if n.liveness is not Liveness.DEAD)
    newest = max((w for w in running if w), key=lambda w: w.generation, default=None)
    if newest is None or (view.world and view.world.generation >= newest.generation):
        return None
    return newest


def _replacing(status: MemberStatus, now: float, policy: Policy) -> Wait | None:
    """Wait for nodes that replace dead workers: a restart would discard the state of the others."""
    nodes = status.replacing
    until_s = max((n.state_since_s for n in nodes), default=0.0) + policy.join_timeout_s
    if not nodes or now >= until_s:
        return None
    return Wait(reason=f"{names(nodes)} {verb(nodes, 'replace')} dead workers", until_s=until_s)


def _success(status: MemberStatus) -> End:
    return End(outcome=Outcome.SUCCESS, reason=_why_over(status), exit_code=0)


def _why_over(status: MemberStatus) -> str:
    who = listed(status.finished or status.ended)
    return "; ".join([f"{who} finished", *status.sentences])


def _finish_again(
    view: View, status: MemberStatus, now: float, policy: Policy
) -> Proposal | Wait | End | None:
    """All nodes have finished but some that failed, or were lost, in the script's code after the
    last step, such as the one that saves the model: it runs again, from the last checkpoint. If the
    script itself failed, on a node that restarts its workers: as under torchrun, the job has failed
    if none does. If not, on another node, even one that has finished."""
    world, unfinished = status.world, status.unfinished
    has_failed = any(error is not None for error in unfinished.values())
    if not unfinished or status.running or status.out or not (status.finished or has_failed):
        return None
    candidates = find_joining_nodes(view, world, now, in_process=False)
    reason = f"{_why_over(status)}; {_short_of_the_end(unfinished)}"
    if (late := _still_in_the_end(view, status, now, policy)) is not None:
        return late
    if nodes := _whole(candidates.eligible, at_most=world.max_nodes):
        if status.went_on:
            return None  # the members that are gone were training
        return propose(view, world, nodes, Cause.UNFINISHED, reason)
    finished = _able_to_return(view, world)
    if not has_failed and (nodes := _whole(finished)):
        reason += f"; {names(nodes)} {verb(nodes, 'run')} it again"
        return propose(view, world, nodes, Cause.UNFINISHED, reason, restarts=True)
    since_s = [
        n.state_since_s
        for n in view.nodes
        if n.node.name in unfinished and n.node.state in BEFORE_RUNNING
    ]
    if not has_failed:  # their replicas lack nodes
        since_s += [g.last_sign_s for g in status.gone] or [view.world_since_s]
    until_s = max(since_s, default=-math.inf) + policy.join_timeout_s
    if now < until_s:
        return Wait(reason=also(reason, candidates), until_s=until_s)
    failed = End(outcome=Outcome.FAILURE, reason=reason, exit_code=JobFailed.exit_code)
    return _still_ending(view, now, policy) or failed


def _short_of_the_end(unfinished: Mapping[str, str | None]) -> str:
    """
    >>> _short_of_the_end({"n1": None, "n2": "OSError: no space", "n3": ""})
    'n1 was lost, n2 failed (OSError: no space), n3 failed before the end of the script'
    """
    how = [
        f"{name} was lost" if error is None else f"{name} failed" + f" ({error})" * bool(error)
        for name, error in unfinished.items()
    ]
    return f"{listed(how)} before the end of the script"


def _still_in_the_end(
    view: View, status: MemberStatus, now: float, policy: Policy
) -> Proposal | Wait | None:
    """While nodes may run the end of the script, no other one begins to."""
    world = status.world
    returning = [
        n
        for n in view.nodes
        if world.cause is Cause.UNFINISHED
        and n.node.node_id in world.id_set
        and n.node.state is NodeState.FINISHED
        and n.liveness is Liveness.ALIVE
    ]
    until_s = view.world_since_s + policy.join_timeout_s
    if returning and now < until_s:
        return Wait(reason=f"{names(returning)} start to run the script's end", until_s=until_s)
    return _while_silent(view, status, now, policy) or _still_stepping(view, now, policy)


def _able_to_return(view: View, world: WorldRecord) -> Nodes:
    """Nodes that have finished and wait for the others, without those that did not start again."""
    asked: frozenset[str] = world.id_set if world.cause is Cause.UNFINISHED else frozenset()
    return by_seniority(
        n
        for n in view.nodes
        if n.node.state is NodeState.FINISHED
        and n.liveness is Liveness.ALIVE
        and n.node.node_id not in asked
    )


def _whole(nodes: Nodes, *, at_most: int = 0) -> Nodes:
    """As many of these nodes as form replicas; 0: those of one."""
    if not nodes:
        return ()
    per_replica = nodes[0].node.nodes_per_replica
    most = at_most or per_replica
    return arrange(None, (), nodes, per_replica=per_replica, max_nodes=most).nodes


def _first_world(view: View, now: float, policy: Policy) -> Proposal | Wait:
    """Rule 1. The first node's min, max and version become the job's."""
    reference = first_node(view)
    if reference is None:
        return Wait(reason="no node has arrived")
    return _gather(view, reference, now, policy, Cause.FIRST, "")


def _without_survivors(
    view: View, status: MemberStatus, now: float, policy: Policy
) -> Proposal | Wait:
    """Section 2: without a survivor, the old world must be proved dead, or silent for
    ``takeover_s``."""
    silent = [g for g in status.gone if not g.proved]
    if (late := _while_silent(view, status, now, policy)) is not None:
        return late
    why = "; ".join(status.sentences) or "the last world has no members"
    missing = {m.member.node_id for m in view.missing}
    has_left = status.world.left_in_order and missing.isdisjoint(
        m.node_id for m in status.world.leaving
    )
    if has_left and status.world.committed_step:
        why += f" (all nodes had left, after step {status.world.committed_step})"
    # No member remains: as in a first world, the limits of the first node apply.
    reference = first_node(view) or status.world
    decision = _gather(view, reference, now, policy, Cause.TAKEOVER, f"{why}; ")
    stepping = _still_stepping(view, now, policy)
    is_waiting = isinstance(decision, Wait) or stepping is not None
    if is_waiting and not silent and _are_members_here(view, status):
        # (Also together with waiting nodes: the step must be announced to the leaving ones.)
        planned, why = _can_reach_boundary(view), f"{why}; no member remains"
        empty = propose(view, status.world, (), Cause.PAUSED, why, planned=planned)
        causes = {gone.cause for gone in status.gone}
        in_order = status.world.left_in_order or causes == {Cause.LEFT}
        return replace(empty, left_in_order=in_order)
    if isinstance(decision, Proposal) and stepping is not None:
        return stepping
    if isinstance(decision, Proposal):
        return replace(decision, left_in_order=has_left)
    return decision


def _while_silent(
    view: View, status: MemberStatus, now: float, policy: Policy
) -> Proposal | Wait | None:
    """Members that are not proved dead: their workers may run until ``takeover_s`` after the last
    sign of them."""
    silent = [g for g in status.gone if not g.proved]
    if silent and all(g.is_overdue for g in silent):
        # They renew their leases: a world without members ends their workers.
        why = "; ".join(status.sentences)
        return propose(view, status.world, (), Cause.PAUSED, why)
    until = max((g.last_sign_s for g in silent), default=now) + policy.takeover_s
    if silent and now < until:
        who = "; ".join(g.sentence for g in silent)
        reason = (
            f"generation {status.world.generation} may still run: {who}; "
            f"it is taken over {policy.takeover_s:g} s after the last sign"
        )
        return Wait(reason=reason, until_s=until)
    return None


def _can_reach_boundary(view: View) -> bool:
    """Whether the workers of the leaving nodes step together in an intact group: then all of them
    can leave, and save, at one step."""
    stepping = {
        n.node.node_id: n.node.running
        for n in view.nodes
        if n.node.running is not None
        and n.node.in_process
        and n.liveness is not Liveness.DEAD
        and n.node.state in (NodeState.LEAVING, NodeState.READY)
    }
    oldest = min((group.generation for group in stepping.values()), default=0)
    ids = ids_in(stepping.values())
    is_complete = ids is not None and ids <= stepping.keys()
    is_broken = any(report.generation >= oldest for report in view.failure_reports)
    return bool(stepping) and is_complete and not is_broken


def _still_stepping(view: View, now: float, policy: Policy) -> Wait | None:
    """Nodes that leave save the step at which they do, in-process workers at a boundary. In a world
    without members, so do nodes that were not asked to leave: they share a replica with one that
    was, or have not received that world yet. Until then they make progress, and others would begin
    without it. A node that runs an older world than the last one with members was excluded from
    that one, when it could not step any more."""
    if (silent := _silent_leavers(view, now, policy)) is not None:
        return silent
    leavers = [n for n in _running(view) if n.node.state is NodeState.LEAVING]
    if (world := view.world) is not None and not world.members:
        others = (NodeState.LEAVING, NodeState.FINISHED, NodeState.FAILED)
        asked = {member.node_id for member in world.leaving}
        leavers += [
            n
            for n in _running(view)
            if n.node.state not in others
            and (n.node.node_id in asked or _may_have_entered(n.node, world.lineage))
        ]
    return _wait_for_workers(view, leavers, "leaving", now, policy)


def _may_have_entered(node: Node, lineage: Sequence[int]) -> bool:
    """Whether its workers run the last world with members, or one after it."""
    return node.running is not None and node.running.generation >= max(lineage, default=0)


def _stepping_apart(view: View, status: MemberStatus, now: float, policy: Policy) -> Wait | None:
    """Wait for leaving nodes that step in a group without a survivor: those that have joined since
    must not start beside it."""
    survivors = {n.node.node_id: n.node for n in status.survivors}
    apart = []
    for n in _running(view):
        running, ids = n.node.running, group_of(n.node.running)
        if ids is None:  # only its name is known
            ids = tuple(i for i, node in survivors.items() if node.running == running)
        if n.node.state is NodeState.LEAVING and survivors and survivors.keys().isdisjoint(ids):
            apart.append(n)
    return _wait_for_workers(view, apart, "leaving", now, policy)


def _silent_leavers(view: View, now: float, policy: Policy) -> Wait | None:
    """Wait for nodes that were leaving when their leases ended. One that has left says so in a
    record without a lease; of the others, nobody knows whether their workers have stopped."""
    leaving = {m.node_id for m in view.world.leaving} if view.world is not None else set()
    silent = [m for m in view.missing if m.member.node_id in leaving and m.may_step]
    until_s = max((m.last_sign_s for m in silent), default=-math.inf) + policy.takeover_s
    if now >= until_s:
        return None
    who = listed([m.member.name for m in silent])
    reason = (
        f"the workers of {who} were leaving when the leases expired, and may still run; "
        f"taken over {policy.takeover_s:g} s after the last sign"
    )
    return Wait(reason=reason, until_s=until_s)


def _are_members_here(view: View, status: MemberStatus) -> bool:
    """Whether members that are leaving still respond. Recording their departure now spares the
    next start the wait for nodes that no longer respond."""
    members = set(status.world.node_ids)
    return any(n.node.node_id in members and n.liveness is not Liveness.DEAD for n in view.nodes)


def _gather(
    view: View, reference: WorldRecord | Node, now: float, policy: Policy, cause: Cause, why: str
) -> Proposal | Wait:
    """A world of joining nodes only: at once when full, after the last call when enough."""
    candidates = find_joining_nodes(view, reference, now, in_process=False)
    per_replica = reference.nodes_per_replica
    arranged = arrange(
        None, (), candidates.eligible, per_replica=per_replica, max_nodes=reference.max_nodes
    )
    # The next ones may form a replica together with waiting nodes.
    called = candidates.eligible[: reference.max_nodes]
    nodes, few = arranged.nodes, incomplete(called, per_replica)
    waiting = f"; {waiting_for_others([n.node.name for n in few], per_replica)}" if few else ""
    if len(nodes) < max(1, reference.min_nodes):
        reason = f"{why}{count(called)} of at least {reference.min_nodes} nodes arrived{waiting}"
        return Wait(reason=also(reason, candidates), until_s=candidates.admissible_from_s)
    until = max(n.state_since_s for n in called) + policy.last_call_s
    if len(nodes) + per_replica <= reference.max_nodes and now < until:
        reason = (
            f"{why}{count(called)} of at most {reference.max_nodes} nodes arrived{waiting}, "
            f"last call of {policy.last_call_s:g} s"
        )
        return Wait(reason=also(reason, candidates), until_s=until)
    reason = f"{why}{names(nodes)} {verb(nodes, 'start')}{waiting}"
    return propose(view, reference, nodes, cause, reason)
