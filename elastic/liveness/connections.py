"""The nodes that have lost their liveness connection to this one: half of the proof of a death.

A port that refuses has no listener, as seen from this node. That is the case after a death, but
also behind a firewall that rejects, or while a proxy restarts. Only together with a lost lease or
with the end of an open connection does it prove that the process has ended; a later response is
newer evidence, and revokes the proof.
"""

from __future__ import annotations


class Connections:
    """Kept across all terms: a node that becomes leader has a record of the connections that it
    lost as a follower. For the node's thread."""

    def __init__(self) -> None:
        self.followers: dict[str, int] = {}  # node_id -> open connections from it
        self.leaders: set[str] = set()  # ours to them are open: the current and the previous one
        self._lost: set[str] = set()

    def opened(self, node_id: str, is_leader: bool) -> None:
        """A connection has shown the node's id; ``is_leader``: one of ours to the leader."""
        if is_leader:
            self.leaders.add(node_id)
        else:
            self.followers[node_id] = self.followers.get(node_id, 0) + 1
        self._lost.discard(node_id)

    def closed(self, node_id: str, is_leader: bool, *, fell_silent: bool = False) -> None:
        """A connection ended; one that never opened is no loss, nor one of several. Nor one that
        fell silent: the peer's kernel did not close it, so its process may live."""
        if is_leader:
            was_open = node_id in self.leaders
            self.leaders.discard(node_id)
        else:
            count = self.followers.pop(node_id, 0)
            was_open = count > 0
            if count > 1:
                self.followers[node_id] = count - 1
        if fell_silent:
            return
        if was_open and node_id not in self.followers and node_id not in self.leaders:
            self._lost.add(node_id)

    def dropped(self, node_id: str) -> None:
        """This node has closed its connection to a former leader: no loss."""
        self.leaders.discard(node_id)

    def answered(self, node_id: str) -> None:
        """The node has responded since: an earlier close no longer proves anything."""
        self._lost.discard(node_id)

    def is_lost(self, node_id: str) -> bool:
        """Whether a connection with it was open and is not, and it has not answered since."""
        return node_id in self._lost

    def forget(self, node_id: str) -> None:
        """This node is no longer relevant."""
        self._lost.discard(node_id)
