"""A node's connections to the leader, across changes of leadership."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
from kit.journal import MemoryJournal
from kit.manual_clock import ManualClock
from kit.membership_nodes import node, world
from kit.memory_store import MemoryStore

from elastic.agent import succession
from elastic.agent.liveness import LivenessServer, Verdict
from elastic.agent.node import NodeContext, NodeStatus, RunSecret, WorldEntry
from elastic.agent.succession import (
    FOLLOW_AGAIN_S,
    LeaderProbed,
    Succession,
)
from elastic.errors import StoreUnreachable
from elastic.membership.records import Keys, Leader, encode
from elastic.membership.view import Liveness
from elastic.store.keyvalue import Entry
from elastic.tuning.options import AgentOptions
from elastic.wire.handshake import SecretKey

KEYS = Keys.of("/elastic", "job")


class Follower:
    """n3, which follows n1 or n2; connections are only recorded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = ManualClock()
        key = SecretKey.generate()
        context = NodeContext(
            store=MemoryStore(),
            keys=KEYS,
            secret=RunSecret(key, KEYS.root),
            options=AgentOptions(),
            status=NodeStatus(node("n3"), KEYS, 0.0),
            clock=self.clock,
            journal=MemoryJournal(),
        )
        context.status.set_world(WorldEntry(world("n1", "n2", "n3"), 1, 0.0))
        self.posted: queue.SimpleQueue[object] = queue.SimpleQueue()
        monkeypatch.setattr(NodeContext, "post", lambda _, message: self.posted.put(message))
        self.followed: list[str] = []
        self._liveness = LivenessServer.__new__(LivenessServer)
        monkeypatch.setattr(LivenessServer, "follow", lambda _, i, host, port: self.follow(i))
        monkeypatch.setattr(LivenessServer, "unfollow", lambda _: None)
        self.succession = Succession(context, self._liveness)

    def follow(self, node_id: str) -> None:
        self.followed.append(node_id)

    def learns(self, name: str, revision: int) -> None:
        leader = Leader(node_id=f"id-{name}", address="h", liveness_port=1)
        self.succession.learn(Entry(KEYS.leader, encode(leader), revision))


@pytest.fixture
def probe_ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Probes return once it is set."""
    ends = threading.Event()

    def probe(*args: object, **options: object) -> Verdict:
        ends.wait()
        return Verdict(Liveness.SUSPECT, "silent")

    monkeypatch.setattr(succession, "probe", probe)
    yield ends
    ends.set()


def test_a_failed_first_connection_is_retried_while_a_former_leader_is_probed(
    monkeypatch: pytest.MonkeyPatch, probe_ends: threading.Event
) -> None:
    follower = Follower(monkeypatch)
    follower.learns("n1", 5)
    follower.succession.on_connection_opened("id-n1", True)
    follower.succession.on_connection_closed("id-n1", True, fell_silent=True)
    follower.succession.learn_absent(6)
    follower.learns("n2", 7)
    follower.succession.on_connection_closed("id-n2", True)
    probe_ends.set()
    probed = follower.posted.get()
    assert isinstance(probed, LeaderProbed)
    follower.succession.on_probed(probed)
    follower.succession.duties(None, follower.clock.monotonic() + FOLLOW_AGAIN_S)
    assert follower.followed == ["id-n1", "id-n2", "id-n2"]
    follower.succession.join_threads()


def test_a_leader_that_writes_its_key_again_while_it_is_probed_is_followed_again(
    monkeypatch: pytest.MonkeyPatch, probe_ends: threading.Event
) -> None:
    """Its lease had ended, and the watch delivers both changes as one."""
    follower = Follower(monkeypatch)
    follower.learns("n1", 5)
    follower.succession.on_connection_opened("id-n1", True)
    follower.succession.on_connection_closed("id-n1", True)
    follower.learns("n1", 7)
    probe_ends.set()
    probed = follower.posted.get()
    assert isinstance(probed, LeaderProbed)
    refused = Verdict(Liveness.SUSPECT, "refused", refused=True)
    follower.succession.on_probed(replace(probed, verdict=refused))
    follower.succession.duties(None, follower.clock.monotonic() + FOLLOW_AGAIN_S)
    assert follower.followed == ["id-n1", "id-n1"]
    follower.succession.join_threads()


def test_a_leader_whose_eviction_fails_is_probed_again(
    monkeypatch: pytest.MonkeyPatch, probe_ends: threading.Event
) -> None:
    """The store did not respond: nothing else would detect the death before the lease ends."""
    follower = Follower(monkeypatch)
    follower.learns("n1", 5)
    follower.succession.on_connection_opened("id-n1", True)
    follower.succession.on_connection_closed("id-n1", True)
    probe_ends.set()
    probed = follower.posted.get()
    assert isinstance(probed, LeaderProbed)

    def evict(*args: object) -> bool:
        raise StoreUnreachable("no answer")

    monkeypatch.setattr(succession, "evict", evict)
    refused = Verdict(Liveness.SUSPECT, "refused", refused=True)
    with pytest.raises(StoreUnreachable):
        follower.succession.on_probed(replace(probed, verdict=refused))
    follower.succession.duties(None, follower.clock.monotonic() + FOLLOW_AGAIN_S)
    assert follower.followed == ["id-n1", "id-n1"]
    follower.succession.join_threads()


def test_a_follower_that_leaves_a_node_that_does_not_lead_is_not_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    follower = Follower(monkeypatch)
    follower.learns("n1", 5)
    succession = follower.succession
    succession.on_connection_opened("id-n2", False)
    succession.on_connection_closed("id-n2", False)
    assert not succession.connections.is_lost("id-n2")
    succession.on_connection_opened("id-n1", True)
    succession.connections.closed("id-n1", True)
    assert succession.connections.is_lost("id-n1"), "the leader does not leave its followers"
