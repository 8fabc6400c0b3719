"""Leaders of jobs with two nodes per replica: services on the in-memory store.

Nodes, including leaders, die, leave and join at random, several at once. Once the job settles,
every world has complete replicas, and each node outside it reports the reason.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from kit.memory_store import MemoryServer, MemoryStore
from test_node_service import KEYS, OPTIONS, TestNode

from elastic.agent.health import readiness
from elastic.errors import NodeRefused
from elastic.membership.records import Node, NodeState, WorldRecord, decode
from elastic.telemetry.events import Waiting
from elastic.wire.messages import WorldState

PER_REPLICA, MAX_NODES = 2, 6
WHY = "1 of 2 nodes of a replica"
SPLIT = replace(OPTIONS, replica_size=PER_REPLICA)
DEADLINE_S = 60.0
ROUNDS = 6


class ReplicaNode(TestNode):
    """A node with one worker, and a torchrun that keeps polling."""

    __test__ = False
    is_here = True

    def turn(self) -> None:
        """The next action of torchrun's main thread, without waiting."""
        service = self.service
        if service.status.running is not None:
            if service.newer_world():
                self.arrive()
            return
        world = self.status.world
        if world is not None and service.world_wait.is_for_us(world):
            service.enter(world, waited_s=0.0)

    def leave(self) -> None:
        """SIGTERM in restart mode: the node leaves immediately."""
        self.service.leave("SIGTERM")
        self.service.close()
        self.is_here = False

    def die(self) -> None:
        super().die()
        self.is_here = False


Start = Callable[[], ReplicaNode]


class Job:
    """The nodes of a job, and the invariants once it has settled."""

    def __init__(self, server: MemoryServer, start: Start) -> None:
        self.server = server
        self._start = start
        self.nodes: list[ReplicaNode] = []

    def add(self, count: int) -> None:
        self.nodes += [self._start() for _ in range(count)]

    @property
    def here(self) -> list[ReplicaNode]:
        return [node for node in self.nodes if node.is_here]

    def world(self) -> WorldRecord | None:
        entry = MemoryStore(self.server).get(KEYS.world)
        return decode(WorldRecord, entry.key, entry.value) if entry is not None else None

    def settle(self) -> WorldRecord:
        """Poll until the largest possible world runs, and all other nodes have reported why they
        wait.
        """
        until_s = time.monotonic() + DEADLINE_S
        while (world := self.settled()) is None:
            assert time.monotonic() < until_s, self.describe()
            for node in self.here:
                node.turn()
            time.sleep(0.005)
        return world

    def settled(self) -> WorldRecord | None:
        world, here = self.world(), {node.id: node for node in self.here}
        whole = min(len(here) - len(here) % PER_REPLICA, MAX_NODES)
        if world is None or world.state is not WorldState.ACTIVE or len(world.members) != whole:
            return None
        inside = [here.get(i) for i in world.node_ids]
        if not all(node is not None and node.service.status.running == world for node in inside):
            return None
        outside = [node for node in self.here if node not in inside]
        waits = [node.status.waits_for for node in outside]
        return world if waits.count(WHY) == len(here) % PER_REPLICA else None

    def describe(self) -> str:
        world = self.world()
        lines = [f"{world.generation} {world.reason} {world.node_ids}" if world else "no world"]
        lines += [f"{n.id} {n.status.node.state} {n.service.status.running}" for n in self.here]
        return "\n".join(lines)


@pytest.fixture
def job() -> Iterator[Job]:
    server, nodes = MemoryServer(), list[ReplicaNode]()

    def start() -> ReplicaNode:
        nodes.append(ReplicaNode(server, max_nodes=MAX_NODES, options=SPLIT))
        nodes[-1].status.change_node(lambda node: replace(node, replica_size=PER_REPLICA))
        nodes[-1].arrive()
        return nodes[-1]

    yield Job(server, start)
    for node in nodes:
        node.service.close()
    assert not [t.name for t in threading.enumerate() if t.name == "elastic-node"]


def pairs(world: WorldRecord) -> list[tuple[str, ...]]:
    ids = world.node_ids
    return [ids[i : i + PER_REPLICA] for i in range(0, len(ids), PER_REPLICA)]


@pytest.mark.parametrize("seed", range(4))
def test_random_faults_leave_complete_replicas_and_wait_reasons(job: Job, seed: int) -> None:
    dice = random.Random(seed)
    job.add(7)
    before = job.settle()
    for _ in range(ROUNDS):
        victims = dice.sample(job.here, min(dice.choice([0, 1, 1, 2]), len(job.here) - 2))
        for victim in victims:
            (victim.die if dice.random() < 0.7 else victim.leave)()
        gone = {victim.id for victim in victims}
        if not gone:
            job.add(dice.choice([1, 2]))
        world = job.settle()
        intact = [pair for pair in pairs(before) if gone.isdisjoint(pair)]
        assert pairs(world)[: len(intact)] == intact, "an intact replica was broken up"
        left = {i for pair in pairs(before) for i in pair} - gone - set(world.node_ids)
        assert len(left) < PER_REPLICA
        before = world


def test_a_waiting_node_reports_the_reason_in_its_log_and_probes(job: Job) -> None:
    job.add(3)
    world = job.settle()
    (spare,) = (node for node in job.here if node.id not in world.node_ids)
    said = f"{spare.journal.name} waits: {WHY}"
    assert [e.reason for e in spare.events if isinstance(e, Waiting)].count(said) == 1
    status = spare.status
    verdict = readiness(
        status.node, status.world, None, is_parked=False, waits_for=status.waits_for
    )
    assert not verdict.is_ok and verdict.reason.startswith(said)

    job.add(1)
    assert len(job.settle().members) == 4
    assert status.waits_for == ""


def test_a_node_with_another_replica_size_is_refused_without_side_effects(job: Job) -> None:
    job.add(2)
    world = job.settle()
    other = ReplicaNode(job.server, max_nodes=MAX_NODES, options=OPTIONS)
    try:
        with pytest.raises(NodeRefused, match="replica_size=1, the job runs with replica_size=2"):
            other.arrive()
        assert MemoryStore(job.server).get(KEYS.node(other.id)) is None
        assert job.settle() == world
    finally:
        other.service.close()


def test_in_process_the_survivors_of_a_broken_replica_restart(job: Job) -> None:
    """Workers do not support such replicas yet; the agents do."""
    job.add(4)
    world = job.settle()
    nodes = {node.id: node for node in job.here}

    def become(node: ReplicaNode, **fields: Any) -> None:
        change: Callable[[Node], Node] = lambda record: replace(record, **fields)  # noqa: E731
        node.service.change(change)

    for node in nodes.values():
        become(node, in_process=True, state=NodeState.READY)
    first, second, third, fourth = (nodes[i] for i in world.node_ids)
    until_s = time.monotonic() + DEADLINE_S
    # The records of nodes, and the end of a connection, reach the leader in any order.
    while (states := first.service.loop.node_states()) is None or states[NodeState.READY] < len(
        nodes
    ):
        assert time.monotonic() < until_s, job.describe()
        time.sleep(0.005)
    third.die()
    while (now := job.world()) is None or now.generation == world.generation:
        assert time.monotonic() < until_s, job.describe()
        time.sleep(0.005)
    assert (now.node_ids, now.mode) == ((first.id, second.id), "in-process")
    assert f"{fourth.journal.name} restarts: a replica has lost nodes" in now.reason
    while not fourth.service.newer_world():
        assert time.monotonic() < until_s, "its workers are to be started anew"
        time.sleep(0.005)
    assert not first.service.newer_world() and not second.service.newer_world()
    fourth.service.allow_replacement(True)
    assert not fourth.status.can_replace
