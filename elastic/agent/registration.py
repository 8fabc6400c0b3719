"""This node's key in the store, and the lease that it is attached to."""

from __future__ import annotations

import logging
from collections.abc import Callable

from elastic.agent.messages import LeaseEnded
from elastic.errors import LeaseGone
from elastic.events import LeaseLost
from elastic.membership.records import NodeState, encode
from elastic.node.context import NodeContext
from elastic.store.keyvalue import Entry, Lease


class Registration:
    """On the node's thread. ``on_new_lease`` is called once one has been granted: keys under the
    former lease are deleted."""

    def __init__(self, context: NodeContext, on_new_lease: Callable[[], object]) -> None:
        self._at = context
        self._on_new_lease = on_new_lease
        self._lease: Lease | None = None
        self._knows_world = False  # the world has been read since this lease was granted
        self.is_current = False  # the record in the store is ours and up to date

    @property
    def lease(self) -> Lease | None:
        """The lease; None before the first one, and once it is known to be lost."""
        return None if self._lease is None or self._lease.lost else self._lease

    @property
    def current_lease(self) -> Lease | None:
        """The lease to which this node's record is attached, expired or not; None without one."""
        return self._lease if self.is_current else None

    def expire(self) -> None:
        """Mark the record for rewriting."""
        self.is_current = False

    def write(self) -> Entry | None:
        """Write the node's record, under a new lease if there is none.

        Returns the world if it has not been read under this lease yet: the node may have been
        excluded while it had no lease, so its workers' permission is not renewed before the world
        is known. Raises :class:`CoordinationError`.
        """
        if self._lease is None or self._lease.lost:
            self._lease = self._at.store.lease(
                self._at.options.lease_s, on_lost=lambda: self._at.post(LeaseEnded())
            )
            self._on_new_lease()
            self._knows_world = False
            # With a new lease the store may be a new one, too.
            self._at.secret.restore(self._at.store, self._at.keys)
        node = self._at.status.node
        # The record of a finished node outlives its lease: a later leader would otherwise take the
        # node for lost, and interrupt the others.
        lease = None if node.state is NodeState.FINISHED else self._lease
        try:
            self._at.store.put(self._at.keys.node(node.node_id), encode(node), lease=lease)
        except LeaseGone:  # the store detected it before the renewal did
            gone, self._lease = self._lease, None
            gone.close(revoke=False)
            raise
        world = None if self._knows_world else self._at.store.get(self._at.keys.world)
        self._knows_world = self.is_current = True
        return world

    def on_lease_ended(self) -> None:
        """The lease no longer exists in the store; it may be an earlier one."""
        if self._lease is None or not self._lease.lost:
            return
        self._at.journal.emit(
            LeaseLost(consequence="this node registers again under the same id"),
            level=logging.WARNING,
        )
        self.is_current = False

    def delete(self) -> None:
        """Delete the node's key, unless it records for the others that this node has finished.
        Raises :class:`CoordinationError`."""
        status = self._at.status
        is_needed = status.node.state is NodeState.FINISHED and status.done is None
        if self.is_current and not is_needed:
            self._at.store.delete(self._at.keys.node(self._at.status.node.node_id))

    def end_lease(self, *, revoke: bool) -> None:
        """Stop renewing the lease, and revoke it. Raises :class:`CoordinationError`."""
        if self._lease is not None:
            self._lease.close(revoke=revoke)
