"""The leader of a job whose workers keep their processes: services on the in-memory store.

The test sets the workers' state as their agent would publish it; tests/kill runs real workers.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
from kit.memory_store import MemoryServer, MemoryStore
from test_node_service import (
    KEYS,
    OPTIONS,
    TestNode,
    leader_in,
    waits,
    world_in,
)

from elastic.agent import leader as prober
from elastic.agent import liveness
from elastic.agent.liveness import Verdict
from elastic.agent.node import ChangeNode
from elastic.agent.roster import NodesEvent
from elastic.agent.workers import LinkEvent
from elastic.errors import SYSTEM_CLOCK, CoordinationError
from elastic.hangs.page import StepDurations
from elastic.link.link import IN_STEP, Heartbeat, StepReport, Worker
from elastic.membership.progress import decode_progress
from elastic.membership.records import (
    Done,
    FailureReport,
    Node,
    NodeState,
    WorldRecord,
    decode,
    encode,
)
from elastic.membership.view import Liveness, StepRate
from elastic.store.keyvalue import Put, WatchEvent
from elastic.telemetry.events import StragglerFound
from elastic.testing.waiting import eventually
from elastic.tuning.options import AgentOptions
from elastic.wire.messages import Cause, WorldReference, WorldState

# The last call waits until ``max_nodes`` are there, however slow the machine is.
FULL = replace(OPTIONS, last_call_s=60.0, join_timeout_s=120.0)


class InProcess(TestNode):
    """A node whose workers report what the test specifies."""

    __test__ = False

    def change(self, **fields: Any) -> None:
        change: Callable[[Node], Node] = lambda node: replace(node, **fields)  # noqa: E731
        self.context.post(ChangeNode(change))

    def ready(self) -> InProcess:
        """The workers reached the step loop."""
        self.change(in_process=True, state=NodeState.READY)
        return self

    def run(self, world: WorldRecord) -> None:
        """The workers have built the group and agreed."""
        self.change(running=world)

    def step(self, step: int, generation: int, step_time_s: float = 0.1) -> None:
        """The workers report their current step."""
        at_s = SYSTEM_CLOCK.monotonic()
        self.status.step_rate = StepRate(generation, step, step_time_s, at_s)

    def workers_die(self, generation: int, failure: str = "killed", exit_code: int = -9) -> None:
        self.change(
            state=NodeState.ARRIVED,
            in_process=False,
            running=None,
            arrived_for=generation,
            failure=failure,
            failure_exit_code=exit_code,
        )

    def report(self, generation: int, *unreachable: str) -> None:
        """The workers report a failed collective, or a peer that did not arrive."""
        lease = eventually(lambda: self.service.loop.registration.lease)
        report = FailureReport(
            node_id=self.id, generation=generation, error="reset", unreachable=unreachable
        )
        self.store.put(KEYS.failure_report(self.id), encode(report), lease=lease)


@pytest.fixture
def server() -> MemoryServer:
    return MemoryServer()


Start = Callable[..., InProcess]


@pytest.fixture
def start(server: MemoryServer) -> Iterator[Start]:
    nodes: list[InProcess] = []

    def make(*, arrives: bool = True, **more: Any) -> InProcess:
        more.setdefault("max_nodes", 4)
        nodes.append(InProcess(server, **more))
        if arrives:
            nodes[-1].arrive()
        return nodes[-1]

    yield make
    server.reconnect()
    for node in nodes:
        node.service.close()
    assert not [t.name for t in threading.enumerate() if t.name == "elastic-node"]


def generation(server: MemoryServer, number: int) -> WorldRecord:
    """Wait for the world of this generation; there must be no newer one."""
    eventually(lambda: world_in(server).generation >= number)
    world = world_in(server)
    assert world.generation == number, world.reason
    return world


def members_run(server: MemoryServer, nodes: list[InProcess], world: WorldRecord) -> None:
    """All members enter ``world``, and the store shows it."""
    for node in nodes:
        node.run(world)
    named = WorldReference(generation=world.generation, nonce=world.nonce)
    eventually(lambda: all(node_in(server, node).running == named for node in nodes))


def node_in(server: MemoryServer, node: InProcess) -> Node:
    entry = eventually(lambda: MemoryStore(server).get(KEYS.node(node.id)))
    return decode(Node, entry.key, entry.value)


def trio(server: MemoryServer, start: Start, **more: Any) -> list[InProcess]:
    """Three nodes that step in generation 1, in rank order."""
    # All must arrive within one last call, even on a busy machine.
    options = more.pop("options", OPTIONS)
    options = replace(options, last_call_s=max(options.last_call_s, 1.0))
    nodes = [start(arrives=False, options=options, **more) for _ in range(3)]
    for node in nodes:
        node.arrive()
    world = generation(server, 1)
    for node in nodes:
        node.enter()
        node.ready()
    eventually(lambda: all(node_in(server, n).state is NodeState.READY for n in nodes))
    return sorted(nodes, key=lambda n: world.node_ids.index(n.id))


def joining(
    server: MemoryServer, start: Start, nodes: list[InProcess]
) -> tuple[InProcess, WorldRecord]:
    """A fourth node is ready, and its planned change is pending."""
    for node in nodes:
        node.step(100, 1)
    joining_node = start().ready()
    return joining_node, generation(server, 2)


def test_a_failure_with_all_nodes_alive_leads_to_the_same_members(
    server: MemoryServer, start: Start
) -> None:
    a, b, c = trio(server, start)
    b.report(1)
    world = generation(server, 2)
    assert (world.node_ids, world.cause) == ((a.id, b.id, c.id), Cause.FAILURE)
    assert (world.mode, world.switch_at_step) == ("in-process", None)


def test_a_record_that_the_store_refuses_does_not_keep_the_leader_from_deciding(
    server: MemoryServer, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it refused the verdict on a hang of 360 nodes, which was too large."""
    nodes = trio(server, start)
    nodes.sort(key=lambda n: n.id != eventually(lambda: leader_in(server)))
    leader, other, victim = nodes

    def refuse(*ignored: object) -> None:
        raise CoordinationError("put: etcdserver: request is too large")

    term = leader.service.loop.succession.term
    assert term is not None
    monkeypatch.setattr(term, "judge", refuse)
    monkeypatch.setattr(leader.service.loop.supervisor, "publish", refuse)
    victim.workers_die(1)
    world = generation(server, 2)
    assert set(world.node_ids) == {leader.id, other.id}
    assert "too large" in str(leader.status.store_problem)


def test_workers_that_have_trained_keep_their_processes_although_a_key_is_late(
    server: MemoryServer, start: Start
) -> None:
    """etcd is distant: a node dies before the leader learns that another one is ready."""
    nodes = [start(options=FULL, max_nodes=3) for _ in range(3)]
    first = generation(server, 1)
    for node in nodes:
        node.enter()
    nodes.sort(key=lambda n: n.id != eventually(lambda: leader_in(server)))
    leader, late, victim = nodes
    leader.ready().run(first)
    eventually(lambda: node_in(server, leader).state is NodeState.READY)
    eventually(lambda: all(n.is_connected() for n in nodes))
    leader.status.stepping_generation, leader.status.steps_in_process = 1, True
    victim.crash()
    world = generation(server, 2)
    assert (set(world.node_ids), world.mode) == ({leader.id, late.id}, "in-process")


def test_a_death_restarts_all_members_at_once_if_their_workers_keep_no_process(
    server: MemoryServer, start: Start
) -> None:
    """Those of a script without run.retry report their steps, too."""
    nodes = [start(options=FULL, max_nodes=3) for _ in range(3)]
    generation(server, 1)
    for node in nodes:
        node.enter()
    nodes.sort(key=lambda n: n.id != eventually(lambda: leader_in(server)))
    leader, _, victim = nodes
    step = Heartbeat(generation=1, step=5, phase=IN_STEP, step_time_s=0.1)
    leader.context.post(LinkEvent(Worker(pid=1 << 22, local_rank=0, token=1), step))
    eventually(lambda: leader.status.stepping_generation == 1)
    victim.workers_die(1)
    world = generation(server, 2)
    assert (set(world.node_ids), world.mode) == ({n.id for n in nodes}, "restart")


def test_two_reports_of_one_failure_form_one_world(server: MemoryServer, start: Start) -> None:
    nodes = trio(server, start)
    nodes[0].report(1)
    world = generation(server, 2)
    nodes[1].report(1)
    nodes[2].report(1)
    members_run(server, nodes, world)
    # The next event must be this one.
    nodes[2].workers_die(2)
    assert generation(server, 3).node_ids == (nodes[0].id, nodes[1].id)


def test_a_failure_report_triggers_detection_of_a_dead_member(
    server: MemoryServer, start: Start
) -> None:
    a, b, c = trio(server, start)
    eventually(lambda: leader_in(server))
    victim = next(n for n in (c, b) if n.id != leader_in(server))
    victim.crash()
    a.report(1)
    world = generation(server, 2)
    assert (victim.id in world.node_ids, world.cause) == (False, Cause.LOST)


def test_a_report_that_precedes_the_death_notice_spends_no_world(
    server: MemoryServer, start: Start
) -> None:
    """The peer's collective fails before the dead worker's agent has reported the death."""
    a, b, c = trio(server, start)
    a.report(1)
    b.report(1)
    c.workers_die(1)
    world = generation(server, 2)
    assert world.node_ids == (a.id, b.id)


def test_a_leader_whose_workers_die_knows_of_earlier_deaths_first(
    server: MemoryServer, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It learns of its own record as late as of the others'."""
    nodes = trio(server, start, min_nodes=1)
    nodes.sort(key=lambda n: n.id != leader_in(server))
    leader, other, survivor = nodes
    term = leader.service.loop.succession.term
    assert term is not None
    held: list[NodesEvent] = []
    monkeypatch.setattr(term, "on_nodes", lambda change, world: held.append(change))
    for node in (other, leader):
        node.workers_die(1)
        key = KEYS.node(node.id)
        eventually(lambda key=key: key in {key_of(c.event) for c in held})  # type: ignore[misc]
    with pytest.raises(AssertionError, match=r"not within 0\.2 s"):
        eventually(lambda: world_in(server).generation > 1, within_s=0.2)
    monkeypatch.undo()
    for change in held:
        leader.context.post(change)
    assert generation(server, 2).node_ids == (survivor.id,)


def key_of(event: WatchEvent) -> str:
    return event.entry.key if isinstance(event, Put) else ""


def test_a_replacement_is_not_restarted_before_the_leader_sees_it_ready(
    server: MemoryServer, start: Start
) -> None:
    """The first world of a job is entered by starting workers; that start is not repeated."""
    (node, *_) = trio(server, start)

    def is_ready_after(arrived_for: int) -> None:  # without notifying the leader
        node.status.change_node(
            lambda n: replace(
                n,
                state=NodeState.READY,
                in_process=True,
                running=None,
                arrived_for=arrived_for,
            )
        )

    is_ready_after(1)
    assert not node.service.newer_world()
    is_ready_after(0)  # another node's: it warmed up, and starts in this one
    assert node.service.newer_world()


def test_an_invalid_failure_report_is_logged_and_ignored(
    server: MemoryServer, start: Start
) -> None:
    nodes = trio(server, start)
    MemoryStore(server).put(KEYS.failure_report("intruder"), b"{not json")
    eventually(lambda: [e for n in nodes for e in n.journal.events if "intruder" in str(e)])
    nodes[0].report(1)
    assert generation(server, 2).cause is Cause.FAILURE


def test_dead_workers_are_removed_and_rejoin_at_a_step_boundary(
    server: MemoryServer, start: Start
) -> None:
    a, b, c = nodes = trio(server, start)
    c.workers_die(1)
    world = generation(server, 2)
    assert (world.node_ids, world.switch_at_step) == ((a.id, b.id), None)
    members_run(server, [a, b], world)
    for node in nodes[:2]:
        node.step(40, 2, step_time_s=0.1)
    c.change(state=NodeState.STARTING)
    c.ready()
    world = generation(server, 3)
    assert (world.node_ids, world.cause) == ((a.id, b.id, c.id), Cause.JOINED)
    assert world.switch_at_step is not None and world.switch_at_step >= 43
    assert world.committed_step == 40


def test_a_planned_change_waits_for_the_first_reported_step(
    server: MemoryServer, start: Start
) -> None:
    nodes = trio(server, start)
    joining_node = start().ready()
    eventually(lambda: node_in(server, joining_node).state is NodeState.READY)
    leader = next(n for n in nodes if n.id == leader_in(server))
    eventually(lambda: leader.service.loop.succession.term.writer.planned_since_s)  # type: ignore[union-attr]
    assert world_in(server).generation == 1
    for node in nodes:
        node.step(0, 1, step_time_s=0.0)
    assert generation(server, 2).switch_at_step == 2


def test_a_failure_before_the_switch_is_handled_immediately(
    server: MemoryServer, start: Start
) -> None:
    """History 8."""
    nodes = trio(server, start)
    joining_node, _ = joining(server, start, nodes)
    nodes[1].report(1)
    world = generation(server, 3)
    assert (world.switch_at_step, world.cause) == (None, Cause.FAILURE)
    assert world.node_ids == (*(n.id for n in nodes), joining_node.id)


def test_a_late_report_after_the_switch_causes_no_new_world(
    server: MemoryServer, start: Start
) -> None:
    nodes = trio(server, start)
    joining_node, world = joining(server, start, nodes)
    nodes[0].run(world)
    eventually(lambda: (r := node_in(server, nodes[0]).running) and r.nonce == world.nonce)
    nodes[1].report(1)
    members_run(server, [*nodes[1:], joining_node], world)
    assert generation(server, 2) == world


def test_a_joining_node_that_dies_before_the_switch_cancels_it_and_is_quarantined(
    server: MemoryServer, start: Start
) -> None:
    nodes = trio(server, start)
    joining_node, plan = joining(server, start, nodes)
    joining_node.workers_die(2)
    world = generation(server, 3)
    assert world.node_ids == tuple(n.id for n in nodes)
    assert world.switch_at_step == plan.switch_at_step is not None
    members_run(server, nodes, world)
    joining_node.ready()
    said = lambda: [  # noqa: E731
        e for n in nodes for e in n.journal.events if "is quarantined" in str(e)
    ]
    assert eventually(said)
    assert world_in(server).generation == 3


def test_a_crash_looping_node_interrupts_the_job_once_per_quarantine(
    server: MemoryServer, start: Start
) -> None:
    """History 9."""
    nodes = trio(server, start)
    joining_node, world = joining(server, start, nodes)
    members_run(server, [*nodes, joining_node], world)
    for node in nodes:
        node.step(200, 2)  # healthy
    joining_node.workers_die(2, "ValueError: no such file", 1)
    world = generation(server, 3)
    members_run(server, nodes, world)
    joining_node.ready()
    assert eventually(
        lambda: [e for n in nodes for e in n.journal.events if "is quarantined" in str(e)]
    )
    assert world_in(server).generation == 3


def test_a_leave_is_a_planned_change_without_a_joining_node(
    server: MemoryServer, start: Start
) -> None:
    a, b, c = nodes = trio(server, start)
    for node in nodes:
        node.step(10, 1, step_time_s=0.2)
    b.service.leave("SIGTERM")
    world = generation(server, 2)
    assert (world.node_ids, world.cause) == ((a.id, c.id), Cause.LEFT)
    assert world.switch_at_step in (12, 13, 14)


@pytest.mark.parametrize("leader_first", [False, True])
def test_an_exception_repeated_on_successive_nodes_ends_the_job(
    server: MemoryServer, start: Start, leader_first: bool
) -> None:
    """Survivors repeat the step and hit the same bad sample. The successor of a failed leader has
    the record.
    """
    nodes = trio(server, start, min_nodes=1)
    for node in nodes:
        node.step(500, 1)
    nodes.sort(key=lambda n: (n.id == leader_in(server)) != leader_first)
    for number, node in enumerate(nodes, start=1):
        node.workers_die(number, "ValueError: bad sample", 1)
        if number < 3:
            world = generation(server, number + 1)
            members_run(server, nodes[number:], world)
            for survivor in nodes:
                survivor.step(500, number + 1)
    entry = eventually(lambda: MemoryStore(server).get(KEYS.done))
    done = decode(Done, entry.key, entry.value)
    assert "ValueError: bad sample" in done.reason
    assert (done.exit_code, done.final_step) == (1, 500)


def test_an_outage_of_the_store_spends_no_failure_budget(
    server: MemoryServer, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decision on the next world is retried until it can be written: one failure."""
    nodes = trio(server, start, options=replace(OPTIONS, failure_budget=1))
    leader = next(n for n in nodes if n.id == leader_in(server))
    swap = leader.store.compare_and_swap

    def fail_first(key: str, value: bytes, **more: Any) -> int | None:
        monkeypatch.undo()
        server.disconnect()
        return swap(key, value, **more)

    monkeypatch.setattr(leader.store, "compare_and_swap", fail_first)
    leader.workers_die(1)
    eventually(lambda: leader.status.store_problem)
    for _ in range(5):
        leader.change()  # each triggers a retry
    server.reconnect()
    assert world_in(server).state is not None
    eventually(lambda: world_in(server).generation == 2)
    assert MemoryStore(server).get(KEYS.done) is None


def test_a_node_reported_missing_three_times_is_quarantined(
    server: MemoryServer, start: Start
) -> None:
    a, b, c = nodes = trio(server, start)
    world = world_in(server)
    for number in (1, 2, 3):
        for node in (a, c):
            node.report(number, b.id)
        world = generation(server, number + 1)
        if number < 3:
            assert set(world.node_ids) == {n.id for n in nodes}
    assert world.node_ids == (a.id, c.id)
    assert " quarantined" in world.reason


def test_a_follower_without_store_events_learns_of_the_world(
    server: MemoryServer, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, c = trio(server, start)
    deaf = next(n for n in (a, b) if n.id != leader_in(server))
    store_events = deaf.service.loop.store_events
    hear = store_events.handle

    def hear_no_worlds(event: WatchEvent) -> None:
        if not (isinstance(event, Put) and event.entry.key == KEYS.world):
            hear(event)

    monkeypatch.setattr(store_events, "handle", hear_no_worlds)
    c.workers_die(1)
    world = generation(server, 2)
    eventually(lambda: deaf.status.world == world)


def test_below_min_nodes_the_survivors_pause_and_resume_without_restart(
    server: MemoryServer, start: Start
) -> None:
    a, b, c = nodes = trio(server, start, min_nodes=3)
    c.workers_die(1)
    world = generation(server, 2)
    assert (world.state, world.mode) == (WorldState.PAUSED, "in-process")
    assert world.node_ids == (a.id, b.id)
    members_run(server, nodes[:2], world)
    c.ready()
    world = generation(server, 3)
    assert (world.state, world.mode) == (WorldState.ACTIVE, "in-process")
    assert (world.node_ids, world.switch_at_step) == ((a.id, b.id, c.id), None)


def test_a_new_leader_does_not_train_beside_a_silent_member_of_an_older_world(
    server: MemoryServer, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """a trains alone in generation 1 until the step at which b joins. It falls silent before, and
    its lease ends: the keys tell b nothing of it, only the world does."""
    a = start(min_nodes=1, options=replace(OPTIONS, takeover_s=300.0))
    first = a.enter()
    a.ready()
    a.run(first)
    a.step(100, 1, step_time_s=30.0)
    b = start(min_nodes=1, options=replace(OPTIONS, takeover_s=300.0))
    b.ready()
    planned = generation(server, 2)
    assert planned.node_ids == (a.id, b.id) and planned.switch_at_step is not None
    eventually(lambda: b.status.world == planned)
    probe = liveness.probe

    def probe_unless_silent(host: str, port: int, node_id: str, **more: Any) -> Verdict:
        if node_id == a.id:
            return Verdict(Liveness.SUSPECT, "silent")
        return probe(host, port, node_id, **more)

    monkeypatch.setattr(prober, "probe", probe_unless_silent)
    lease = a.lease_id()
    a.stop()
    server.expire(lease)
    eventually(lambda: leader_in(server) == b.id)
    eventually(lambda: [e for e in b.events if "may still run" in getattr(e, "reason", "")])
    assert world_in(server) == planned
    a.service.loop.close()


def silence(monkeypatch: pytest.MonkeyPatch, *silent: InProcess) -> None:
    """Their hosts do not answer any more: nothing proves that they are dead."""
    probe, ids = liveness.probe, {node.id for node in silent}

    def probe_unless_silent(host: str, port: int, node_id: str, **more: Any) -> Verdict:
        if node_id in ids:
            return Verdict(Liveness.SUSPECT, "silent")
        return probe(host, port, node_id, **more)

    monkeypatch.setattr(prober, "probe", probe_unless_silent)


def test_waiting_nodes_do_not_train_beside_leaving_ones_that_lose_etcd(
    server: MemoryServer, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All members are asked to leave at a step. Before it their leases end: the keys tell the
    waiting nodes nothing of them, only the world does."""
    options = replace(OPTIONS, takeover_s=300.0)
    nodes = trio(server, start, options=options, max_nodes=3)
    first = world_in(server)
    members_run(server, nodes, first)
    spares = [start(options=options, max_nodes=3) for _ in range(2)]
    for node in nodes:
        node.step(100, 1, step_time_s=30.0)
        node.service.leave("SIGTERM")
    eventually(lambda: not world_in(server).members)
    empty = world_in(server)
    # (Those that left before the last one may be excluded by worlds before this one.)
    assert {m.node_id for m in empty.leaving} & {node.id for node in nodes}
    silence(monkeypatch, *nodes)
    for node in nodes:
        lease = node.lease_id()
        node.stop()
        server.expire(lease)
    eventually(lambda: leader_in(server) in {spare.id for spare in spares})
    eventually(lambda: [r for s in spares for r in waits(s) if "were leaving" in r])
    assert world_in(server) == empty
    for node in nodes:
        node.service.loop.close()


def test_nodes_start_at_once_after_all_members_have_left_with_their_hosts(
    server: MemoryServer, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As pods do that are scaled to none and back: no port refuses connections."""
    options = replace(FULL, takeover_s=300.0)
    nodes = trio(server, start, options=options, max_nodes=3)
    members_run(server, nodes, world_in(server))
    silence(monkeypatch, *nodes)
    for node in nodes:
        node.step(100, 1, step_time_s=30.0)
        node.service.leave("SIGTERM")
    for node in nodes:
        node.service.close()
    left = [node_in(server, node) for node in nodes if MemoryStore(server).get(KEYS.node(node.id))]
    assert all(n.running is None for n in left)
    fresh = [start(options=options, max_nodes=3) for _ in range(3)]
    eventually(lambda: set(world_in(server).node_ids) == {node.id for node in fresh})
    # Their records are not needed any more.
    eventually(lambda: not any(MemoryStore(server).get(KEYS.node(node.id)) for node in nodes))


def test_a_node_for_which_the_batch_has_no_room_waits_and_learns_why(
    server: MemoryServer, start: Start
) -> None:
    nodes = trio(server, start)
    for node in nodes:
        node.change(max_ranks=3)
        node.step(10, 1)
    fourth = start()
    fourth.change(in_process=True, state=NodeState.READY, max_ranks=3)

    def reason() -> str:
        entry = MemoryStore(server).get(KEYS.progress)
        waiting = decode_progress(entry.key, entry.value).waiting if entry is not None else ()
        return next((w.reason for w in waiting if w.node_id == fourth.id), "")

    assert "at most 3 ranks" in eventually(reason)
    assert world_in(server).generation == 1


def test_a_planned_joining_node_does_not_delay_the_end_of_the_job(
    server: MemoryServer, start: Start
) -> None:
    """History 14."""
    nodes = trio(server, start)
    joining(server, start, nodes)
    for node in nodes:
        node.change(state=NodeState.FINISHED)
    entry = eventually(lambda: MemoryStore(server).get(KEYS.done))
    assert decode(Done, entry.key, entry.value).exit_code == 0


@dataclass(frozen=True)
class KnownWorker:
    """What of a link's worker is looked at."""

    pid: int = 100
    local_rank: int = 0


def end_a_window(node: InProcess, number: int, compute_s: float) -> None:
    """The node's worker reports its step times."""
    times = StepDurations(
        generation=1,
        window=number,
        steps=10,
        samples=80,
        data_s=0.01,
        compute_s=compute_s,
        collective_s=0.0,
        checkpoint_s=0.0,
        script_s=0.0,
    )
    node.context.post(LinkEvent(KnownWorker(), StepReport(times=times)))  # type: ignore[arg-type]


def find_straggler(nodes: list[InProcess], slow: InProcess) -> StragglerFound:
    """All nodes end windows until a straggler is found."""
    windows = itertools.count(1)

    def found() -> StragglerFound | None:
        number = next(windows)
        for node in nodes:
            end_a_window(node, number, compute_s=0.3 if node is slow else 0.1)
        events = (e for node in nodes for e in node.events if isinstance(e, StragglerFound))
        return next(events, None)

    straggler = eventually(found)
    assert isinstance(straggler, StragglerFound)
    return straggler


def replaced(
    server: MemoryServer, start: Start, options: AgentOptions
) -> tuple[list[InProcess], InProcess, WorldRecord]:
    """Three nodes, one of them slow, a fourth as its replacement, and the planned change."""
    nodes = trio(server, start, options=options, max_nodes=3)
    slow = nodes[1]
    found = find_straggler(nodes, slow)
    assert (found.rank, found.node) == (1, slow.journal.name)
    for node in nodes:
        node.step(100, 1)
    spare = start(options=options, max_nodes=3).ready()
    world = generation(server, 2)
    assert world.node_ids == (nodes[0].id, nodes[2].id, spare.id)
    assert world.switch_at_step is not None
    assert world.reason == f"{spare.journal.name} replaces {slow.journal.name}: {found.reason}"
    eventually(lambda: slow.status.world == world)
    return nodes, slow, world


EXCLUDE = replace(FULL, straggler_action="exclude")


def test_a_straggler_trains_until_the_switch_and_then_becomes_a_spare(
    server: MemoryServer, start: Start
) -> None:
    nodes, slow, world = replaced(server, start, EXCLUDE)
    assert not slow.service.newer_world(), "its workers go on to the boundary"
    members_run(server, [nodes[0], nodes[2]], world)
    assert not slow.service.newer_world()
    slow.status.workers_left = True  # at the boundary, as planned
    assert slow.service.newer_world()
    slow.arrive()
    eventually(lambda: not slow.status.workers_left)
    assert not slow.service.newer_world()


def test_a_straggler_that_misses_the_boundary_is_terminated(
    server: MemoryServer, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AgentOptions, "leave_grace_s", 1.1)
    _, slow, _ = replaced(server, start, EXCLUDE)
    eventually(slow.service.newer_world)


def test_a_straggler_stays_in_the_world_by_default(server: MemoryServer, start: Start) -> None:
    nodes = trio(server, start, options=FULL, max_nodes=3)
    find_straggler(nodes, nodes[1])
    spare = start(options=OPTIONS, max_nodes=3).ready()
    eventually(lambda: any("the world is full" in said for n in nodes for said in waits(n)))
    assert spare.id not in world_in(server).node_ids
