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
    LeaderEntry,
    LeaderProbed,
    Succession,
)
from elastic.errors import StoreUnreachable
from elastic.membership.records import Keys, Leader, Node, NodeState, WorldRecord, encode
from elastic.membership.view import Liveness
from elastic.store.keyvalue import Entry, Lease
from elastic.telemetry.events import Waiting
from elastic.tuning.intervals import ASK_MEMBERS_S
from elastic.tuning.options import AgentOptions
from elastic.wire.handshake import SecretKey
from elastic.wire.messages import WorldState

KEYS = Keys.of("/elastic", "job")


class Follower:
    """n3, which follows n1 or n2; connections are only recorded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, me: str = "n3") -> None:
        self.clock = ManualClock()
        key = SecretKey.generate()
        self.context = context = NodeContext(
            store=MemoryStore(),
            keys=KEYS,
            secret=RunSecret(key, KEYS.root),
            options=AgentOptions(),
            status=NodeStatus(node(me), KEYS, 0.0),
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


class StartingNode:
    """n9, which is not in the last world."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, last: WorldRecord) -> None:
        follower = Follower(monkeypatch, me="n9")
        follower.context.status.set_world(WorldEntry(last, 1, 0.0))
        self.context, self.clock = follower.context, follower.clock
        self.store = follower.context.store
        self.lease = self.store.lease(self.context.options.lease_s, on_lost=lambda: None)
        # (A term starts threads; the election is over once the key is written.)
        monkeypatch.setattr(Succession, "_begin_term", lambda _: None)
        self.succession = follower.succession

    def write(self, record: Node, *, lease: Lease | None) -> None:
        self.store.put(KEYS.node(record.node_id), encode(record), lease=lease)

    def leads_after(self, seconds: float) -> bool:
        self.clock.advance(seconds)
        self.succession.duties(self.lease, self.clock.monotonic())
        return self.store.get(KEYS.leader) is not None

    @property
    def reasons(self) -> list[str]:
        journal = self.context.journal
        assert isinstance(journal, MemoryJournal)
        return [event.reason for event in journal.events if isinstance(event, Waiting)]


def leaving_world() -> WorldRecord:
    """A world without members, whose workers n1 and n2 may not have ended yet."""
    both = world("n1", "n2")
    return replace(both, members=(), leaving=both.members, state=WorldState.PAUSED)


@pytest.mark.parametrize("last", [world("n1", "n2"), leaving_world()], ids=["members", "none"])
def test_a_starting_node_leads_at_once_if_all_others_have_left_in_order(
    monkeypatch: pytest.MonkeyPatch, last: WorldRecord
) -> None:
    starting = StartingNode(monkeypatch, last)
    for name, state in (("n1", NodeState.LEAVING), ("n2", NodeState.FAILED)):
        starting.write(node(name, state), lease=None)
    assert starting.leads_after(0.0)
    assert not starting.reasons


def test_a_starting_node_leads_at_once_after_a_world_of_which_nothing_remains(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert StartingNode(monkeypatch, replace(leaving_world(), leaving=())).leads_after(0.0)


@pytest.mark.parametrize("last", [world("n1", "n2"), leaving_world()], ids=["members", "none"])
@pytest.mark.parametrize("remaining", ["killed", "leaving", "finished"])
def test_a_starting_node_waits_for_a_node_that_has_not_left_in_order(
    monkeypatch: pytest.MonkeyPatch, remaining: str, last: WorldRecord
) -> None:
    starting = StartingNode(monkeypatch, last)
    starting.write(node("n1", NodeState.LEAVING), lease=None)
    if remaining == "leaving":
        starting.write(node("n2", NodeState.LEAVING), lease=starting.lease)
    elif remaining == "finished":  # it may still respond, and has a lease to lead with
        starting.write(node("n2", NodeState.FINISHED), lease=None)
    patience_s = 2 * starting.context.options.lease_s
    assert not starting.leads_after(0.0)
    assert not starting.leads_after(patience_s - 1.0)
    (reason,) = starting.reasons
    assert "n2 of the last world did not leave in order" in reason and "n1" not in reason
    assert f"waiting up to {patience_s:g} s" in reason
    assert starting.leads_after(1.0)


def test_a_starting_node_leads_as_soon_as_the_last_departure_is_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    starting = StartingNode(monkeypatch, leaving_world())
    for name in ("n1", "n2"):
        assert not starting.leads_after(ASK_MEMBERS_S)
        assert starting.succession.wake_s == starting.clock.monotonic() + ASK_MEMBERS_S
        starting.write(node(name, NodeState.LEAVING), lease=None)
    assert starting.leads_after(ASK_MEMBERS_S)


def test_a_leaving_node_of_a_world_without_members_leads_before_starting_nodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    both = leaving_world()
    me = world("n9").members
    assert StartingNode(monkeypatch, replace(both, leaving=both.leaving + me)).leads_after(0.0)


def test_a_starting_node_says_that_it_waits_for_the_lease_of_a_silent_leader(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    starting = StartingNode(monkeypatch, world("n1", "n2"))
    leader = Leader(node_id="id-n1", address="10.0.0.1", liveness_port=1)
    starting.succession.learn(Entry(KEYS.leader, encode(leader), 5))
    probed = LeaderProbed(LeaderEntry(leader, 5), Verdict(Liveness.SUSPECT, "no answer"))
    for _ in range(2):
        starting.succession.on_probed(probed)
    (reason,) = starting.reasons
    assert "10.0.0.1 does not respond (no answer)" in reason
    assert f"{starting.context.options.lease_s:g} s for its lease to expire" in reason
