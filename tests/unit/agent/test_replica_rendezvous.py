"""How the agents of several nodes assemble a replica through the store."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
from kit.membership_nodes import node, world
from kit.memory_store import MemoryServer, MemoryStore

from elastic.agent.node import NodeContext, RunSecret
from elastic.agent.workers import KnownWorkers, ReplicaFormation
from elastic.errors import NodeRefused, StoreUnreachable
from elastic.link.link import (
    LinkServer,
    Message,
    ReplicaJoin,
    ReplicaPending,
    ReplicaRendezvous,
    Worker,
)
from elastic.membership.records import Keys, Node, NodeState, WorldRecord, encode
from elastic.store.keyvalue import Snapshot
from elastic.telemetry.journal import Journal
from elastic.tuning.options import AgentOptions

KEYS = Keys.of("/elastic", "job")
MESH = "shard=4"


class Workers:
    """The two workers of a link server; records the messages sent to them."""

    def __init__(self, pid: int) -> None:
        self.here = [Worker(pid=pid + rank, local_rank=rank, token=rank) for rank in range(2)]
        self.sent: list[tuple[int, Message]] = []

    def workers(self) -> list[Worker]:
        return self.here

    def send(self, message: Message, to: Worker) -> None:
        self.sent.append((to.local_rank, message))

    @property
    def meetings(self) -> dict[int, ReplicaRendezvous]:
        return {
            rank: message for rank, message in self.sent if isinstance(message, ReplicaRendezvous)
        }


class Agent:
    """A node's part in meetings, for replicas of four ranks with two ranks on a node."""

    def __init__(self, server: MemoryServer, name: str, *, running: WorldRecord | None = None):
        record = node(name, NodeState.STARTING, limits=(2, 6), replica_size=4, running=running)
        self.store = MemoryStore(server)
        self.at = NodeContext.of(
            replace(record, nproc=2, replica_port=7000 + int(name[1:])),
            store=self.store,
            keys=KEYS,
            secret=RunSecret.obtain(self.store, KEYS),
            options=AgentOptions(),
            journal=Journal(folder=None, identity={}, role="agent", run_id="job"),
        )
        self.now = 0.0
        self.start_workers(pid=10)
        self.publish()

    def start_workers(self, pid: int) -> None:
        self.workers = Workers(pid)
        server = cast(LinkServer, self.workers)
        self.meetings = ReplicaFormation(self.at, KnownWorkers(server), server)

    @property
    def node(self) -> Node:
        return self.at.status.node

    def publish(self) -> None:
        self.store.put(KEYS.node(self.node.node_id), encode(self.node))

    def join(self, mesh: str = MESH) -> None:
        for worker in self.workers.here:
            self.meetings.join(worker, ReplicaJoin(size=4, mesh=mesh))
        self.publish()

    def look(self) -> None:
        self.now += 10.0
        self.meetings.look(self.now)
        self.publish()

    def has_lost_its_replica(self) -> bool:
        """Whether torchrun has to restart its workers."""
        return self.at.status.replica_is_lost

    def die(self) -> None:
        self.store.delete(KEYS.node(self.node.node_id))

    def restart_workers(self) -> None:
        """What the service does when torchrun begins the next rendezvous."""
        none: dict[str, Any] = {"replica": (), "replica_start": "", "mesh": ""}
        self.at.status.change_node(lambda n: replace(n, **none))
        self.publish()
        self.start_workers(pid=20)
        self.meetings.forget()


def test_two_waiting_nodes_meet_at_the_first_one() -> None:
    server = MemoryServer()
    a, b, c = (Agent(server, name) for name in ("n1", "n2", "n3"))
    for agent in (a, b, c):
        agent.join()
        assert [message for _, message in agent.workers.sent] == [ReplicaPending()] * 2
    for agent in (b, a, c, b):  # the first node to check is the first of the replica
        agent.look()
    assert a.node.replica == b.node.replica == ("id-n2", "id-n1")
    met = {**b.workers.meetings, **{2 + r: m for r, m in a.workers.meetings.items()}}
    assert {place: m.rank for place, m in met.items()} == {0: 0, 1: 1, 2: 2, 3: 3}
    assert {(m.store_host, m.store_port) for m in met.values()} == {("10.0.0.2", 7002)}
    assert len({m.nonce for m in met.values()}) == 1
    assert not c.workers.meetings and not c.node.replica


def test_a_death_after_the_meeting_dissolves_the_replica() -> None:
    server = MemoryServer()
    a, b, c = (Agent(server, name) for name in ("n1", "n2", "n3"))
    for agent in (a, b):
        agent.join()
        agent.look()
    a.look()
    assert a.node.replica == b.node.replica == ("id-n1", "id-n2")
    a.look()
    assert not a.has_lost_its_replica()
    b.die()
    a.look()
    assert a.has_lost_its_replica()
    a.restart_workers()
    assert not a.has_lost_its_replica()
    for agent in (c, a):
        agent.join()
        agent.look()
    c.look()
    assert a.node.replica == c.node.replica == ("id-n3", "id-n1")
    assert a.workers.meetings[0].nonce == c.workers.meetings[0].nonce


@pytest.mark.parametrize("place", [0, 1])
def test_a_node_that_restarts_its_workers_dissolves_the_replica(place: int) -> None:
    """Even if both nodes would keep their places in the next one."""
    server = MemoryServer()
    a, b = agents = [Agent(server, name) for name in ("n1", "n2")]
    for agent in (a, b, a):
        if agent.node.replica_start == "":
            agent.join()
        agent.look()
    assert a.node.replica == b.node.replica == ("id-n1", "id-n2")
    restarted, other = agents[place], agents[1 - place]
    restarted.restart_workers()
    restarted.join()
    restarted.look()
    assert not restarted.workers.meetings, "the other's workers have met those that are gone"
    other.look()
    assert other.has_lost_its_replica()


def test_workers_of_a_world_meet_in_the_order_of_its_members() -> None:
    server = MemoryServer()
    members = world("n1", "n2", "n3", "n4", limits=(2, 6), replica_size=4)
    ports = [replace(m, nproc=2, replica_port=7000 + i) for i, m in enumerate(members.members, 1)]
    group = replace(members, members=tuple(ports))
    agent = Agent(server, "n4", running=group)
    agent.join()
    agent.look()
    met = agent.workers.meetings
    assert {rank: (m.rank, m.store_host, m.store_port) for rank, m in met.items()} == {
        0: (2, "10.0.0.3", 7003),
        1: (3, "10.0.0.3", 7003),
    }
    assert agent.node.replica == ("id-n3", "id-n4")


def test_a_joining_node_with_another_mesh_is_rejected() -> None:
    server = MemoryServer()
    trains = Agent(server, "n1", running=world("n1", "n2", limits=(2, 6), replica_size=4))
    trains.join()
    odd = Agent(server, "n3")
    odd.join("tp=4")
    assert isinstance(odd.at.status.fatal, NodeRefused)
    assert "the dimensions tp=4, the workers of n1 with shard=4" in odd.at.status.fatal.message
    assert not odd.workers.sent and not odd.node.replica_start


def test_ranks_of_one_node_meet_without_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = Agent(MemoryServer(), "n1")

    def unreachable(prefix: str) -> Snapshot:
        raise StoreUnreachable(prefix)

    monkeypatch.setattr(agent.store, "list", unreachable)
    for worker in agent.workers.here:
        agent.meetings.join(worker, ReplicaJoin(size=2, mesh="shard=2"))
    assert {rank: m.rank for rank, m in agent.workers.meetings.items()} == {0: 0, 1: 1}
