"""The meeting point of a replica's ranks: on this node, or at the first of the replica's nodes.

Runs on the node's thread. Workers that were started for a world find their replica by its order of
ranks. Workers that were started while others train find it through the key ``replicas``: each node
takes a seat in the oldest incomplete replica, and waits until that is complete
(docs/decisions/0030).
"""

from __future__ import annotations

import contextlib
import math
import secrets
from collections.abc import Iterable
from dataclasses import replace

from elastic.agent.messages import publish_change
from elastic.agent.supervision.known_workers import KnownWorkers
from elastic.errors import CoordinationError, NodeRefused, RecordError
from elastic.link.protocol import ReplicaJoin, ReplicaMeet, ReplicaPending
from elastic.link.server import LinkServer, Worker
from elastic.membership.records import (
    Node,
    NodeReplica,
    ReplicaSeat,
    ReplicaSeats,
    WorldRecord,
    decode,
    encode,
)
from elastic.membership.replicas import take_seat
from elastic.node.context import NodeContext
from elastic.node.run_secret import STORE
from elastic.store.keyvalue import Entry
from elastic.tuning.agent_intervals import (
    ASK_MEMBERS_S,
    REPLICA_FORMS_ON_DEVICE_S,
    REPLICA_FORMS_S,
)


class ReplicaMeetings:
    """One per agent, across all starts of its workers."""

    def __init__(self, context: NodeContext, known: KnownWorkers, server: LinkServer) -> None:
        self._at = context
        self._known = known
        self._server = server
        self._ask_at_s = -math.inf

    @property
    def _node(self) -> Node:
        return self._at.status.node

    def forget(self) -> None:
        """Reset the state when the workers are restarted."""
        self._at.status.replica_is_lost = False

    # ── requests of workers ──────────────────────────────────────────────────────────────

    def join(self, worker: Worker, request: ReplicaJoin) -> None:
        """Handle a worker's request to meet the other ranks of its replica."""
        node, size = self._node, request.size
        workers = self._known.replicas.join(worker, size, node.nproc)
        if not workers:
            return
        if node.running is None and (refusal := self._refusal(request.mesh)) is not None:
            self._at.status.fail(refusal)
            return
        publish_change(self._at, lambda n: replace(n, mesh=request.mesh))
        if size <= node.nproc:
            nonce = secrets.token_hex(8)
            for one in workers:
                self._known.meeting_left_s[one.pid] = _time_to_meet_s(request)
                self._server.send(ReplicaMeet(nonce=nonce, rank=one.local_rank % size), one)
        elif (running := self._at.status.running) is not None:
            self._meet_in_world(running)
        else:
            start = secrets.token_hex(8)
            publish_change(self._at, lambda n: replace(n, replica_start=start, replica=()))
            for one in workers:
                self._server.send(ReplicaPending(), one)

    def _refusal(self, mesh: str) -> NodeRefused | None:
        """The error that ends this node if the job that it joins runs with another mesh."""
        node, keys = self._node, self._at.keys
        try:
            nodes = _nodes_of(self._at.store.list(keys.nodes).entries).values()
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

    def _meet_in_world(self, world: WorldRecord) -> None:
        """Meet in a world for which the workers of all its nodes were started."""
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
        publish_change(self._at, lambda n: replace(n, replica=node_ids))
        for worker in self._server.workers():
            meeting = ReplicaMeet(
                nonce=nonce,
                rank=first_rank + worker.local_rank,
                host=host,
                port=port,
                store_key=self._at.secret.key(STORE).text,
                store_tls=self._at.tls.files if self._at.tls is not None else None,
            )
            self._server.send(meeting, worker)

    # ── workers that were started while others train ─────────────────────────────────────

    def look(self, now: float) -> float:
        """Called on every iteration once this node is registered; returns the time of the next
        call.

        Until its workers are in a world, it takes a seat, and checks whether the replica is lost.
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
        keys, store = self._at.keys, self._at.store
        entry = store.get(keys.replicas)
        # Read after the seats: a node publishes the id of its start before it takes a seat.
        nodes = _nodes_of(store.list(keys.nodes).entries)
        known = decode(ReplicaSeats, entry.key, entry.value).replicas if entry is not None else ()
        own_seat = ReplicaSeat(node_id=node.node_id, start=node.replica_start)
        replicas = take_seat(
            known,
            own_seat,
            {n.node_id: n.replica_start for n in nodes.values()},
            per_replica=node.nodes_per_replica,
            nonce=secrets.token_hex(8),
        )
        if node.replica:
            # Only recorded seats: each start of the same node's workers has a different seat.
            recorded = tuple(replica for replica in replicas if replica in known)
            self._at.status.replica_is_lost = _ids_of(recorded, own_seat) != node.replica
            return
        if replicas != known:
            record = encode(ReplicaSeats(replicas=replicas))
            revision = entry.mod_revision if entry is not None else 0
            swapped = store.compare_and_swap(keys.replicas, record, expected_revision=revision)
            if swapped is None:
                return  # another node was faster: retry later
        replica = next(r for r in replicas if own_seat in r.seats)
        if len(replica.seats) == node.nodes_per_replica:
            first = nodes[replica.seats[0].node_id]
            ids = tuple(seat.node_id for seat in replica.seats)
            self._meet(replica.nonce, ids, first.address, first.replica_port)


def _nodes_of(entries: Iterable[Entry]) -> dict[str, Node]:
    nodes = {}
    for entry in entries:
        with contextlib.suppress(RecordError):  # the leader reports it
            node = decode(Node, entry.key, entry.value)
            nodes[node.node_id] = node
    return nodes


def _time_to_meet_s(request: ReplicaJoin) -> float:
    return REPLICA_FORMS_ON_DEVICE_S if request.on_device else REPLICA_FORMS_S


def _ids_of(replicas: tuple[NodeReplica, ...], own_seat: ReplicaSeat) -> tuple[str, ...]:
    found = next((r for r in replicas if own_seat in r.seats), None)
    return tuple(seat.node_id for seat in found.seats) if found is not None else ()
