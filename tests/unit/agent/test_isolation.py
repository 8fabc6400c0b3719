"""Isolation: when a node without etcd stops, and how long a frozen node may take."""

from __future__ import annotations

from typing import Any, cast

from kit.journal import MemoryJournal
from kit.manual_clock import ManualClock
from kit.membership_nodes import node, world
from kit.memory_store import MemoryStore

from elastic.agent.node import NodeContext, NodeStatus, RunSecret
from elastic.agent.service import IsolationDetector
from elastic.errors import StoreUnreachable
from elastic.membership.records import Keys, NodeState
from elastic.tuning.options import AgentOptions
from elastic.wire.handshake import SecretKey

KEYS = Keys.of("/elastic", "job")
TAKEOVER_S = 40.0


class NodeThread:
    """A node whose workers run, as its thread sees it; etcd answers at ``contact_s``."""

    def __init__(self) -> None:
        self.clock = ManualClock(1000.0)
        self.contact_s = 1000.0
        self.status = NodeStatus(node("n1", NodeState.STARTING, running=world("n1")), KEYS, 1000.0)
        context = NodeContext(
            store=MemoryStore(),
            keys=KEYS,
            secret=RunSecret(SecretKey.generate(), KEYS.root),
            options=AgentOptions(takeover_s=TAKEOVER_S),
            status=self.status,
            clock=self.clock,
            journal=MemoryJournal(),
        )
        self.contact = IsolationDetector(context, cast(Any, None), lambda: self.contact_s)

    def runs_for(self, seconds: float, *, every_s: float = 1.0) -> bool:
        """Whether the node continues."""
        end_s = self.clock.monotonic() + seconds
        while self.clock.monotonic() < end_s and self.status.fatal is None:
            self.clock.advance(every_s)
            self.contact.check()
        return self.status.fatal is None


def test_a_node_without_etcd_stops_after_half_of_takeover_s() -> None:
    thread = NodeThread()
    assert thread.runs_for(TAKEOVER_S / 2)
    assert not thread.runs_for(2.0)
    assert isinstance(thread.status.fatal, StoreUnreachable)


def test_a_frozen_node_has_time_to_reconnect_to_etcd() -> None:
    thread = NodeThread()
    thread.runs_for(5.0)
    thread.clock.advance(TAKEOVER_S)
    assert thread.runs_for(2.0)
    thread.contact_s = thread.clock.monotonic()
    assert thread.runs_for(TAKEOVER_S / 2)


def test_a_frozen_node_that_cannot_reach_etcd_stops() -> None:
    thread = NodeThread()
    thread.runs_for(5.0)
    thread.clock.advance(TAKEOVER_S)
    assert not thread.runs_for(10.0)


def test_a_node_with_long_blocking_calls_and_no_etcd_stops() -> None:
    assert not NodeThread().runs_for(TAKEOVER_S, every_s=8.0)
