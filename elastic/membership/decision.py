"""Decides the next world: docs/explanation/protocol.md, section 2, as a pure function.

``decide(view, now, policy)`` evaluates the leader's view and returns the next world with its cause
in words, what it waits for and until when, or that the job has ended. No clock, no I/O, no
randomness: equal arguments give equal results.

Arguments and results are in ``view.py``. ``member_status.py`` classifies the members of the current
world, ``joining_nodes.py`` the nodes outside it. ``surviving_world.py`` decides if a member
survives; otherwise this module does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from elastic.membership.joining_nodes import find_joining_nodes, first_node, refusal
from elastic.membership.member_status import (
    MemberStatus,
    classify_members,
    ids_in,
    overdue_as_missing,
)
from elastic.membership.proposal import also, count, listed, names, propose, verb, world_of
from elastic.membership.records import (
    Cause,
    Node,
    NodeState,
    Outcome,
    WorldRecord,
    WorldReference,
)
from elastic.membership.replicas import arrange, incomplete, waiting_for_others
from elastic.membership.surviving_world import SurvivingWorld
from elastic.membership.view import (
    Decision,
    End,
    Liveness,
    MissingMember,
    NodeView,
    Policy,
    Proposal,
    View,
    Wait,
)

__all__ = [
    "Decision",
    "End",
    "Liveness",
    "MissingMember",
    "NodeView",
    "Policy",
    "Proposal",
    "View",
    "Wait",
    "adoptable",
    "decide",
    "refusal",
    "waiting_nodes",
    "world_of",
]


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
    if status.over:
        return _still_ending(view, now, policy) or _success(status)
    if status.unneeded:
        reason = f"{'; '.join(status.sentences)}; the job ends"
        return propose(view, world, (), Cause.PAUSED, reason)
    # Joining nodes that have not switched yet must not start together with leaving ones.
    only_joining = status.in_process and not any(n.node.running for n in status.running)
    if only_joining and (leaving := _still_stepping(view, now, policy)) is not None:
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
    who = listed(status.finished or status.ended)
    sentences = [f"{who} finished", *status.sentences]
    return End(outcome=Outcome.SUCCESS, reason="; ".join(sentences), exit_code=0)


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
    why = "; ".join(status.sentences) or "the last world has no members"
    if status.world.left_in_order and status.world.committed_step:
        why += f" (all nodes had left, after step {status.world.committed_step})"
    # No member remains: as in a first world, the limits of the first node apply.
    reference = first_node(view) or status.world
    decision = _gather(view, reference, now, policy, Cause.TAKEOVER, f"{why}; ")
    stepping = _still_stepping(view, now, policy)
    is_waiting = isinstance(decision, Wait) or stepping is not None
    if is_waiting and not silent and _leaving(view, status):
        # (Also together with waiting nodes: the step must be announced to the leaving ones.)
        planned, why = _can_reach_boundary(view), f"{why}; no member remains"
        empty = propose(view, status.world, (), Cause.PAUSED, why, planned=planned)
        causes = {gone.cause for gone in status.gone}
        in_order = status.world.left_in_order or causes == {Cause.LEFT}
        return replace(empty, left_in_order=in_order)
    if isinstance(decision, Proposal) and stepping is not None:
        return stepping
    return decision


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
    without it."""
    is_empty = view.world is not None and not view.world.members
    ending = (NodeState.FINISHED, NodeState.FAILED)
    leavers = tuple(
        n
        for n in _running(view)
        if n.node.state is NodeState.LEAVING or (is_empty and n.node.state not in ending)
    )
    return _wait_for_workers(view, leavers, "leaving", now, policy)


def _leaving(view: View, status: MemberStatus) -> bool:
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
    found = arrange(
        None, (), candidates.eligible, per_replica=per_replica, max_nodes=reference.max_nodes
    )
    # The next ones may form a replica together with waiting nodes.
    called = candidates.eligible[: reference.max_nodes]
    nodes, few = found.nodes, incomplete(called, per_replica)
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
