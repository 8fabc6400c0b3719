"""The permission to train: it ends training on a node whose agent can no longer do so.

An agent can freeze (SIGSTOP, a cgroup's freezer, a suspended machine) while its workers continue to
train. The others take over the job ``takeover_s`` after the last sign of its node, which is not
earlier than the last renewal of its lease. So the agent permits its workers to begin steps and
commit saves until ``permission_s`` after that renewal, and extends the permission while its loop
runs, it holds its lease, and no world has been formed without its node. The clock is
CLOCK_BOOTTIME, which advances while processes are frozen and the machine sleeps, and is the same
for agent and workers.

etcd is only needed to extend the permission: an outage shorter than ``takeover_s / 2``, after which
the agent stops its workers (isolation.py), has no effect here.

Workers with a link wait when their permission expires, and continue when it is extended. Those of
scripts without ``elastic.join()`` are ended by the orphan reaper.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

from elastic.node.context import NodeContext
from elastic.store.keyvalue import Lease
from elastic.tuning.timeouts import permission_s

_RENEWALS = 64  # per takeover_s: little of a permission is lost, and messages are few


class PermittedWorkers(Protocol):
    """The operations on this node's workers."""

    @property
    def are_all_connected(self) -> bool: ...

    def permit(self, until_s: float) -> None: ...


class Permission:
    """Renewed on every iteration of the node's thread."""

    def __init__(self, context: NodeContext, workers: PermittedWorkers | None) -> None:
        self._at = context
        self._workers = workers
        self._granted_until_s = -math.inf
        self.on_permission: Callable[[float], object] = lambda until_s: None

    def renew(self, lease: Lease | None) -> None:
        """Extend the permission if this node holds ``lease`` and has not been excluded."""
        if lease is None or lease.lost or self._is_excluded():
            return
        takeover_s = self._at.options.takeover_s
        until_s = lease.renewed_s + permission_s(takeover_s)
        if until_s < self._granted_until_s + takeover_s / _RENEWALS:
            return
        self._granted_until_s = until_s
        if self._workers is not None:
            self._workers.permit(until_s)
        obey = self._workers is not None and self._workers.are_all_connected
        self.on_permission(math.inf if obey else until_s)

    def _is_excluded(self) -> bool:
        """Whether the job continues without this node, or has ended."""
        node, world = self._at.status.node, self._at.status.world.world
        if self._at.status.done is not None:
            return True
        return (
            world is not None
            and node.running is not None
            and world.generation > node.running.generation
            and node.node_id not in world.node_ids
            and world.switch_at_step is None
        )
