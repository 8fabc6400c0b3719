"""The permission to train: how it is extended, when it expires, and what waits after expiry."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from kit.assignments import assignment
from kit.journal import MemoryJournal
from kit.manual_clock import ManualClock
from kit.membership_nodes import node, world
from kit.memory_store import MemoryStore
from kit.run_kit import job, process, steps_of_job

import checkpoints
from elastic.agent.node import NodeContext, NodeStatus, RunSecret, WorldEntry
from elastic.agent.service import Permission
from elastic.link.link import FolderAnswer, Heartbeat, Permit
from elastic.membership.records import Done, Keys, NodeState, Outcome, WorldRecord
from elastic.train.step import Step
from elastic.tuning.intervals import permission_s
from elastic.tuning.options import AgentOptions
from elastic.wire.handshake import SecretKey
from elastic.worker.worlds import Worlds

DEADLINE_S = 60.0
KEYS = Keys.of("/elastic", "job")
TAKEOVER_S = 80.0
WORLD = world("n1", mode="in-process")


# -- the agent --------------------------------------------------------------------------------


@dataclass
class HeldLease:
    """A lease that the test renews or loses."""

    renewed_s: float = 100.0
    lost: bool = False
    id: int = 1
    ttl_s: float = 4.0

    def close(self, *, revoke: bool = True) -> None:
        """Nothing to close."""


class PermissionRecorder:
    """Workers that record their permissions."""

    def __init__(self) -> None:
        self.until_s: list[float] = []
        self.are_all_connected = True

    def permit(self, until_s: float) -> None:
        self.until_s.append(until_s)


class Agent:
    """A node that runs generation 7 alone, its lease and its workers."""

    def __init__(self) -> None:
        running = node("n1", NodeState.READY, in_process=True, running=WORLD)
        self.status = NodeStatus(running, KEYS, 0.0)
        self.status.world_entry = WorldEntry(WORLD, 5, 0.0)
        self.lease, self.workers = HeldLease(), PermissionRecorder()
        self.granted: list[float] = []
        context = NodeContext(
            store=MemoryStore(),
            keys=KEYS,
            secret=RunSecret(SecretKey.generate(), KEYS.root),
            options=AgentOptions(takeover_s=TAKEOVER_S),
            status=self.status,
            clock=ManualClock(),
            journal=MemoryJournal(),
        )
        self.permission = Permission(context, self.workers)
        self.permission.on_permission = self.granted.append

    def turns(self) -> float | None:
        """The end of the permission that one iteration of the node's thread grants, or None."""
        before = len(self.workers.until_s)
        self.permission.renew(self.lease)
        return self.workers.until_s[-1] if len(self.workers.until_s) > before else None


def test_the_permission_expires_before_a_takeover() -> None:
    # After takeover_s / 2 without etcd an agent ends its workers, who have takeover_s / 4 to save.
    assert 0.75 * TAKEOVER_S < permission_s(TAKEOVER_S) < TAKEOVER_S
    assert Agent().turns() == 100.0 + permission_s(TAKEOVER_S)


def test_a_renewed_lease_extends_the_permission() -> None:
    agent = Agent()
    first = agent.turns()
    assert first is not None
    agent.lease.renewed_s += 10.0
    assert agent.turns() == first + 10.0


def test_an_agent_without_etcd_does_not_extend_the_permission() -> None:
    agent = Agent()
    agent.turns()
    assert agent.turns() is None


def test_a_lost_lease_does_not_extend_the_permission() -> None:
    agent = Agent()
    agent.turns()
    agent.lease = HeldLease(renewed_s=150.0, lost=True)
    assert agent.turns() is None


def evicted(status: NodeStatus) -> None:
    eight = replace(world("n2", generation=8, mode="in-process"))
    status.world_entry = WorldEntry(eight, 6, 0.0)


def over(status: NodeStatus) -> None:
    status.done = Done(
        outcome=Outcome.SUCCESS, reason="", exit_code=0, generation=7, final_step=1, time_s=0.0
    )


@pytest.mark.parametrize("happened", [evicted, over])
def test_an_evicted_or_finished_node_does_not_extend_the_permission(
    happened: Callable[[NodeStatus], None],
) -> None:
    agent = Agent()
    agent.turns()
    agent.lease.renewed_s = 150.0
    happened(agent.status)
    assert agent.turns() is None


def switching(*names: str, at: int | None) -> WorldRecord:
    return world(*names, generation=8, mode="in-process", switch_at_step=at)


@pytest.mark.parametrize(
    "newer", [switching("n1", "n2", at=None), switching("n1", "n2", at=9), switching("n2", at=9)]
)
def test_a_pending_change_of_the_world_extends_the_permission(newer: WorldRecord) -> None:
    agent = Agent()
    agent.turns()
    agent.lease.renewed_s = 150.0
    agent.status.world_entry = WorldEntry(newer, 6, 0.0)
    assert agent.turns() is not None


def test_the_reaper_gets_a_deadline_only_if_all_workers_heed_it() -> None:
    agent = Agent()
    agent.turns()
    agent.workers.are_all_connected = False  # a script without elastic.Run
    agent.lease.renewed_s += 10.0
    until_s = agent.turns()
    assert agent.granted == [math.inf, until_s]


# -- the worker -------------------------------------------------------------------------------


def worlds_of(clock: ManualClock) -> Worlds:
    return Worlds(
        abort=lambda: None,
        position=lambda: Heartbeat(generation=0, step=0, phase="other", step_time_s=0.0),
        current_step=lambda: None,
        clock=clock,
    )


class Waiting:
    """A worker that waits for permission before its next step, on a separate thread."""

    def __init__(self, worlds: Worlds) -> None:
        self.thread = threading.Thread(target=worlds.wait_until_permitted, name="training")
        self.thread.daemon = True
        self.thread.start()

    @property
    def waits(self) -> bool:
        self.thread.join(0.5)
        return self.thread.is_alive()

    def continues(self) -> bool:
        self.thread.join(DEADLINE_S)
        return not self.thread.is_alive()


def test_a_worker_waits_while_the_permission_has_expired() -> None:
    clock = ManualClock(100.0)
    worlds = worlds_of(clock)
    worlds.wait_until_permitted()  # no limit is set
    worlds.receive(Permit(until_s=101.0))
    worlds.wait_until_permitted()
    clock.advance(2.0)
    assert not worlds.is_permitted()
    worker = Waiting(worlds)
    assert worker.waits
    worlds.receive(Permit(until_s=110.0))
    assert worker.continues()


def test_a_new_world_ends_the_wait_but_a_plan_does_not() -> None:
    clock = ManualClock(100.0)
    worlds = worlds_of(clock)
    worlds.receive(assignment(1))
    assert worlds.next().generation == 1
    worlds.receive(Permit(until_s=99.0))
    worker = Waiting(worlds)
    worlds.receive(assignment(2, switch_at_step=50))
    assert worker.waits
    worlds.receive(assignment(3))
    assert worker.continues()


def test_in_restart_mode_a_new_world_is_no_permission() -> None:
    """The agent restarts the worker for that world."""
    worlds = worlds_of(ManualClock(100.0))
    worlds.receive(assignment(1))
    worlds.receive(Permit(until_s=99.0))
    worker = Waiting(worlds)
    assert worker.waits
    worlds.receive(Permit(until_s=110.0))
    assert worker.continues()


def test_no_step_begins_without_permission(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock(100.0)
    worlds = worlds_of(clock)
    waits = threading.Event()

    class Log:
        def warning(self, text: str) -> None:
            waits.set()

    monkeypatch.setattr("elastic.worker.worlds.get_logger", Log)
    begun_meanwhile: list[int] = []
    with process(worlds=worlds) as run:
        j = job(run)

        def renew() -> None:
            assert waits.wait(DEADLINE_S)
            begun_meanwhile.append(steps_of_job(run))
            worlds.receive(Permit(until_s=math.inf))

        agent = threading.Thread(target=renew, name="agent")
        agent.start()

        def expire(step: object) -> None:
            if steps_of_job(run) == 3:
                worlds.receive(Permit(until_s=99.0))

        run.after_step(expire)
        assert j.train(epochs=1, stop_after=5) == 5
        agent.join(DEADLINE_S)
    assert begun_meanwhile == [3]


@pytest.mark.parametrize(("permitted_until_s", "committed"), [(99.0, []), (101.0, [5])])
def test_no_step_is_committed_without_permission(
    tmp_path: Path, permitted_until_s: float, committed: list[int]
) -> None:
    worlds = worlds_of(ManualClock(100.0))
    worlds.receive(FolderAnswer(folder=str(tmp_path)))  # to this process's own
    with process(tmp_path, every_steps=100, worlds=worlds) as run:
        j = job(run)

        def limit(step: Step) -> None:
            if step.number == 4:
                worlds.receive(Permit(until_s=permitted_until_s))

        run.after_step(limit)
        assert j.train(epochs=1, stop_after=5) == 5
    assert [info.step for info in checkpoints.list_checkpoints(tmp_path)] == committed
