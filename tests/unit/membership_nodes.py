"""Nodes, worlds and views for tests of ``decide``: short to write, complete to read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from elastic.membership.decision import (
    Liveness,
    MissingMember,
    NodeView,
    Policy,
    Proposal,
    View,
    Wait,
    decide,
)
from elastic.membership.records import (
    Cause,
    FailureReport,
    Node,
    NodeState,
    ProcessIdentity,
    WorldRecord,
    WorldState,
)

POLICY = Policy(min_nodes=2, max_nodes=4)
NOW = 1000.0


def node(
    name: str,
    state: NodeState = NodeState.ARRIVED,
    *,
    joined_at_s: float | None = None,
    arrived_for: int = 0,
    in_process: bool = False,
    running: WorldRecord | None = None,
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
