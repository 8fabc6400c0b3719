"""Turns chosen nodes into a proposal, a proposal into a record, and both into texts for users."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from elastic.membership.joining_nodes import JoiningNodes
from elastic.membership.records import (
    BreakageRecord,
    Cause,
    Member,
    Node,
    NodeState,
    WorldRecord,
    WorldState,
    group_of,
)
from elastic.membership.view import Liveness, NodeView, Proposal, View
from elastic.messages.world import MemoryLocation

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
    can_stay = bool(nodes) and all(n.node.in_process for n in nodes)
    in_process = can_stay and not restarts and _have_met(nodes, reference.nodes_per_replica)
    return Proposal(
        generation=_newest_generation(view) + 1,
        nodes=tuple(n.node for n in nodes),
        state=WorldState.PAUSED if cause is Cause.PAUSED else WorldState.ACTIVE,
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
    )


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
    return all(_has_met(replica, formed) for replica in replicas)


def _has_met(replica: Sequence[NodeView], formed: Mapping[int, set[tuple[str, ...]]]) -> bool:
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
    known = last.committed_step if last is not None and not last.left_in_order else None
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
        left_in_order=proposal.left_in_order,
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
