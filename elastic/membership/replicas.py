"""Replicas over several nodes: which nodes hold a model together, and which wait until they can.

A *replica* is ``replica_size`` ranks that hold the model once (docs/decisions/0030). A node with
that many workers, or a multiple, has complete replicas and joins and leaves independently. With
fewer, a replica takes several nodes: worlds consist of complete replicas, each a consecutive run in
the order of ranks. Here one node counts as one replica wherever ``per_replica`` is 1.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from elastic.errors import ConfigError
from elastic.membership.records import Node, NodeState, WorldRecord
from elastic.membership.view import NodeView
from elastic.tuning.intervals import where_to_set
from elastic.wire.messages import NodeReplica, ReplicaSlot, nodes_per_replica

Nodes = tuple[NodeView, ...]
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Arrangement:
    """The replicas of the next world."""

    intact: tuple[Nodes, ...]  # as they were in the last world, and in that order
    repaired: tuple[Nodes, ...]  # at least one of its nodes is from the last world
    formed: tuple[Nodes, ...]  # of waiting nodes only

    @property
    def nodes(self) -> Nodes:
        """In rank order. Rank 0 belongs to an intact replica if there is one."""
        replicas = (*self.intact, *self.repaired, *self.formed)
        return tuple(itertools.chain.from_iterable(replicas))


@dataclass
class _BrokenReplica:
    """A replica that has lost nodes. The remaining ones keep their places in it."""

    index: int
    places: list[NodeView | None]

    @property
    def left(self) -> list[NodeView]:
        return [n for n in self.places if n is not None]

    @property
    def lacks(self) -> int:
        return self.places.count(None)


def arrange(
    world: WorldRecord | None,
    survivors: Nodes,
    waiting: Nodes,
    *,
    per_replica: int,
    max_nodes: int,
    repairs: bool = True,
) -> Arrangement:
    """Keep intact replicas, complete broken ones from ``waiting``, then form new replicas.

    Of several broken replicas, the one that lacks the fewest nodes is completed first; if too few
    nodes wait, the last ones are dissolved for it. Without ``repairs``, the remaining nodes of a
    broken replica are not members, since their workers must restart first, and waiting nodes form
    only replicas whose workers have already connected.
    """
    most = max_nodes // per_replica
    intact, broken = _sort(world, survivors, per_replica)
    pool = list(waiting)
    repaired = _repair(broken, pool) if repairs else {}
    room = max(0, most - len(intact) - len(repaired))
    return Arrangement(
        intact=tuple(intact),
        repaired=tuple(repaired[i] for i in sorted(repaired)),
        formed=whole_replicas(pool, per_replica, have_met=not repairs)[:room],
    )


def _sort(
    world: WorldRecord | None, survivors: Nodes, per_replica: int
) -> tuple[list[Nodes], list[_BrokenReplica]]:
    """The world's replicas: the complete ones, and those of which some nodes remain."""
    alive = {n.node.node_id: n for n in survivors}
    ids = world.node_ids if world is not None else ()
    intact: list[Nodes] = []
    broken: list[_BrokenReplica] = []
    for first in range(0, len(ids), per_replica):
        places = [alive.get(i) for i in ids[first : first + per_replica]]
        # (A paused world may have an incomplete one.)
        places += [None] * (per_replica - len(places))
        left = tuple(n for n in places if n is not None)
        if len(left) == per_replica:
            intact.append(left)
        elif left:
            broken.append(_BrokenReplica(first, places))
    return intact, broken


def _repair(broken: list[_BrokenReplica], pool: list[NodeView]) -> dict[int, Nodes]:
    """Fill the replicas, by their index. Takes from ``pool`` first, where unused nodes remain."""
    open_ = deque(sorted(broken, key=lambda r: (r.lacks, r.index)))
    donors = sum(len(replica.left) for replica in open_)  # nodes of those that are still open
    repaired: dict[int, Nodes] = {}
    while open_:
        replica = open_.popleft()
        donors -= len(replica.left)
        if len(pool) + donors < replica.lacks:
            break
        taken = pool[: replica.lacks]
        del pool[: replica.lacks]
        while len(taken) < replica.lacks:
            taken.append(_take_from(open_))
            donors -= 1
        filled = iter(taken)
        repaired[replica.index] = tuple(
            n if n is not None else next(filled) for n in replica.places
        )
    return repaired


def _take_from(donors: deque[_BrokenReplica]) -> NodeView:
    """A node of the replica that would have been repaired last."""
    last = donors[-1]
    node = last.left[-1]
    last.places[last.places.index(node)] = None
    if not last.left:
        donors.pop()
    return node


def whole_replicas(
    nodes: Sequence[NodeView], per_replica: int, *, have_met: bool
) -> tuple[Nodes, ...]:
    """The replicas that the waiting ``nodes`` form, in their order. If the workers keep their
    processes (``have_met``), only those whose workers have already connected."""
    if have_met and per_replica > 1:
        return tuple(_that_have_met(nodes, per_replica))
    whole = len(nodes) - len(nodes) % per_replica
    return tuple(tuple(nodes[i : i + per_replica]) for i in range(0, whole, per_replica))


def _that_have_met(nodes: Sequence[NodeView], per_replica: int) -> Iterator[Nodes]:
    waiting = {n.node.node_id: n for n in nodes}
    for ids in dict.fromkeys(n.node.replica for n in nodes):
        members = tuple(waiting[i] for i in ids if i in waiting and waiting[i].node.replica == ids)
        if len(members) == per_replica:
            yield members


# ── slots: the replicas of nodes whose workers start while others train ──────────────────────


def take_slot(
    replicas: tuple[NodeReplica, ...],
    mine: ReplicaSlot,
    starts: Mapping[str, str],
    *,
    per_replica: int,
    nonce: str,
) -> tuple[NodeReplica, ...]:
    """Add the slot ``mine`` to the oldest replica that lacks a node, or to a new one.

    ``starts`` has the current start of the workers of every live node. A slot of another start is
    void. So is a replica that was complete and has lost a node: the others may have connected to
    it.
    """
    kept = [r for r in (_without_void(r, starts, per_replica) for r in replicas) if r is not None]
    if any(mine in replica.slots for replica in kept):
        return tuple(kept)
    for place, replica in enumerate(kept):
        if len(replica.slots) < per_replica:
            kept[place] = replace(replica, slots=(*replica.slots, mine))
            return tuple(kept)
    return (*kept, NodeReplica(nonce=nonce, slots=(mine,)))


def _without_void(
    replica: NodeReplica, starts: Mapping[str, str], per_replica: int
) -> NodeReplica | None:
    valid = tuple(slot for slot in replica.slots if starts.get(slot.node_id) == slot.start)
    if not valid or (len(replica.slots) == per_replica != len(valid)):
        return None
    return replace(replica, slots=valid)


# ── limits, and texts for users ──────────────────────────────────────────────────────────────


def incomplete(nodes: Sequence[T], per_replica: int) -> Sequence[T]:
    """The last of the waiting ``nodes``, oldest first, which are too few for another replica."""
    return nodes[len(nodes) - len(nodes) % per_replica :]


def require_whole_replicas(
    replica_size: int, *, nproc: int, limits: tuple[int, int]
) -> tuple[int, int]:
    """Round ``limits``, the min and max nodes of a job, up and down to whole replicas.

    >>> require_whole_replicas(8, nproc=4, limits=(3, 9))
    (4, 8)

    Raises ConfigError if the nodes cannot form whole replicas.
    """
    if nproc % replica_size and replica_size % nproc:
        near = nproc // replica_size * replica_size or replica_size
        raise ConfigError(
            f"replica_size={replica_size} is incompatible with {nproc} workers on this node: a "
            "node must hold whole replicas, or a replica must take whole nodes",
            hint=f"--nproc-per-node={near}, or a replica_size that divides {nproc} or is a "
            f"multiple of it ({where_to_set('replica_size')})",
        )
    per_replica = nodes_per_replica(replica_size, nproc)
    low, high = limits
    least, most = -(-low // per_replica) * per_replica, high // per_replica * per_replica
    if least > most:
        raise ConfigError(
            f"--nnodes={low}:{high} allows no whole number of replicas: with "
            f"replica_size={replica_size} and {nproc} workers per node, one takes {per_replica} "
            "nodes",
            hint=f"--nnodes={least}:{max(least, most)}, or another replica_size",
        )
    return least, most


def waiting_for_others(names: Sequence[str], per_replica: int) -> str:
    """Why nodes wait: ``n7 waits: 1 of 2 nodes of a replica``."""
    verb = "wait" if len(names) > 1 else "waits"
    return f"{', '.join(names)} {verb}: {_part(len(names), per_replica)}"


def why_waiting(node: Node, world: WorldRecord | None, nodes: Iterable[Node]) -> str:
    """``1 of 2 nodes of a replica`` if ``node`` waits for the others; otherwise empty.

    ``nodes``: all registered ones. For users: the decision considers more.
    """
    return incomplete_replica(world, nodes, node.nodes_per_replica).get(node.node_id, "")


def incomplete_replica(
    world: WorldRecord | None, nodes: Iterable[Node], per_replica: int
) -> Mapping[str, str]:
    """The ids of the nodes that wait for the others of a replica -> ``1 of 2 nodes of a replica``.

    ``nodes``: all registered ones.
    """
    if per_replica == 1:
        return {}
    inside = world.id_set if world is not None else frozenset()
    joining = (NodeState.ARRIVED, NodeState.STARTING, NodeState.READY)
    waiting = [
        n
        for n in nodes
        if n.node_id not in inside and n.running is None and n.state in joining and not n.replica
    ]
    waiting.sort(key=lambda n: (n.joined_at_s, n.node_id))
    few = incomplete(waiting, per_replica)
    return dict.fromkeys((n.node_id for n in few), _part(len(few), per_replica))


def _part(nodes: int, per_replica: int) -> str:
    return f"{nodes} of {per_replica} nodes of a replica"
