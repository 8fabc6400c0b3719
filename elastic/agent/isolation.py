"""Stops a node that has had no contact with etcd for too long, before the others continue without
it.

The others may form a world without this node ``takeover_s`` after its last sign of life
(docs/explanation/protocol.md, section 3), so it stops after half of that time. Workers that need no
restart leave at their next step boundary, as the last ones of a job do, and save; they have a
quarter of ``takeover_s`` for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from elastic.agent.supervision.workers import Workers
from elastic.errors import StoreUnreachable
from elastic.node.context import NodeContext
from elastic.tuning.agent_intervals import FROZEN_S, STORE_AWAY_S


class IsolationDetector:
    """Called on every iteration of the node's thread."""

    def __init__(
        self,
        context: NodeContext,
        workers: Workers | None,
        last_contact_s: Callable[[], float] | None,
    ) -> None:
        self._at = context
        self._workers = workers
        self._last_contact_s = last_contact_s
        self._gone_by_s: float | None = None  # deadline of workers that have been asked to leave
        self._is_lost = False
        self._checked_s = context.clock.monotonic()
        self._excused_s = self._thawed_s = -math.inf
        self.watch_is_cut = False  # logged once, and when contact is back

    @property
    def is_lost(self) -> bool:
        """Whether this node has stopped because it cannot reach etcd, and so cannot notify the
        others."""
        return self._is_lost

    @property
    def reaches_store(self) -> bool:
        """False if etcd has been unreachable for a while: a call would block the node's thread, and
        this node would not stop in time."""
        if not self.watch_is_cut or self._last_contact_s is None:
            return True
        return self._at.clock.monotonic() - self._last_contact_s() <= STORE_AWAY_S

    def require(self) -> None:
        """Raise StoreUnreachable unless :attr:`reaches_store`."""
        if not self.reaches_store:
            raise StoreUnreachable(f"etcd has been unreachable for more than {STORE_AWAY_S:g} s")

    def check(self) -> None:
        """Stop this node if it is cut off, once its workers have left or their time has expired."""
        status, now = self._at.status, self._at.clock.monotonic()
        before_s, self._checked_s = self._checked_s, now
        if self._last_contact_s is not None and now - before_s > FROZEN_S:
            self._excuse(self._last_contact_s(), now)
        if self._gone_by_s is not None:
            if status.workers_left or now >= self._gone_by_s:
                self._stop(now)
            return
        if self._last_contact_s is None or not status.has_workers_in_a_world:
            return
        takeover_s = self._at.options.takeover_s
        if now - self._last_contact_s() <= takeover_s / 2 or now - self._thawed_s <= FROZEN_S:
            return
        if self._workers is None or not status.node.in_process:
            self._stop(now)
            return
        self._gone_by_s = now + takeover_s / 4
        self._workers.ask_to_leave("this node has lost etcd")

    def _excuse(self, contact_s: float, now: float) -> None:
        """Once per contact: calls to an unreachable etcd also block the thread."""
        if contact_s > self._excused_s:
            self._excused_s, self._thawed_s = contact_s, now

    def _stop(self, now: float) -> None:
        assert self._last_contact_s is not None
        self._is_lost = True
        error = StoreUnreachable(
            f"no contact with etcd for {now - self._last_contact_s():.0f} s, half of takeover_s="
            f"{self._at.options.takeover_s:g}: this node stops, because the others may "
            "form a world without it",
            hint="check the network between this node and etcd, then start it again",
        )
        self._at.status.fail(error)
