"""Ranks of a replica die at any moment, and every thread and process may be late.

A model of what happens around a node's thread: the kernel ends processes after a while, the link
reports deaths in their order, messages wait in the inbox, torchrun's thread polls when it gets to
it, and replacements connect, join, meet and become ready. The node's thread is the real one's code.
"""

from __future__ import annotations

import os
import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field

import pytest
from test_replaced_replicas import NPROC, SIZE, Agent

from elastic.agent.node import ReplacementEnded
from elastic.link.link import (
    ClientHandshakeRequest,
    Message,
    Ready,
    ReplicaFormed,
    ReplicaJoin,
    Worker,
    WorkerDeath,
)
from elastic.membership.records import NodeState

SEEDS = 200
KILLS = 5
LONGEST = 20_000  # actions, far more than any history takes
SIGKILL = 9


@dataclass(eq=False)
class Process:
    """Of a local rank: what it has done, and how far its end has come."""

    worker: Worker
    done: str = "started"  # then connected, joined, met, ready
    is_killed: bool = False  # the signal is on its way
    is_dead: bool = False
    exit_code: int = -SIGKILL

    @property
    def local_rank(self) -> int:
        return self.worker.local_rank


@dataclass
class Machine:
    """One node. Ranks of the first replica are killed, the second one must live on."""

    agent: Agent
    rng: random.Random
    inbox: deque[Callable[[], None]] = field(default_factory=deque)
    kills: int = KILLS
    reported_to_node: set[int] = field(default_factory=set)  # ends that torchrun's thread has seen

    def __post_init__(self) -> None:
        self.processes = {w.local_rank: Process(w, "ready") for w in self.agent.trained}
        self.deaths: deque[Process] = deque()  # that the link has not reported

    # -- the kernel ---------------------------------------------------------------------------

    def signal(self, pid: int) -> None:
        for process in self.processes.values():
            if process.worker.pid == pid:
                process.is_killed = True

    def end(self, process: Process, exit_code: int) -> None:
        process.is_dead, process.exit_code = True, exit_code
        if process.done != "started":
            self.deaths.append(process)

    # -- the link -----------------------------------------------------------------------------

    def say(self, process: Process, message: Message) -> None:
        self.inbox.append(lambda: self.agent.workers.on_message(process.worker, message))

    def report(self) -> None:
        """The oldest death."""
        process = self.deaths.popleft()
        self.agent.links.present.remove(process.worker)
        code = process.exit_code
        death = WorkerDeath(
            process.worker.pid, code if code >= 0 else None, -code if code < 0 else None, None
        )
        self.inbox.append(lambda: self.agent.workers.on_ended(process.worker, death))

    # -- what may happen next -----------------------------------------------------------------

    def actions(self) -> Iterator[Callable[[], None]]:
        if self.inbox:
            yield lambda: self.inbox.popleft()()
        if self.deaths:
            yield self.report
        for process in self.processes.values():
            yield from self._of(process)

    def _of(self, process: Process) -> Iterator[Callable[[], None]]:
        if process.is_dead:
            yield lambda: self.poll(process)
            return
        if process.is_killed:
            yield lambda: self.end(process, -SIGKILL)
        elif self.kills and process.local_rank < SIZE and self.rng.random() < 0.1:
            yield lambda: self.kill(process)
        step = {
            "started": self.connect,
            "connected": self.join,
            "joined": self.meet,
            "met": self.be_ready,
            "ready": self.notice,
        }[process.done]
        yield lambda: step(process)

    def kill(self, process: Process) -> None:
        self.kills -= 1
        process.is_killed = True

    def poll(self, process: Process) -> None:
        """As torchrun's thread does."""
        pid, status = process.worker.pid, self.agent.status
        if pid in status.unconnected and pid not in self.reported_to_node:
            self.reported_to_node.add(pid)
            ended = ReplacementEnded(pid, process.local_rank, process.exit_code)
            self.inbox.append(lambda: self.agent.workers.on_ended_unconnected(ended))
        decision = status.is_to_be_replaced(pid)
        assert decision is not False, f"torchrun restarts all because of {process}"
        if decision:
            fresh = Worker(next(self.agent.pids), process.local_rank, token=0)
            status.unconnected.add(fresh.pid)
            self.processes[process.local_rank] = Process(fresh)

    def connect(self, process: Process) -> None:
        while any(dead.local_rank == process.local_rank for dead in self.deaths):
            self.report()
        process.done = "connected"
        self.agent.links.present.append(process.worker)
        hello = ClientHandshakeRequest(
            version=1, pid=process.worker.pid, local_rank=process.local_rank, library="0.1.0"
        )
        self.say(process, hello)

    def join(self, process: Process) -> None:
        process.done = "joined"
        self.say(process, ReplicaJoin(size=SIZE, mesh="shard=2"))

    def meet(self, process: Process) -> None:
        """It takes the first name that it is given, and waits there."""
        other = self.processes[process.local_rank ^ 1]
        names = [self.agent.meetings(p.worker)[:1] for p in (process, other)]
        if names[0] and names[0] == names[1]:
            if other.is_dead:
                self.end(process, 1)
                return
            process.done = "met"
            self.say(process, ReplicaFormed())

    def be_ready(self, process: Process) -> None:
        process.done = "ready"
        self.say(process, Ready())

    def notice(self, process: Process) -> None:
        """The other rank's end, in a collective of the replica."""
        if self.processes[process.local_rank ^ 1].is_dead and not process.is_killed:
            self.end(process, 1)

    def run(self) -> None:
        """Do what may happen, in a random order, until nothing is left to happen."""
        for _ in range(LONGEST):
            if self.is_settled:
                return
            self.rng.choice(list(self.actions()))()

    @property
    def is_settled(self) -> bool:
        everyone = self.processes.values()
        is_calm = not (self.inbox or self.deaths or self.kills)
        return is_calm and all(p.done == "ready" and not p.is_killed for p in everyone)


@pytest.mark.parametrize("first", range(0, SEEDS, 50))
def test_a_replica_comes_back_whoever_is_late(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(first, first + 50):
        with closing(Agent()) as agent:
            machine = Machine(agent, random.Random(seed))
            monkeypatch.setattr(os, "kill", lambda pid, signum, m=machine: m.signal(pid))
            machine.run()
            assert machine.is_settled, f"seed {seed}: {machine.processes}"
            assert agent.status.node.state is NodeState.READY, f"seed {seed}"
            survivors = [machine.processes[rank].worker for rank in range(SIZE, NPROC)]
            assert survivors == agent.trained[SIZE:], f"seed {seed}"
