"""The nodes whose liveness connection to this node was lost: half of the proof of a death.

A port that refuses connections has no listener, as seen from this node. That is so after a death,
but also behind a firewall that rejects, or while a proxy restarts. It proves that the process has
ended only together with a lost lease or with the end of an open connection. A later response is
newer evidence, and revokes the proof.
"""

from __future__ import annotations

from collections.abc import Container


class Connections:
    """Kept across all terms: a node that becomes leader knows which connections it lost as a
    follower. Used on the node's thread only."""

    def __init__(self) -> None:
        self.followers: dict[str, int] = {}  # node_id -> open connections from it
        self.leaders: set[str] = set()  # with an open connection: the current, the previous
        self._lost: set[str] = set()

    def opened(self, node_id: str, is_leader: bool) -> None:
        """A connection has proved the node's id; ``is_leader``: it is this node's to the leader."""
        if is_leader:
            self.leaders.add(node_id)
        else:
            self.followers[node_id] = self.followers.get(node_id, 0) + 1
        self._lost.discard(node_id)

    def closed(self, node_id: str, is_leader: bool, *, is_lost: bool = True) -> None:
        """A connection has ended. It does not count as lost if it was never open, if it was one of
        several, or without ``is_lost``: if it fell silent, the peer's kernel did not close it, and
        its process may live; a peer may close it because it follows another node now."""
        if is_leader:
            was_open = node_id in self.leaders
            self.leaders.discard(node_id)
        else:
            count = self.followers.pop(node_id, 0)
            was_open = count > 0
            if count > 1:
                self.followers[node_id] = count - 1
        if not is_lost:
            return
        if was_open and node_id not in self.followers and node_id not in self.leaders:
            self._lost.add(node_id)

    def dropped(self, node_id: str) -> None:
        """This node has closed its connection to a former leader, which does not count as lost."""
        self.leaders.discard(node_id)

    def answered(self, node_id: str) -> None:
        """The node has responded: an earlier close no longer proves anything."""
        self._lost.discard(node_id)

    def is_lost(self, node_id: str) -> bool:
        """Whether an open connection to this node was lost, and it has not responded since."""
        return node_id in self._lost

    def retain_only(self, node_ids: Container[str]) -> None:
        """Drop the lost connections of all other nodes, which are no longer relevant."""
        self._lost = {node_id for node_id in self._lost if node_id in node_ids}
