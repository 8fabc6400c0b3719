"""Nodes, worlds and views for tests of ``decide``: short to write, complete to read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from elastic.membership.decision import adoptable, decide, find_joining_nodes, first_node
from elastic.membership.records import FailureReport, Node, NodeState, ProcessIdentity, WorldRecord
from elastic.membership.view import (
    Liveness,
    MemberStatus,
    MissingMember,
    NodeView,
    Policy,
    Proposal,
    View,
    Wait,
    classify_members,
    overdue_as_missing,
)
from elastic.wire.messages import Cause, WorldReference, WorldState

POLICY = Policy(min_nodes=2, max_nodes=4)
NOW = 1000.0


def node(
    name: str,
    state: NodeState = NodeState.ARRIVED,
    *,
    joined_at_s: float | None = None,
    arrived_for: int = 0,
    in_process: bool = False,
    running: WorldReference | None = None,
    failure: str | None = None,
    exit_code: int | None = None,
    library: str = "0.1.0",
    limits: tuple[int, int] = (2, 4),
    replica_size: int = 1,
) -> Node:
    """``name`` is ``n1``, ``n2``, …; seniority follows the number unless told otherwise."""
    return Node(
        node_id=f"id-{name}",
        name=name,
        nproc=1,
        role="default",
        address=f"10.0.0.{name[1:]}",
        ports=(5001, 5002, 5003),
        liveness_port=6000,
        process=ProcessIdentity(
            host=name,
            machine_id="",
            boot_id="b",
            pod_uid="",
            pid_namespace=1,
            pid=int(name[1:]),
            start_ticks=1,
        ),
        state=state,
        in_process=in_process,
        min_nodes=limits[0],
        max_nodes=limits[1],
        library=library,
        torch="2.13.0",
        running=running,
        arrived_for=arrived_for,
        failure=failure,
        failure_exit_code=exit_code,
        joined_at_s=float(name[1:]) if joined_at_s is None else joined_at_s,
        replica_size=replica_size,
    )


def seen(
    n: Node,
    *,
    since_s: float = NOW - 50,
    liveness: Liveness = Liveness.ALIVE,
    suspect_since_s: float | None = None,
) -> NodeView:
    return NodeView(
        node=n, liveness=liveness, state_since_s=since_s, suspect_since_s=suspect_since_s
    )


def arrived(name: str, *, since_s: float = NOW - 50) -> NodeView:
    """A joining node of restart mode."""
    return seen(node(name), since_s=since_s)


def runs(name: str) -> NodeView:
    """A member of restart mode whose workers run."""
    return seen(node(name, NodeState.STARTING))


def out(name: str, generation: int = 7, failure: str | None = None) -> NodeView:
    """A member whose workers of ``generation`` ended."""
    return seen(node(name, arrived_for=generation, failure=failure))


def in_state(name: str, state: NodeState) -> NodeView:
    return seen(node(name, state))


def suspect(n: NodeView, since_s: float | None = NOW) -> NodeView:
    return replace(n, liveness=Liveness.SUSPECT, suspect_since_s=since_s)


def dead(n: NodeView) -> NodeView:
    return replace(n, liveness=Liveness.DEAD)


def world(
    *names: str,
    generation: int = 7,
    state: WorldState = WorldState.ACTIVE,
    limits: tuple[int, int] = (2, 4),
    mode: str = "restart",
    switch_at_step: int | None = None,
    replica_size: int = 1,
) -> WorldRecord:
    return WorldRecord(
        generation=generation,
        members=tuple(node(name).as_member() for name in names),
        store_host="10.0.0.1",
        store_port=5001,
        nonce="ab",
        mode=mode,
        switch_at_step=switch_at_step,
        state=state,
        min_nodes=limits[0],
        max_nodes=limits[1],
        lineage=(5, 6),
        cause=Cause.FIRST,
        reason="test",
        time_s=0.0,
        library="0.1.0",
        replica_size=replica_size,
    )


def ran(last: WorldRecord, *generations: int | None) -> WorldRecord:
    """The same world, with the last generation that each member had run when it was written."""
    pairs = zip(last.members, generations, strict=True)
    return replace(last, members=tuple(replace(m, ran_generation=g) for m, g in pairs))


def missing(name: str, *, proved_dead: bool = False, last_sign_s: float = NOW - 5) -> MissingMember:
    return MissingMember(
        member=node(name).as_member(), proved_dead=proved_dead, last_sign_s=last_sign_s
    )


def view(
    last: WorldRecord | None,
    *nodes: NodeView,
    gone: Iterable[MissingMember] = (),
    quarantined: Mapping[str, float] | None = None,
    failure_reports: tuple[FailureReport, ...] = (),
    world_since_s: float = NOW - 100,
) -> View:
    return View(
        world=last,
        world_since_s=world_since_s,
        nodes=nodes,
        missing=tuple(gone),
        quarantined=quarantined or {},
        failure_reports=failure_reports,
    )


def proposal(v: View, now: float = NOW, policy: Policy = POLICY) -> Proposal:
    decision = decide(v, now, policy)
    assert isinstance(decision, Proposal), decision
    return decision


def wait(v: View, now: float = NOW, policy: Policy = POLICY) -> Wait:
    decision = decide(v, now, policy)
    assert isinstance(decision, Wait), decision
    return decision


def named(p: Proposal) -> list[str]:
    """Names in rank order."""
    return [n.name for n in p.nodes]


# ── liveness ─────────────────────────────────────────────────────────────────────────────────


def assert_waits_are_bounded(v: View, now: float, policy: Policy) -> None:
    """If nothing further happens, the leader acts after a limited time, unless nothing is wrong, or
    too few nodes are there. The next world then does not depend on a silent node."""
    began_s = now
    for _ in range(10):
        decision = decide(v, now, policy)
        if isinstance(decision, Proposal):
            return _assert_reaches_its_nodes(decision, v)
        if not isinstance(decision, Wait) or _may_wait(v, now, policy):
            return None
        assert decision.until_s is not None, f"waits without a limit: {decision.reason}"
        assert now < decision.until_s, f"waits for the past: {decision.reason}"
        now = decision.until_s
        limit_s = 2 * policy.leave_s + policy.join_timeout_s * _may_wait_for_longer(v)
        assert now - began_s <= limit_s, f"waits for too long: {decision.reason}"
    raise AssertionError(f"waits again and again: {decision.reason}")


def _assert_reaches_its_nodes(decision: Proposal, v: View) -> None:
    suspects = {n.node.node_id for n in v.nodes if n.liveness is Liveness.SUSPECT}
    silent = [n.name for n in decision.nodes if n.node_id in suspects]
    # (To an intact world others are added: its silent member trains, and learns of it from etcd.)
    is_intact = decision.planned or decision.cause in (Cause.JOINED, Cause.LEFT)
    assert not silent or is_intact, f"a world with {silent}, which nobody reaches"


def _may_wait(v: View, now: float, policy: Policy) -> bool:
    if v.done is not None or adoptable(v) is not None:
        return True
    v = overdue_as_missing(v, now, policy)
    # (A world without members does not know how many nodes a replica takes.)
    reference = v.world if v.world is not None and v.world.members else first_node(v) or v.world
    if reference is None:
        return True
    status = classify_members(v, v.world) if v.world is not None else None
    survivors = status.survivors if status is not None else ()
    in_process = status is not None and status.in_process and bool(survivors)
    waiting = find_joining_nodes(v, reference, now, in_process=in_process).eligible
    if status is None or not survivors or status.world.state is WorldState.PAUSED:
        per_replica = reference.nodes_per_replica
        reached = [n for n in (*survivors, *waiting) if n.liveness is Liveness.ALIVE]
        whole = len(reached) - len(reached) % per_replica
        few = per_replica > 1 and not whole  # a node that has finished completes no replica
        if survivors and v.world is not None:
            whole += sum(n.node.state is NodeState.FINISHED for n in v.nodes)
        few |= whole < max(1, reference.min_nodes)
        return few or (in_process and per_replica > 1)  # the replicas may not have met
    if not status.changed and _is_to_grow(status, waiting, reference.max_nodes):
        return False
    return not status.changed or bool(status.replacing)


def _may_wait_for_longer(v: View) -> bool:
    """Whether the job may be about to end, or the state of dead workers is about to be received."""
    status = classify_members(v, v.world) if v.world is not None else None
    return status is not None and bool(status.ended or status.replacing)


def _is_to_grow(status: MemberStatus, waiting: tuple[NodeView, ...], max_nodes: int) -> bool:
    """Whether nodes wait for which the world has room, and all its members have entered it."""
    # (Whether nodes make up a replica, is for the tests of replicas.)
    has_room = len(status.survivors) < max_nodes and status.world.nodes_per_replica == 1
    entered = all(
        n.node.running is not None and n.node.running.generation >= status.world.generation
        for n in status.running
    )
    return bool(waiting) and has_room and entered
