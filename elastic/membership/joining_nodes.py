"""The nodes that may join the next world: those that are not in the current one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from elastic.membership.records import Node, NodeState, WorldRecord
from elastic.membership.view import Liveness, NodeView, View
from elastic.tuning.agent_options import NODE_TLS


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
        until = quarantined_until(n.node, view)
        if n.liveness is Liveness.DEAD or not _can_join(n.node, in_process):
            continue
        if sentence := refusal(n.node, reference):
            skipped[n.node.node_id] = sentence
        elif n.liveness is Liveness.SUSPECT:
            if n.suspect_since_s is not None:  # otherwise it has just arrived, and is being probed
                skipped[n.node.node_id] = f"the leader cannot reach {n.node.name}"
        elif until is not None and now < until:
            why = view.quarantine_reasons.get(n.node.node_id, "")
            skipped[n.node.node_id] = f"{n.node.name} is quarantined" + f": {why}" * bool(why)
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
    if node.name in quarantined and not any(_is_namesake(n, node) for n in view.nodes):
        ends.append(quarantined[node.name])
    return max(ends, default=None)


def _is_namesake(other: NodeView, node: Node) -> bool:
    is_here = other.liveness is not Liveness.DEAD and other.node.state is not NodeState.FINISHED
    return is_here and other.node.name == node.name and other.node.node_id != node.node_id


def _can_join(node: Node, in_process: bool) -> bool:
    # A ready in-process node can also be restarted into a world of the other mode; a node whose
    # workers are not ready would make an in-process world wait for it.
    if node.state is NodeState.READY:
        # A node that still runs a world that continued without it has not received that yet,
        # because it was cut off. Its workers are about to be restarted: the job does not wait for
        # them.
        return node.in_process and node.running is None
    # Its workers wait for the rest of a replica, perhaps in vain: they can be restarted.
    waits = node.state is NodeState.STARTING and bool(node.replica_start) and node.running is None
    return (node.state is NodeState.ARRIVED or waits) and not in_process
