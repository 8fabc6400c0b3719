"""Replacement of a dead worker that torch supervises: only if decided, and only once."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kit.manual_clock import ManualClock

from elastic.launcher import torch_agent
from elastic.launcher.launch import (
    REPLACEMENT_DECIDED_S,
    Replacement,
)
from elastic.launcher.torch_agent import SupervisedWorker, Supervision
from elastic.link.link import exit_status
from elastic.telemetry.events import Event
from elastic.testing.waiting import PATIENCE_S
from elastic.wire.messages import CALL_JOIN, NO_WORLD, identity_in

PRINT_ENVIRONMENT = "import json, os; print(json.dumps(dict(os.environ)))"


@dataclass
class Node:
    """The decisions of the node's thread."""

    decision: bool | None = None
    has_left_others: bool | None = False
    is_allowed: bool = False
    is_replacing: bool = False
    started: list[int] = field(default_factory=list)
    ended: list[tuple[int, int, int]] = field(default_factory=list)

    def allow_replacement(self, is_allowed: bool) -> None:
        self.is_allowed = is_allowed

    def is_to_be_replaced(self, pid: int) -> bool | None:
        return self.decision

    def has_failed_with_0(self, pid: int) -> bool | None:
        return self.has_left_others

    def replacement_started(self, pid: int) -> None:
        self.started.append(pid)

    def replacement_ended(self, pid: int, local_rank: int, exit_code: int) -> None:
        self.ended.append((pid, local_rank, exit_code))


@dataclass
class Events:
    emitted: list[Event] = field(default_factory=list)

    def emit(self, event: Event, *, level: int = 0) -> None:
        self.emitted.append(event)


class Agent:
    """The parts of torch's agent that are used, with one worker that has exited with code 1."""

    def __init__(self, folder: Path, restarts: int = 3, exit_code: int = 1) -> None:
        self.error_file = folder / "error.json"
        self.error_file.write_text("the dead one's")
        command = [sys.executable, "-c", f"raise SystemExit({exit_code})"]
        process = subprocess.Popen(command, start_new_session=True)
        process.wait()
        self.handler: Any = SimpleNamespace(proc=process)
        self._remaining_restarts = restarts
        self._worker_group = SimpleNamespace(workers=[SimpleNamespace(id=process.pid)])

    @property
    def supervision(self) -> Supervision:
        worker = SupervisedWorker(
            local_rank=0,
            process=self.handler.proc,
            environment={"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"},
            stdout=None,
            stderr=None,
            error_file=str(self.error_file),
            handler=self.handler,
        )
        return Supervision((worker,), self._remaining_restarts, self)

    def _capture_process_failures(self) -> int | None:
        code: int | None = self.handler.proc.poll()
        return code

    def look(self) -> int | None:
        return self._capture_process_failures()

    def close(self) -> int | None:
        code: int | None = self.handler.proc.poll()
        return code


@pytest.fixture
def agent(tmp_path: Path) -> Agent:
    return Agent(tmp_path)


def test_torch_sees_no_failure_of_a_replaced_worker(agent: Agent) -> None:
    node, events = Node(), Events()
    replacement = Replacement(node, events, nullcontext)
    replacement.look(agent.supervision)
    assert node.is_allowed
    dead = agent.handler.proc.pid
    assert agent.look() is None, "the node's thread has not decided yet"
    assert agent.close() == 1, "torch's shutdown of all workers sees the exit code"
    node.decision = True
    assert agent.look() is None
    assert agent._worker_group.workers[0].id == agent.handler.proc.pid != dead
    assert agent._remaining_restarts == 2
    assert not agent.error_file.exists()
    assert [type(e).__name__ for e in events.emitted] == ["WorkerReplaced"]
    assert agent.handler.proc.wait() == 1


def test_torch_sees_the_failure_of_a_worker_that_is_not_replaced(agent: Agent) -> None:
    node = Node(decision=False)
    replacement = Replacement(node, Events(), nullcontext)
    replacement.look(agent.supervision)
    assert agent.look() == 1
    assert not node.is_allowed, "workers that torch ends now are not replaced"
    node.decision = True
    assert agent.look() == agent.look() == 1
    assert agent._remaining_restarts == 3


def test_torch_sees_a_failure_of_a_worker_that_has_left_the_others_with_exit_code_0(
    tmp_path: Path,
) -> None:
    agent, node = Agent(tmp_path, exit_code=0), Node(decision=False, has_left_others=None)
    Replacement(node, Events(), nullcontext).look(agent.supervision)
    assert agent.look() is None, "the node's thread does not know of its end yet"
    node.has_left_others = True
    assert agent.look() == agent.look() == 1
    assert agent.close() == 1


def test_torch_sees_the_success_of_a_worker_whose_training_has_ended(tmp_path: Path) -> None:
    agent, node = Agent(tmp_path, exit_code=0), Node()
    Replacement(node, Events(), nullcontext).look(agent.supervision)
    assert agent.look() == agent.look() == agent.close() == 0


def test_a_worker_that_has_left_the_others_with_exit_code_0_is_replaced(tmp_path: Path) -> None:
    agent, node = Agent(tmp_path, exit_code=0), Node(decision=True, has_left_others=True)
    Replacement(node, Events(), nullcontext).look(agent.supervision)
    dead = agent.handler.proc.pid
    assert agent.look() is None
    assert agent.handler.proc.pid == node.started[0] != dead
    agent.handler.proc.wait()


def test_simultaneous_deaths_count_as_one_restart(agent: Agent) -> None:
    node = Node(decision=True)
    replacement = Replacement(node, Events(), nullcontext)
    for is_replacing, left in ((False, 2), (True, 2), (False, 1)):
        node.is_replacing = is_replacing
        replacement.look(agent.supervision)
        agent.handler.proc.wait()
        assert agent.look() is None
        assert agent._remaining_restarts == left
    node.is_replacing, node.decision = True, False
    replacement.look(agent.supervision)
    agent.handler.proc.wait()
    assert agent.look() == 1
    assert agent._remaining_restarts == 2, "torch counts the restart of all by itself"


def test_a_missing_decision_times_out_as_a_failure(agent: Agent) -> None:
    clock = ManualClock()
    Replacement(Node(), Events(), nullcontext, clock).look(agent.supervision)
    assert agent.look() is None
    clock.advance(REPLACEMENT_DECIDED_S)
    assert agent.look() == 1


def test_no_worker_is_replaced_without_remaining_restarts(tmp_path: Path) -> None:
    node = Node()
    Replacement(node, Events(), nullcontext).look(Agent(tmp_path, restarts=0).supervision)
    assert not node.is_allowed


def test_no_replacement_is_allowed_without_supervised_processes() -> None:
    node = Node(is_allowed=True)
    Replacement(node, Events(), nullcontext).look(torch_agent.supervision())
    assert not node.is_allowed


def test_a_replacement_starts_without_a_world(tmp_path: Path, agent: Agent) -> None:
    node = Node(decision=True)
    agent.handler.proc.args = [sys.executable, "-c", PRINT_ENVIRONMENT]
    replacement = Replacement(node, Events(), nullcontext)
    supervision = agent.supervision
    with (tmp_path / "out").open("wb") as out:
        worker = SupervisedWorker(**{**vars(supervision.workers[0]), "stdout": out})
        replacement.look(Supervision((worker,), 3, agent))
        assert agent.look() is None
    assert agent.handler.proc.wait() == 0
    output = (tmp_path / "out").read_text()
    assert f'"MASTER_PORT": "{CALL_JOIN}"' in output
    assert identity_in(json.loads(output)) == NO_WORLD


def test_an_exit_status_is_readable_until_the_death_is_judged(agent: Agent) -> None:
    """The link notifies the node's thread, which may read the status late."""
    node = Node()
    Replacement(node, Events(), nullcontext).look(agent.supervision)
    node.decision = True
    assert agent.look() is None
    node.decision = None
    pid = agent.handler.proc.pid
    assert node.started == [pid]
    pidfd = os.pidfd_open(pid)
    assert select.select([pidfd], [], [], PATIENCE_S)[0]
    assert agent.look() is None
    assert node.ended[-1] == (pid, 0, 1)
    assert exit_status(pidfd) == (1, None)
    node.decision = False
    assert agent.look() == 1
    assert exit_status(pidfd) == (None, None), "reaped"
    os.close(pidfd)
