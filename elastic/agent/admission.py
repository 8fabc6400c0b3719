"""Whether a node may join a job, and why it waits: it must run with the same limits and version as
the others, and a replica may need more nodes than have arrived."""

from __future__ import annotations

import contextlib
import math

from elastic.errors import CoordinationError, NodeRefused, RecordError
from elastic.events import Waiting
from elastic.membership.decision import refusal
from elastic.membership.records import Keys, Node, NodeState, WorldRecord, decode
from elastic.membership.replicas import why_waiting
from elastic.node.context import NodeContext
from elastic.store.keyvalue import Entry, KeyValue
from elastic.tuning.agent_intervals import ASK_MEMBERS_S


def refuse_if_incompatible(store: KeyValue, keys: Keys, node: Node) -> None:
    """Raises :class:`NodeRefused` if this node is incompatible with the job's nodes."""
    entry = store.get(keys.world)
    others = store.list(keys.nodes).entries
    world = decode(WorldRecord, entry.key, entry.value) if entry is not None else None
    reference = _reference(world, others, but=node.node_id)
    why = refusal(node, reference) if reference is not None else None
    if why is not None:
        raise NodeRefused(
            f"node {node.name} cannot join {keys.root}: {why}",
            hint="start it with the same --nnodes, replica_size, library version and kind of "
            "connections (with TLS or without) as the others, "
            "or use another --rdzv-id",
        )


def _reference(
    world: WorldRecord | None, entries: tuple[Entry, ...], *, but: str
) -> WorldRecord | Node | None:
    """The world if any of its members is alive, else the node that joined first: its limits and
    version apply. Invalid records are ignored."""
    nodes = []
    for entry in entries:
        try:
            nodes.append(decode(Node, entry.key, entry.value))
        except RecordError:
            continue
    # The record of a finished node remains after its end.
    nodes = [n for n in nodes if n.state is not NodeState.FINISHED]
    if world is not None and any(n.node_id in world.node_ids for n in nodes):
        return world
    others = (n for n in nodes if n.node_id != but)
    return min(others, key=lambda n: (n.joined_at_s, n.node_id), default=None)


class ReplicaWait:
    """The reason why this node has no place in the world when a replica takes several nodes; shown
    in its log and by its probes. The leader derives it from its decision, and the others from that.

    One per agent, on the node's thread. Reads the other nodes from the store, and only while this
    node may wait.
    """

    def __init__(self, context: NodeContext) -> None:
        self._at = context
        self._ask_at_s = -math.inf

    def look(self, now: float) -> float:
        """Called on every iteration once this node is registered; returns the time of the next
        call."""
        status = self._at.status
        node, world = status.node, status.world.world
        is_inside = world is not None and node.node_id in world.node_ids
        if node.nodes_per_replica == 1 or is_inside or node.running is not None:
            status.waits_for = ""
            return math.inf
        if now >= self._ask_at_s:
            self._ask_at_s = now + ASK_MEMBERS_S
            if (nodes := self._nodes()) is not None:
                self._report(why_waiting(node, world, nodes))
        return self._ask_at_s

    def _nodes(self) -> list[Node] | None:
        """None while the store is unreachable, which the node's thread reports."""
        try:
            entries = self._at.store.list(self._at.keys.nodes).entries
        except CoordinationError:
            return None
        nodes = []
        for entry in entries:
            with contextlib.suppress(RecordError):  # the leader reports it
                nodes.append(decode(Node, entry.key, entry.value))
        return nodes

    def _report(self, why: str) -> None:
        status = self._at.status
        if why and why != status.waits_for:
            self._at.journal.emit(Waiting(reason=f"{status.node.name} waits: {why}"))
        status.waits_for = why
