"""A leaving node whose departure the leader cannot announce asks its workers itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
from kit.journal import MemoryJournal
from kit.manual_clock import ManualClock
from kit.membership_nodes import node, world
from kit.memory_store import MemoryStore

from elastic.agent.ending import (
    UNANNOUNCED_S,
    UnannouncedLeave,
)
from elastic.agent.node import NodeContext, NodeStatus, RunSecret
from elastic.membership.records import Keys, NodeState, WorldRecord
from elastic.tuning.intervals import (
    ANNOUNCE_S,
)
from elastic.tuning.options import AgentOptions
from elastic.wire.handshake import SecretKey

KEYS = Keys.of("/elastic", "job")


class NodeThread:
    """A node whose workers train in process, as its thread sees it."""

    def __init__(self, *, in_process: bool = True) -> None:
        self.clock = ManualClock(1000.0)
        self.asked: list[str] = []
        self.announced: WorldRecord | None = world("n1", "n2")
        self.store_fails = False
        own = node("n1", NodeState.READY, in_process=in_process, running=self.announced)
        self.status = NodeStatus(own, KEYS, 1000.0)
        context = NodeContext(
            store=MemoryStore(),
            keys=KEYS,
            secret=RunSecret(SecretKey.generate(), KEYS.root),
            options=AgentOptions(),
            status=self.status,
            clock=self.clock,
            journal=MemoryJournal(),
        )
        self.leave = UnannouncedLeave(
            context, lambda: self.announced, self._ask, lambda: self.store_fails
        )

    def _ask(self, reason: str) -> None:
        self.asked.append(reason)
        self.announced = world()

    def is_asked_after(self, seconds: float) -> bool:
        self.status.change_node(lambda own: replace(own, state=NodeState.LEAVING))
        self.leave.check()
        self.clock.advance(seconds)
        self.leave.check()
        self.leave.check()
        return len(self.asked) == 1


def test_workers_of_which_no_world_is_announced_are_asked_once() -> None:
    assert not NodeThread().is_asked_after(UNANNOUNCED_S - 0.1)
    assert NodeThread().is_asked_after(UNANNOUNCED_S)


def test_they_are_asked_soon_if_the_store_fails() -> None:
    thread = NodeThread()
    thread.store_fails = True
    assert thread.is_asked_after(ANNOUNCE_S)


def test_an_announced_world_without_the_node_is_enough() -> None:
    thread = NodeThread()
    thread.announced = world("n2")
    assert not thread.is_asked_after(60.0)


@pytest.mark.parametrize("in_process", [True, False])
def test_only_leaving_nodes_ask_workers_that_they_can_ask(in_process: bool) -> None:
    thread = NodeThread(in_process=in_process)
    thread.leave.check()
    thread.clock.advance(60.0)
    thread.leave.check()
    assert not thread.asked
    assert in_process or not thread.is_asked_after(60.0)
