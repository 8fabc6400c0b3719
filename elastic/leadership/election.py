"""Leader election: which node proposes worlds. If a node wrongly believes that it is the leader,
its compare-and-swap fails; nothing else happens.

The key ``leader`` is attached to the leader's lease. A node takes it when it is absent, and deletes
it with proof that its owner is dead. A leader outside the world hands it to a member.
"""

from __future__ import annotations

from dataclasses import dataclass

from elastic.membership.records import Keys, Leader, Node, WorldRecord, encode
from elastic.store.keyvalue import KeyValue, Lease


@dataclass(frozen=True)
class LeaderEntry:
    """The current leader key."""

    leader: Leader
    mod_revision: int


@dataclass(frozen=True)
class LeaseOf:
    """The lease of another node, by id: leases belong to the cluster, not to the client."""

    id: int
    ttl_s: float = 0.0
    lost: bool = False
    renewed_s: float = 0.0

    def close(self, *, revoke: bool = True) -> None:
        """Does nothing: another node owns the lease."""


def may_campaign(
    world: WorldRecord | None, node_id: str, *, absent_for_s: float, patience_s: float
) -> bool:
    """Members have priority; others wait ``patience_s`` for a member to campaign."""
    return world is None or node_id in world.node_ids or absent_for_s >= patience_s


def campaign(store: KeyValue, keys: Keys, me: Leader, lease: Lease) -> LeaderEntry | None:
    """Take the key if it is absent."""
    revision = store.compare_and_swap(keys.leader, encode(me), expected_revision=0, lease=lease)
    return LeaderEntry(me, revision) if revision is not None else None


def evict(store: KeyValue, keys: Keys, entry: LeaderEntry) -> bool:
    """Delete the key of a leader proved dead, unless it has changed since."""
    return store.compare_and_delete(keys.leader, expected_revision=entry.mod_revision)


def hand_over(
    store: KeyValue, keys: Keys, entry: LeaderEntry, successor: Node, successor_lease_id: int
) -> LeaderEntry | None:
    """Give the key to a member, attached to that member's own lease."""
    leader = Leader(
        node_id=successor.node_id, address=successor.address, liveness_port=successor.liveness_port
    )
    revision = store.compare_and_swap(
        keys.leader,
        encode(leader),
        expected_revision=entry.mod_revision,
        lease=LeaseOf(successor_lease_id),
    )
    return LeaderEntry(leader, revision) if revision is not None else None
