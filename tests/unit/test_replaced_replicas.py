"""Ranks of a replica die, also while others take their place: who meets whom, in any order of
reports."""

from __future__ import annotations

import itertools
import os
from dataclasses import replace
from typing import Any

import pytest
from membership_nodes import node

from elastic.agent.supervision.workers import Workers
from elastic.events import Event
from elastic.link.protocol import (
    ClientHandshakeRequest,
    Message,
    Ready,
    ReplicaJoin,
    ReplicaMeet,
)
from elastic.link.server import LinkServer, Worker, WorkerDeath
from elastic.membership.records import Keys, NodeState
from elastic.node.context import NodeContext
from elastic.node.run_secret import RunSecret
from elastic.testing.doubles.manual_clock import ManualClock
from elastic.testing.doubles.memory_store import MemoryServer, MemoryStore
from elastic.tuning.agent_options import AgentOptions

KEYS = Keys.of("/elastic", "job")
SIZE = 2  # ranks of a replica
NPROC = 4
FIRST_PID = 1 << 22  # larger than any process's


class Journal:
    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event, *, level: int = 0) -> None:
        self.events.append(event)


class Links(LinkServer):
    """Of an agent without a thread: what it sends is kept."""

    def __init__(self, **callbacks: Any) -> None:
        super().__init__(**callbacks)
        self.meetings: dict[int, list[ReplicaMeet]] = {}  # by pid
        self.present: list[Worker] = []

    def send(self, message: Message, to: Worker | None = None) -> None:
        if isinstance(message, ReplicaMeet):
            assert to is not None
            self.meetings.setdefault(to.pid, []).append(message)

    def workers(self) -> tuple[Worker, ...]:
        return tuple(self.present)


class Agent:
    """A node of two replicas of two ranks, which train."""

    def __init__(self) -> None:
        store, self.clock, self.journal = MemoryStore(MemoryServer()), ManualClock(), Journal()
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
        made: list[Links] = []

        def make_server(**callbacks: Any) -> Links:
            made.append(Links(**callbacks))
            return made[-1]

        self.workers = Workers(context, make_server=make_server)
        self.links = made[0]
        self.trained = [self.start(rank) for rank in range(NPROC)]
        for worker in self.trained:
            self.join(worker)
        for worker in self.trained:
            self.workers.on_said(worker, Ready())

    def start(self, local_rank: int) -> Worker:
        """A process that connects."""
        worker = Worker(pid=next(self.pids), local_rank=local_rank, token=0)
        self.links.present.append(worker)
        hello = ClientHandshakeRequest(
            version=1, pid=worker.pid, local_rank=local_rank, library="0.1.0"
        )
        self.workers.on_said(worker, hello)
        return worker

    def join(self, worker: Worker) -> None:
        self.workers.on_said(worker, ReplicaJoin(size=SIZE, mesh="shard=2"))

    def die(self, worker: Worker) -> None:
        """The process was killed, and its death is reported."""
        self.links.present.remove(worker)
        self.workers.on_ended(worker, WorkerDeath(worker.pid, None, 9, None))

    def meetings(self, worker: Worker) -> list[str]:
        """The names under which it was told to meet the others."""
        return [meeting.nonce for meeting in self.links.meetings.get(worker.pid, [])]


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Agent:
    agent = Agent()
    monkeypatch.setattr(os, "kill", lambda pid, signum: agent.killed.append(pid))
    return agent


@pytest.mark.parametrize("dead", range(NPROC))
@pytest.mark.parametrize("is_late", [False, True], ids=["at-once", "late"])
def test_a_replacement_meets_the_other_one_and_not_the_process_that_is_being_ended(
    agent: Agent, dead: int, is_late: bool
) -> None:
    """The kernel takes its time to end a process: memory, threads, a write to a busy disk."""
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
        agent.workers.on_said(worker, Ready())
    assert agent.status.node.state is NodeState.READY


def test_what_a_rank_said_before_it_was_ended_does_not_count(agent: Agent) -> None:
    """Its last messages are read after the decision to end it."""
    victim, other, *_ = agent.trained
    agent.die(victim)
    agent.workers.on_said(other, Ready())
    agent.join(other)
    assert agent.meetings(other) == agent.meetings(victim)
    survivor = agent.trained[2]
    agent.die(survivor)
    assert agent.status.node.state is NodeState.ARRIVED, "no rank is left that could wait"
