"""Ranks of a replica that die, even while they are replaced: which ranks meet."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
from kit.journal import MemoryJournal
from kit.manual_clock import ManualClock
from kit.membership_nodes import node
from kit.memory_store import MemoryServer, MemoryStore

from elastic.agent.node import NodeContext, ReplacementEnded, RunSecret
from elastic.agent.workers import (
    NOT_READY_S,
    REPLICA_FORMS_ON_DEVICE_S,
    REPLICA_FORMS_S,
    Workers,
)
from elastic.link.link import (
    ClientHandshakeRequest,
    LinkServer,
    Message,
    Ready,
    ReplicaFormed,
    ReplicaJoin,
    ReplicaRendezvous,
    Worker,
    WorkerDeath,
)
from elastic.membership.records import Keys, NodeState
from elastic.telemetry.events import WorkerDied, WorkersNotReady
from elastic.tuning.intervals import (
    NODE_IDLE_S,
)
from elastic.tuning.options import AgentOptions

KEYS = Keys.of("/elastic", "job")
SIZE = 2  # ranks of a replica
NPROC = 4
FIRST_PID = 1 << 22  # larger than any real pid


class Links(LinkServer):
    """The link server of an agent without a thread; records what it sends."""

    def __init__(self, **callbacks: Any) -> None:
        super().__init__(**callbacks)
        self.meetings: dict[int, list[ReplicaRendezvous]] = {}  # by pid
        self.present: list[Worker] = []

    def send(self, message: Message, to: Worker | None = None) -> None:
        if isinstance(message, ReplicaRendezvous):
            assert to is not None
            self.meetings.setdefault(to.pid, []).append(message)

    def workers(self) -> tuple[Worker, ...]:
        return tuple(self.present)


class Agent:
    """A node with two replicas of two ranks each, in training."""

    def __init__(self) -> None:
        store = MemoryStore(MemoryServer())
        self.clock, self.journal = ManualClock(), MemoryJournal()
        context = NodeContext.of(
            replace(node("n1", NodeState.STARTING), nproc=NPROC),
            store=store,
            keys=KEYS,
            secret=RunSecret.obtain(store, KEYS),
            options=AgentOptions(),
            journal=self.journal,
            clock=self.clock,
        )
        self.status = context.status
        self.status.can_replace = True
        self.pids = itertools.count(FIRST_PID)
        self.killed: list[int] = []
        servers: list[Links] = []

        def make_server(**callbacks: Any) -> Links:
            servers.append(Links(**callbacks))
            return servers[-1]

        self.workers = Workers(context, make_server=make_server)
        self.links = servers[0]
        self.trained = [self.start(rank) for rank in range(NPROC)]
        for worker in self.trained:
            self.join(worker)
        for worker in self.trained:
            self.workers.on_message(worker, ReplicaFormed())
            self.workers.on_message(worker, Ready())

    def close(self) -> None:
        self.links.close()

    def start(self, local_rank: int) -> Worker:
        """Start a process that connects."""
        worker = Worker(pid=next(self.pids), local_rank=local_rank, token=0)
        self.links.present.append(worker)
        hello = ClientHandshakeRequest(
            version=1, pid=worker.pid, local_rank=local_rank, library="0.1.0"
        )
        self.workers.on_message(worker, hello)
        return worker

    def join(self, worker: Worker, *, on_device: bool = False) -> None:
        message = ReplicaJoin(size=SIZE, mesh="shard=2", on_device=on_device)
        self.workers.on_message(worker, message)

    def die(self, worker: Worker) -> None:
        """The process is killed, and its death is reported."""
        self.links.present.remove(worker)
        self.workers.on_ended(worker, WorkerDeath(worker.pid, None, 9, None))

    def replace(self, *local_ranks: int, on_device: bool = False) -> list[Worker]:
        """Kill their processes, and let new ones join."""
        for worker in self.links.workers():
            if worker.local_rank in local_ranks:
                self.die(worker)
        fresh = [self.start(local_rank) for local_rank in local_ranks]
        for worker in fresh:
            self.join(worker, on_device=on_device)
        return fresh

    def wait(self, duration_s: float, *, tick_s: float = NODE_IDLE_S) -> None:
        """Run the checks of the node's thread for this long."""
        for _ in range(round(duration_s / tick_s)):
            self.clock.advance(tick_s)
            self.workers.readiness.check()

    @property
    def warnings(self) -> list[str]:
        return [e.reason for e in self.journal.events if isinstance(e, WorkersNotReady)]

    def meetings(self, worker: Worker) -> list[str]:
        """The nonces of the meetings that were sent to this worker."""
        return [meeting.nonce for meeting in self.links.meetings.get(worker.pid, [])]


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Agent]:
    with closing(Agent()) as agent:
        monkeypatch.setattr(os, "kill", lambda pid, signum: agent.killed.append(pid))
        yield agent


@pytest.mark.parametrize("dead", range(NPROC))
@pytest.mark.parametrize("is_late", [False, True], ids=["at-once", "late"])
def test_a_replacement_meets_its_new_peer_and_not_the_dying_one(
    agent: Agent, dead: int, is_late: bool
) -> None:
    """The kernel may take time to end a process: memory, threads, a write to a busy disk."""
    victim, other = agent.trained[dead], agent.trained[dead ^ 1]
    agent.die(victim)
    assert agent.killed == [other.pid]
    if not is_late:
        agent.die(other)
    first = agent.start(dead)
    agent.join(first)
    assert agent.meetings(first) == []
    if is_late:
        agent.die(other)
    second = agent.start(dead ^ 1)
    agent.join(second)
    assert len(agent.meetings(first)) == 1
    assert agent.meetings(first) == agent.meetings(second)
    assert all(len(agent.meetings(worker)) == 1 for worker in agent.trained)
    for worker in (first, second):
        assert agent.status.node.state is NodeState.STARTING
        agent.workers.on_message(worker, Ready())
    assert agent.status.node.state is NodeState.READY


def test_messages_of_a_killed_rank_are_ignored(agent: Agent) -> None:
    """Its last messages arrive after the decision to kill it."""
    victim, other, *_ = agent.trained
    agent.die(victim)
    agent.workers.on_message(other, Ready())
    agent.join(other)
    assert agent.meetings(other) == agent.meetings(victim)
    survivor = agent.trained[2]
    agent.die(survivor)
    assert agent.status.node.state is NodeState.ARRIVED, "no rank is left that could wait"


def test_the_ranks_of_a_meeting_that_times_out_are_replaced(agent: Agent) -> None:
    """Whatever the cause: the survivors wait with their state, and must not wait long."""
    fresh = agent.replace(0, 1)
    agent.killed.clear()
    agent.wait(REPLICA_FORMS_S - NODE_IDLE_S)
    assert agent.killed == []
    agent.wait(NODE_IDLE_S)
    assert sorted(agent.killed) == [worker.pid for worker in fresh]
    agent.journal.events.clear()
    for worker in fresh:
        agent.die(worker)
        assert agent.status.is_to_be_replaced(worker.pid)
    reasons = [e.reason for e in agent.journal.events if isinstance(e, WorkerDied)]
    assert reasons[0] == (
        f"hang: local rank 0 (pid {fresh[0].pid}) has not reached the other ranks of its replica "
        f"(local rank 1 (pid {fresh[1].pid})) in time"
    )
    again = [agent.start(0), agent.start(1)]
    for worker in again:
        agent.join(worker)
    for worker in again:
        assert len(agent.meetings(worker)) == 1
        agent.workers.on_message(worker, ReplicaFormed())
        agent.workers.on_message(worker, Ready())
    assert agent.status.node.state is NodeState.READY


def test_a_meeting_on_gpus_may_take_longer(agent: Agent) -> None:
    fresh = agent.replace(0, 1, on_device=True)
    agent.killed.clear()
    agent.wait(REPLICA_FORMS_ON_DEVICE_S - NODE_IDLE_S)
    assert agent.killed == []
    agent.wait(NODE_IDLE_S)
    assert sorted(agent.killed) == [worker.pid for worker in fresh]


def test_ranks_that_have_met_have_no_deadline_to_become_ready(agent: Agent) -> None:
    """They are building the model."""
    fresh = agent.replace(0, 1)
    agent.killed.clear()
    for worker in fresh:
        agent.workers.on_message(worker, ReplicaFormed())
    agent.wait(10 * REPLICA_FORMS_S)
    assert agent.killed == []


def test_time_while_the_node_was_frozen_does_not_count(agent: Agent) -> None:
    agent.replace(0, 1)
    agent.killed.clear()
    agent.wait(3600, tick_s=3600)
    assert agent.killed == []
    assert agent.warnings == []


def test_the_log_names_the_workers_that_others_wait_for(agent: Agent) -> None:
    first, second = agent.replace(0, 1)
    agent.workers.on_message(first, ReplicaFormed())
    agent.workers.on_message(second, ReplicaFormed())
    agent.workers.on_message(first, Ready())
    agent.wait(NOT_READY_S - NODE_IDLE_S)
    assert agent.warnings == []
    agent.wait(NODE_IDLE_S)
    assert agent.warnings == [f"local rank 1 (pid {second.pid}) has not called run.retry()"]

    agent.die(second)
    third = agent.start(1)
    agent.join(third)
    agent.wait(NOT_READY_S)
    assert agent.warnings[1:] == [
        "local rank 0 has not called elastic.join(); "
        f"local rank 1 (pid {third.pid}) waits for the other ranks of its replica"
    ]
    agent.wait(NOT_READY_S)
    assert len(agent.warnings) == 2, "again after twice the time"


@pytest.mark.parametrize("exit_code", [-9, 1], ids=["killed", "failed"])
def test_a_replacement_killed_before_it_connects_is_replaced_again(
    agent: Agent, exit_code: int
) -> None:
    """For example by the kernel. The other replica has the state, and keeps its processes."""
    agent.die(agent.trained[0])
    agent.die(agent.trained[1])
    second = agent.start(1)
    agent.join(second)
    pid = next(agent.pids)
    agent.status.unconnected.add(pid)
    assert agent.status.is_to_be_replaced(pid) is None, "the node's thread decides"
    agent.workers.on_ended_unconnected(ReplacementEnded(pid, 0, exit_code))
    assert agent.status.is_to_be_replaced(pid) is (exit_code == -9)
    assert second.pid not in agent.killed
    if exit_code == -9:
        first = agent.start(0)
        agent.join(first)
        assert agent.meetings(first) == agent.meetings(second) != []


def test_the_death_of_a_connected_replacement_is_reported_once(agent: Agent) -> None:
    """It connected before torchrun's thread recorded its start."""
    first, second = agent.replace(0, 1)
    agent.status.unconnected.add(first.pid)
    agent.killed.clear()
    agent.workers.on_ended_unconnected(ReplacementEnded(first.pid, 0, -9))
    agent.die(first)
    assert agent.killed == [second.pid], "they have met, and are replaced together"
    assert agent.status.to_replace >= {first.pid, second.pid}
