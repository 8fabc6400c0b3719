"""Several nodes' services in one process, on the in-memory store and real sockets.

Histories of docs/explanation/protocol.md, section 2, that need no torchrun: tests/kill runs them
with it.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import psutil
import pytest
from etcd_certificates import Authority
from kit.memory_store import MemoryServer, MemoryStore

from elastic.agent import liveness, roster, service
from elastic.agent import succession as election
from elastic.agent.accounting import REMEMBERED
from elastic.agent.identity import OomKillCounter, current_process
from elastic.agent.kernel_log import KernelLog
from elastic.agent.liveness import Verdict
from elastic.agent.node import Close, JobSucceeded, NodeContext, RunSecret
from elastic.agent.service import NodeService
from elastic.errors import (
    CoordinationError,
    JobFailed,
    JoinTimeout,
    NodeRefused,
    RecordError,
    StoreFull,
    StoreUnreachable,
)
from elastic.membership.budget import FlapTracker
from elastic.membership.progress import JobProgress
from elastic.membership.records import (
    Done,
    Keys,
    Leader,
    Node,
    NodeState,
    Outcome,
    ReplicaSlots,
    WorldRecord,
    decode,
    encode,
)
from elastic.membership.view import Liveness, Policy
from elastic.store.keyvalue import Entry, Put, WatchEvent
from elastic.telemetry.events import (
    Event,
    FailureJudged,
    FailureTimelineWritten,
    NodeLost,
    NodeSuspected,
    Waiting,
)
from elastic.testing.waiting import eventually
from elastic.tuning.options import AgentOptions
from elastic.wire.messages import Cause, WorldState
from elastic.wire.tls import Tls, TlsFiles

KEYS = Keys.of("/elastic", "job")
OPTIONS = AgentOptions(last_call_s=0.3, lease_s=0.5, join_timeout_s=20.0, quarantine_s=15.0)
# With a join_timeout_s of tenths of a second.
HASTY = replace(OPTIONS, last_call_s=0.05, quarantine_s=0.1)
DEADLINE_S = 10.0
_ids = itertools.count()


class Recorder:
    """An event sink for assertions; pytest shows its events when a test fails."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.events: list[Event] = []

    def emit(self, event: Event, *, level: int = logging.INFO) -> None:
        self.events.append(event)
        print(f"{time.monotonic():.3f} {self.name} {event}")


def waits(node: TestNode) -> list[str]:
    return [e.reason for e in node.events if isinstance(e, Waiting)]


class TestNode:
    """One node: its service, and a main thread that behaves like torchrun's."""

    __test__ = False

    def __init__(
        self,
        server: MemoryServer,
        *,
        min_nodes: int = 2,
        max_nodes: int = 3,
        options: AgentOptions = OPTIONS,
        library: str = "0.1.0",
        contact: Callable[[], float] | None = None,
        tls: Tls | None = None,
        oom_kills: OomKillCounter | None = None,
        kernel_log: KernelLog | None = None,
    ) -> None:
        number = next(_ids)
        self.store = MemoryStore(server)
        self.journal = Recorder(f"n{number}")
        self.context = NodeContext.of(
            Node(
                node_id=f"id{number}",
                name=f"n{number}",
                nproc=0,
                role="",
                address="127.0.0.1",
                ports=(),
                liveness_port=0,
                process=current_process(),
                state=NodeState.ARRIVED,
                in_process=False,
                min_nodes=min_nodes,
                max_nodes=max_nodes,
                library=library,
                torch="2.13.0",
                running=None,
                arrived_for=0,
                failure=None,
                failure_exit_code=None,
                joined_at_s=float(number),
            ),
            store=self.store,
            keys=KEYS,
            secret=RunSecret.obtain(self.store, KEYS),
            options=options,
            journal=self.journal,
            tls=tls,
        )
        if kernel_log is not None:
            self.context = replace(self.context, kernel_log=kernel_log)
        self.status = self.context.status
        self.service = NodeService(self.context, last_contact_s=contact, oom_kills=oom_kills)
        self.service.start()
        self.id = self.service.node_id

    @property
    def events(self) -> list[Event]:
        return self.journal.events

    def arrive(self, failure: str | None = None, *, exit_code: int | None = None) -> TestNode:
        self.service.arrive(
            nproc=1,
            role="trainer",
            ports=(29500, 29501),
            failure=failure,
            failure_exit_code=1 if failure else exit_code,
        )
        return self

    def enter(self) -> WorldRecord:
        world = self.service.world_wait.run()
        assert world is not None
        self.service.enter(world, waited_s=0.0)
        return world

    def again(self, failure: str | None = None) -> WorldRecord:
        """Restart like torchrun when ``num_nodes_waiting`` is positive, or its workers failed."""
        self.arrive(failure)
        return self.enter()

    def follow(self) -> WorldRecord:
        """Wait for a newer world, then enter it."""
        eventually(self.service.newer_world)
        return self.again()

    def stop(self) -> None:
        """Stop silently; the port still answers."""
        loop = self.service.loop
        loop._end = lambda: None  # type: ignore[method-assign]
        self.context.post(Close())
        loop._thread.join()

    def crash(self) -> None:
        """Crash silently: no resignation, no deletion; the port refuses connections from now on."""
        self.stop()
        self.service.loop.close()
        self.service.loop.succession.end_term()

    def die(self) -> None:
        """Crash; the lease then expires."""
        self.crash()
        self.store.server.expire(self.lease_id())

    def is_connected(self) -> bool:
        """It is connected with the leader; the leader, with both followers."""
        connections = self.service.loop.succession.connections
        return bool(connections.leaders) or len(connections.followers) == 2

    def lease_id(self) -> int:
        lease = self.service.loop.registration.lease
        return lease.id if lease is not None else 0


@pytest.fixture
def server() -> MemoryServer:
    return MemoryServer()


@pytest.fixture
def start(server: MemoryServer) -> Iterator[Callable[..., TestNode]]:
    nodes: list[TestNode] = []
    others = set(threading.enumerate())

    def make(**more: Any) -> TestNode:
        nodes.append(TestNode(server, **more))
        return nodes[-1]

    yield make
    server.reconnect()
    for node in nodes:
        node.service.close()
    left = set(threading.enumerate()) - others
    assert not [t.name for t in left if t.name.startswith("elastic-")]


def world_in(server: MemoryServer) -> WorldRecord:
    entry = eventually(lambda: MemoryStore(server).get(KEYS.world))
    return decode(WorldRecord, entry.key, entry.value)


def leader_in(server: MemoryServer) -> str | None:
    entry = MemoryStore(server).get(KEYS.leader)
    return decode(Leader, entry.key, entry.value).node_id if entry else None


def state_of(server: MemoryServer, node: TestNode) -> NodeState | None:
    entry = MemoryStore(server).get(KEYS.node(node.id))
    return decode(Node, entry.key, entry.value).state if entry else None


def trio(start: Callable[..., TestNode], **more: Any) -> list[TestNode]:
    # The third node may be slow on a busy machine: the last call waits for it.
    options = replace(more.pop("options", OPTIONS), last_call_s=60.0, join_timeout_s=120.0)
    nodes = [start(options=options, **more).arrive() for _ in range(3)]
    worlds = [node.enter() for node in nodes]
    assert len({world.nonce for world in worlds}) == 1
    assert set(worlds[0].node_ids) == {node.id for node in nodes}
    # A closed connection is one of the two conditions that prove a death.
    eventually(lambda: all(node.is_connected() for node in nodes))
    return sorted(nodes, key=lambda node: worlds[0].node_ids.index(node.id))


def test_max_nodes_form_a_world_immediately(start: Callable[..., TestNode]) -> None:
    nodes = trio(start)
    assert not any(node.service.newer_world() for node in nodes)


def test_min_nodes_form_a_world_after_the_last_call(start: Callable[..., TestNode]) -> None:
    a, b = start().arrive(), start().arrive()
    assert a.enter().size == b.enter().size == 2


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_crashed_node_is_removed_immediately(
    start: Callable[..., TestNode], victim: int, server: MemoryServer
) -> None:
    nodes = trio(start)
    nodes[victim].crash()  # its lease remains: only its port shows the death
    rest = [n for n in nodes if n is not nodes[victim]]
    worlds = [node.follow() for node in rest]
    assert [w.node_ids for w in worlds] == [tuple(n.id for n in rest)] * 2
    assert worlds[0].generation == 2
    assert worlds[0].cause is Cause.LOST
    assert leader_in(server) in worlds[0].node_ids


def test_a_crash_of_the_leader_forms_the_next_world(
    start: Callable[..., TestNode], server: MemoryServer
) -> None:
    nodes = trio(start)
    leader = next(n for n in nodes if n.id == leader_in(server))
    leader.crash()
    rest = [n for n in nodes if n is not leader]
    assert {n.follow().generation for n in rest} == {2}


def test_the_leader_is_evicted_before_its_peers_detect_its_death(
    start: Callable[..., TestNode], server: MemoryServer
) -> None:
    """The first node to detect it deletes its key. The next leader learns of that first, and of the
    end of its own connection afterwards: both together prove the death, in either order.
    """
    nodes = trio(start)
    leader = next(n for n in nodes if n.id == leader_in(server))
    rest = [n for n in nodes if n is not leader]
    leader.stop()
    server.delete(KEYS.leader)
    eventually(lambda: leader_in(server) in {n.id for n in rest})
    leader.crash()
    assert {n.follow().node_ids for n in rest} == {tuple(n.id for n in rest)}


def test_an_answer_that_arrives_after_the_death_of_its_node_does_not_hide_it(
    start: Callable[..., TestNode], server: MemoryServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new leader's first probe of the former one ends after its connection has closed. The
    lease does not expire: nothing else would show the death."""
    nodes = trio(start)
    former = next(n for n in nodes if n.id == leader_in(server))
    rest = [n for n in nodes if n is not former]
    answered, real = threading.Event(), liveness.probe

    def slow(host: str, port: int, node_id: str, **more: Any) -> Verdict:
        verdict = real(host, port, node_id, **more)
        if node_id == former.id and not answered.is_set():
            answered.set()
            eventually(lambda: any(isinstance(e, NodeSuspected) for n in rest for e in n.events))
        return verdict

    monkeypatch.setattr("elastic.agent.leader.probe", slow)
    # (On this machine a process that ended is proof, too; these nodes share one that has not.)
    former.stop()
    server.delete(KEYS.leader)
    assert answered.wait(DEADLINE_S)
    former.crash()
    assert {n.follow().node_ids for n in rest} == {tuple(n.id for n in rest)}


def test_a_leader_decodes_records_of_nodes_on_the_thread_of_its_watch(
    start: Callable[..., TestNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousand take seconds, in which its own thread must renew the permission to train."""
    threads: set[str] = set()
    read = roster.read

    def noted(keys: Keys, entry: Entry) -> roster.NodeRecord | RecordError:
        threads.add(threading.current_thread().name)
        return read(keys, entry)

    monkeypatch.setattr(roster, "read", noted)
    trio(start)
    assert threads == {"elastic-watch-elastic-watch-nodes"}


def test_a_new_leader_waits_briefly_for_a_member_that_answers_and_has_no_key(
    start: Callable[..., TestNode], server: MemoryServer
) -> None:
    """It may be about to register, or it cannot reach the store: it answers for as long as that."""
    nodes = trio(start)
    former = next(n for n in nodes if n.id == leader_in(server))
    cut_off, other = (n for n in nodes if n is not former)
    cut_off.stop()
    server.expire(cut_off.lease_id())
    former.die()
    joining = start().arrive()
    expected = (other.id, joining.id)
    assert (other.follow().node_ids, joining.enter().node_ids) == (expected, expected)


def test_a_live_member_behind_a_refusing_firewall_is_kept(
    start: Callable[..., TestNode], server: MemoryServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has a valid lease and an open connection: it is probed until it can be reached."""
    nodes = trio(start)
    leader = next(n for n in nodes if n.id == leader_in(server))
    victim, other = (n for n in nodes if n is not leader)
    refused, is_up = threading.Event(), True
    real = liveness.probe

    def firewall(host: str, port: int, node_id: str, **more: Any) -> Verdict:
        if is_up and node_id == victim.id:
            refused.set()
            return Verdict(Liveness.SUSPECT, "refused by a firewall", refused=True)
        return real(host, port, node_id, **more)

    monkeypatch.setattr("elastic.agent.leader.probe", firewall)
    other.arrive("RuntimeError: Connection closed by peer")  # every member is probed
    assert refused.wait(DEADLINE_S)
    eventually(lambda: any("may be dead: the lease decides" in str(e) for e in leader.events))
    assert not [e for e in leader.events if isinstance(e, NodeLost)]
    assert world_in(server).generation == 1
    is_up = False
    worlds = [other.enter(), leader.follow(), victim.follow()]
    assert {w.node_ids for w in worlds} == {tuple(n.id for n in nodes)}


def test_two_simultaneous_crashes_below_min_nodes_pause_the_world(
    start: Callable[..., TestNode], server: MemoryServer
) -> None:
    a, b, c = trio(start)
    b.die()
    c.die()
    eventually(a.service.newer_world)
    a.arrive()
    eventually(lambda: world_in(server).state is WorldState.PAUSED)
    assert world_in(server).node_ids == (a.id,)
    d = start().arrive()
    world = a.enter()
    assert (world.cause, world.node_ids) == (Cause.RESUMED, (a.id, d.id))
    assert d.enter() == world


def test_a_failure_without_a_death_keeps_the_members(start: Callable[..., TestNode]) -> None:
    a, b, c = trio(start)
    a.arrive("RuntimeError: Connection closed by peer")
    worlds = [a.enter(), b.follow(), c.follow()]
    assert {w.node_ids for w in worlds} == {(a.id, b.id, c.id)}
    assert worlds[0].cause is Cause.FAILURE


def test_an_error_repeated_three_times_ends_the_job_with_a_timeline(
    start: Callable[..., TestNode], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ELASTIC_JOURNAL", str(tmp_path / "reports"))
    nodes = trio(start)
    for _ in range(2):
        for node in nodes:
            node.arrive("RuntimeError: bad loss")
        for node in nodes:
            node.enter()
    for node in nodes:
        node.arrive("RuntimeError: bad loss")
    pages = set()
    for node in nodes:
        with pytest.raises(JobFailed, match="bad loss") as failed:
            node.enter()
        (event,) = (e for e in node.events if isinstance(e, FailureTimelineWritten))
        report = tmp_path / "reports" / f"failure-timeline-{node.journal.name}.txt"
        assert event.report == str(report) and event.report in failed.value.message
        assert event.timeline in failed.value.message
        assert report.read_text() == event.timeline + "\n"
        pages.add(event.timeline)
    (page,) = pages
    assert page.count("generation") - 1 >= 3 and "exit code 1" in page
    assert page.count(": RuntimeError: bad loss") >= 3
    assert page.count("formed generation") == 2
    assert "action: ended the job with exit code 1" in page


def test_a_timeline_that_cannot_be_written_is_still_in_the_error(
    start: Callable[..., TestNode], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    folder = str(tmp_path / "file" / "folder")
    monkeypatch.setenv("ELASTIC_JOURNAL", folder)
    node = start(min_nodes=1, max_nodes=1)
    node.arrive().enter()
    node.again("RuntimeError: bad loss")
    node.again("RuntimeError: bad loss")
    node.arrive("RuntimeError: bad loss")
    with pytest.raises(JobFailed, match="Failure timeline") as failed:
        node.enter()
    assert f"{folder}/failure-timeline-{node.journal.name}.txt cannot be written" in str(
        failed.value
    )


def test_a_node_with_a_gpu_failure_in_its_kernel_log_is_quarantined(
    start: Callable[..., TestNode], tmp_path: Path
) -> None:
    """As under torchrun alone, without a link. The failure of its peer is reported first."""
    text = "RuntimeError: Connection closed by peer [10.0.0.4]:4711"
    kmsg, xid = tmp_path / "kmsg", "NVRM: Xid (PCI:0000:44:00): 79, GPU has fallen off the bus"
    kmsg.write_text(f"4,1,1,-;{xid}\n")  # before the workers started: unrelated to them
    nodes = [start(min_nodes=1, max_nodes=3, kernel_log=KernelLog(kmsg)).arrive()]
    nodes += [start(min_nodes=1, max_nodes=3).arrive() for _ in range(2)]
    for node in nodes:
        node.enter()
    with kmsg.open("a") as log:
        log.write(f"4,2,2,-;{xid}\n")
    for node in reversed(nodes):
        node.arrive(text, exit_code=1)
    assert nodes[1].enter().node_ids == nodes[2].enter().node_ids
    (judged,) = [e for node in nodes for e in node.events if isinstance(e, FailureJudged)]
    assert (judged.failed, judged.rule) == (nodes[0].journal.name, "gpu-hardware")
    assert judged.evidence == f"kernel log: {xid}"


def test_an_oom_killed_worker_is_classified_as_out_of_memory(
    start: Callable[..., TestNode], tmp_path: Path
) -> None:
    """As under torchrun alone: without a link, with an exit code only."""
    (tmp_path / "membership").write_text("0::/\n")
    events = tmp_path / "memory.events"
    events.write_text("oom_kill 1\n")
    nodes = [
        start(max_nodes=2, oom_kills=OomKillCounter(tmp_path, tmp_path / "membership")).arrive()
        for _ in range(2)
    ]
    for node in nodes:
        node.enter()
    events.write_text("oom_kill 2\n")
    nodes[0].arrive(exit_code=-9)
    nodes[1].arrive("RuntimeError: Connection closed by peer")
    worlds = [node.enter() for node in nodes]
    sentence = "ended by SIGKILL: the kernel killed it because the memory limit of its cgroup"
    assert sentence in worlds[0].reason and worlds[0] == worlds[1]
    (judged,) = [e for node in nodes for e in node.events if isinstance(e, FailureJudged)]
    assert (judged.failed, judged.rule) == (nodes[0].journal.name, "host-out-of-memory")
    assert judged.confidence == "high"
    # A later SIGKILL from another source.
    nodes[0].arrive(exit_code=-9)
    nodes[1].arrive("RuntimeError: Connection closed by peer")
    assert "memory limit" not in nodes[0].enter().reason
    nodes[1].enter()


@pytest.mark.parametrize(
    ("error", "why"),
    [
        ("NameError: name 'lr' is not defined", "the script cannot run"),
        ("KeyError: 'lr'", "every node raised this error before the first step of the job"),
    ],
)
def test_an_error_repeated_in_every_attempt_ends_the_job_immediately(
    start: Callable[..., TestNode], error: str, why: str
) -> None:
    nodes = trio(start)
    for node in nodes:
        node.arrive(error, exit_code=1)
    for node in nodes:
        with pytest.raises(JobFailed, match=f"would fail again: {why}"):
            node.enter()


@pytest.mark.parametrize("is_first", [True, False])
def test_a_node_with_a_faulty_gpu_is_excluded_from_the_next_world(
    start: Callable[..., TestNode], monkeypatch: pytest.MonkeyPatch, is_first: bool
) -> None:
    of = Policy.of
    monkeypatch.setattr(Policy, "of", lambda *who: replace(of(*who), origin_settle_s=DEADLINE_S))
    a, b, c = trio(start)
    if is_first:
        b.arrive("RuntimeError: CUDA error: uncorrectable ECC error encountered")
    a.arrive("RuntimeError: Connection closed by peer")
    c.arrive("RuntimeError: Connection closed by peer")
    if not is_first:
        known = [f"{node.journal.name} failed" for node in (a, c)]
        eventually(lambda: any(all(k in reason for k in known) for reason in waits(a)))
        b.arrive("RuntimeError: CUDA error: uncorrectable ECC error encountered")
    worlds = [a.enter(), c.enter()]
    assert {w.node_ids for w in worlds} == {(a.id, c.id)}
    judged = [e for node in (a, b, c) for e in node.events if isinstance(e, FailureJudged)]
    assert [(e.failed, e.action, e.rule) for e in judged] == [
        (b.journal.name, "exclude-node", "gpu-hardware")
    ]


def test_a_joining_node_joins_a_running_job(start: Callable[..., TestNode]) -> None:
    a, b = start().arrive(), start().arrive()
    a.enter(), b.enter()
    c = start().arrive()
    worlds = [a.follow(), b.follow(), c.enter()]
    assert worlds[2].cause is Cause.JOINED
    assert worlds[2].node_ids[2] == c.id
    assert worlds[2].lineage == (1,)


def test_peers_do_not_wait_for_a_leaving_node(start: Callable[..., TestNode]) -> None:
    a, b, c = trio(start)
    a.service.leave("SIGTERM")
    worlds = [b.follow(), c.follow()]
    assert worlds[0].node_ids == (b.id, c.id)
    assert worlds[0].cause is Cause.LEFT


def test_the_exit_of_a_node_that_left_gracefully_raises_no_suspicion(
    start: Callable[..., TestNode],
) -> None:
    nodes = trio(start)
    leader = next(node for node in nodes if node.service.loop.succession.term is not None)
    left, killed = (node for node in nodes if node is not leader)
    left.service.leave("SIGTERM")
    assert leader.follow().node_ids == tuple(n.id for n in nodes if n is not left)
    left.service.close()
    killed.die()  # events of its death follow the other node's exit

    # (On a busy machine a node may be suspected of silence before that.)
    def ended() -> list[str]:
        events = [e for e in leader.journal.events if isinstance(e, NodeSuspected)]
        return [e.suspect for e in events if e.reason == "its connection closed"]

    eventually(lambda: killed.journal.name in ended(), "the one that was killed is suspected")
    assert not {left.id, left.journal.name} & set(ended())


def test_a_job_resumes_after_all_nodes_left_gracefully(
    start: Callable[..., TestNode], server: MemoryServer
) -> None:
    nodes = trio(start)
    for node in nodes:
        node.service.leave("SIGTERM")
        node.service.close()
    assert world_in(server).members == ()
    fresh = trio(start)
    world = fresh[0].service.status.running
    assert world is not None and world.generation > 1
    # Each departure is recorded: none of the new nodes waits for leases before it leads.
    assert not [why for node in fresh for why in waits(node) if "leases" in why]


def test_a_job_restarts_after_all_nodes_crashed(
    start: Callable[..., TestNode], server: MemoryServer
) -> None:
    for node in trio(start):  # one by one: a survivor may write a paused world in between
        node.die()
    fresh = trio(start)
    world = fresh[0].service.status.running
    assert world is not None
    assert world.generation > 1
    assert world.cause is Cause.TAKEOVER
    assert {member.node_id for member in world.members} == {node.id for node in fresh}


def test_a_node_that_has_finished_runs_the_end_of_the_script_for_one_that_crashed(
    start: Callable[..., TestNode],
) -> None:
    a, b, c = trio(start)
    ended: list[Done | WorldRecord | None] = []
    threads = [
        threading.Thread(target=lambda n=n: ended.append(n.service.finish()), name="main")
        for n in (a, b)
    ]
    for thread in threads:
        thread.start()
    eventually(lambda: a.status.node.state is NodeState.FINISHED)
    assert not ended
    c.crash()
    eventually(lambda: ended)
    (world,) = ended
    assert isinstance(world, WorldRecord) and world.cause is Cause.UNFINISHED
    again = next(node for node in (a, b) if world.node_ids == (node.id,))
    again.arrive().enter()
    ended.append(again.service.finish())
    for thread in threads:
        thread.join(DEADLINE_S)
    outcomes = [end.outcome for end in ended if isinstance(end, Done)]
    assert outcomes == [Outcome.SUCCESS] * 2


def test_a_job_that_has_ended_leaves_its_outcome_and_nothing_else(
    start: Callable[..., TestNode], server: MemoryServer
) -> None:
    nodes = trio(start)
    server.put(KEYS.replicas, encode(ReplicaSlots(replicas=())), 0)
    for node in nodes:
        node.service.finished()
    eventually(lambda: MemoryStore(server).get(KEYS.done))
    for node in nodes:
        node.service.close()
    assert server.entries.keys() == {KEYS.world, KEYS.done, KEYS.secret}


def test_a_new_leader_unaware_of_the_end_of_the_job_evicts_no_node(
    start: Callable[..., TestNode], server: MemoryServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last leader writes the end of the job and exits. Its successor's watch is delayed."""
    a, b = start(max_nodes=2).arrive(), start(max_nodes=2).arrive()
    a.enter(), b.enter()
    leader, successor = (a, b) if a.id == leader_in(server) else (b, a)
    store_events = successor.service.loop.store_events
    hear = store_events.handle

    def hear_no_end(event: WatchEvent) -> None:
        if not (isinstance(event, Put) and event.entry.key == KEYS.done):
            hear(event)

    monkeypatch.setattr(store_events, "handle", hear_no_end)
    end = Done(
        outcome=Outcome.SUCCESS,
        reason="all nodes finished",
        exit_code=0,
        generation=1,
        final_step=None,
        time_s=0.0,
    )
    leader.store.put(KEYS.done, encode(end))
    leader.crash()
    server.delete(KEYS.node(leader.id))
    server.delete(KEYS.leader)
    eventually(lambda: successor.status.done)
    assert not [event for event in successor.events if isinstance(event, NodeLost)]
    assert world_in(server).generation == 1


@pytest.mark.parametrize("is_leader", [True, False], ids=["leader", "follower"])
def test_a_node_that_has_finished_may_leave_before_the_others_have(
    start: Callable[..., TestNode], server: MemoryServer, is_leader: bool
) -> None:
    """A later leader counts it as finished, too: its record outlives its lease."""
    a, b = start(max_nodes=2).arrive(), start(max_nodes=2).arrive()
    a.enter(), b.enter()
    first, last = (a, b) if (a.id == leader_in(server)) == is_leader else (b, a)
    first.service.finished()
    eventually(lambda: state_of(server, first) is NodeState.FINISHED)
    first.service.close()
    eventually(lambda: leader_in(server) == last.id)
    eventually(lambda: [e for e in last.events if isinstance(e, Waiting)])
    end = last.service.finish()
    assert isinstance(end, Done) and end.outcome is Outcome.SUCCESS
    assert world_in(server).generation == 1
    assert not [event for event in last.events if isinstance(event, NodeLost)]
    assert MemoryStore(server).get(KEYS.node(first.id)) is None  # nothing remains of it


def test_a_node_joining_a_finished_job_gets_its_outcome(start: Callable[..., TestNode]) -> None:
    a = start(min_nodes=1).arrive()
    a.enter()
    assert a.service.finish() is not None
    with pytest.raises(JobSucceeded, match="another --rdzv-id"):
        start(min_nodes=1).arrive().enter()


def test_a_lost_lease_is_replaced_without_a_new_world(
    start: Callable[..., TestNode], server: MemoryServer
) -> None:
    a, b, c = trio(start)
    before = b.lease_id()
    server.expire(before)
    eventually(lambda: b.lease_id() not in (0, before) and MemoryStore(server).get(KEYS.node(b.id)))
    c.service.leave("a later change")
    assert {a.follow().generation, b.follow().generation} == {2}


def test_the_running_world_is_restored_into_a_wiped_store(
    start: Callable[..., TestNode], server: MemoryServer
) -> None:
    a, b, c = trio(start)
    c.crash()
    assert {a.follow().generation, b.follow().generation} == {2}
    server.wipe()
    joining_node = start().arrive()
    world = joining_node.enter()
    assert world.generation == 3
    assert world.node_ids == (a.id, b.id, joining_node.id)
    assert a.follow() == b.follow() == world


def test_a_leader_that_has_never_seen_the_lost_world_hands_over_to_a_node_that_runs_it(
    start: Callable[..., TestNode], server: MemoryServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The nodes' keys only name the world that they run."""
    a, b, c = trio(start)
    world = a.service.status.running
    assert world is not None
    # The members are slower than a node that arrives after the wipe.
    candidates: list[str] = []
    monkeypatch.setattr(election, "may_campaign", lambda of, node_id, **more: node_id in candidates)
    server.wipe()
    joining_node = start(max_nodes=3)
    candidates.append(joining_node.id)
    joining_node.arrive()
    eventually(lambda: joining_node.service.loop.succession.term is not None)
    entry = eventually(lambda: MemoryStore(server).get(KEYS.world))
    assert decode(WorldRecord, entry.key, entry.value) == world
    leader = eventually(lambda: MemoryStore(server).get(KEYS.leader))
    assert decode(Leader, leader.key, leader.value).node_id in {a.id, b.id, c.id}


def test_an_outage_of_the_store_forms_no_new_world(
    start: Callable[..., TestNode], server: MemoryServer
) -> None:
    a, b, c = trio(start)
    server.disconnect()
    c.crash()
    eventually(lambda: a.status.store_problem or b.status.store_problem)
    assert not a.service.newer_world()
    server.reconnect()
    assert {a.follow().generation, b.follow().generation} == {2}


def test_a_node_isolated_for_half_of_takeover_s_stops(start: Callable[..., TestNode]) -> None:
    last_contact = [time.monotonic()]
    a = start(min_nodes=1, max_nodes=1, contact=lambda: last_contact[0]).arrive()
    a.enter()
    assert not a.service.newer_world()
    last_contact[0] -= OPTIONS.takeover_s / 2 + 1

    def stopped() -> bool:
        try:
            a.service.newer_world()
        except StoreUnreachable as error:
            return "takeover_s=300" in str(error)
        return False

    eventually(stopped)


def test_a_node_without_the_store_makes_no_calls_when_its_leader_dies(
    start: Callable[..., TestNode], server: MemoryServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call would run into its timeout and delay the stop of the node."""
    last_contact = [time.monotonic() + 2 * DEADLINE_S]
    nodes = [start(min_nodes=1, contact=lambda: last_contact[0]).arrive() for _ in range(2)]
    for node in nodes:
        node.enter()
    leader = eventually(lambda: next((n for n in nodes if n.service.loop.succession.term), None))
    follower = next(n for n in nodes if n is not leader)
    succession, calls = follower.service.loop.succession, list[str]()
    delete = follower.store.compare_and_delete

    def counted(key: str, *, expected_revision: int) -> bool:
        calls.append(key)
        return delete(key, expected_revision=expected_revision)

    monkeypatch.setattr(follower.store, "compare_and_delete", counted)
    server.disconnect()
    eventually(lambda: follower.service.loop.isolation.watch_is_cut)
    last_contact[0] = time.monotonic() - 5.0
    leader.crash()
    eventually(lambda: calls or succession.wake_s is not None)
    assert calls == []
    last_contact[0] = time.monotonic() + 2 * DEADLINE_S
    server.reconnect()
    eventually(lambda: succession.term is not None)  # nothing is forgotten


def test_a_node_that_finishes_during_a_store_outage_does_not_hang(
    start: Callable[..., TestNode], server: MemoryServer
) -> None:
    last_contact = [time.monotonic() + DEADLINE_S]
    a = start(min_nodes=1, max_nodes=1, contact=lambda: last_contact[0]).arrive()
    a.enter()
    server.disconnect()
    eventually(lambda: a.service.loop.isolation.watch_is_cut)
    last_contact[0] = time.monotonic() - 5.0
    a.status.store_problem = None  # as after an iteration that did not need the store
    ended: list[Done | WorldRecord | None] = []
    main = threading.Thread(
        target=lambda: ended.append(a.service.finish(patience_s=0.2)), name="main", daemon=True
    )
    main.start()
    main.join(DEADLINE_S)
    assert ended == [None]


def test_a_node_that_finishes_with_a_full_store_does_not_wait_for_an_outage_to_end(
    start: Callable[..., TestNode], server: MemoryServer
) -> None:
    a = start(min_nodes=1, max_nodes=1).arrive()
    a.enter()
    server.full = True
    assert a.service.finish(patience_s=1_000 * DEADLINE_S) is None
    assert isinstance(a.service.status.store_problem, StoreFull)


def test_a_parking_node_that_finishes_waits_until_a_full_store_is_freed(
    start: Callable[..., TestNode], server: MemoryServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its launcher would restart it for nothing."""
    monkeypatch.setattr(service, "FINISH_WHEN_FULL_S", 0.0)
    a = start(min_nodes=1, max_nodes=1).arrive()
    a.enter()
    server.full = True
    ended: list[Done | WorldRecord | None] = []
    main = threading.Thread(
        target=lambda: ended.append(a.service.finish(patience_s=math.inf)), name="main", daemon=True
    )
    main.start()
    eventually(lambda: isinstance(a.service.status.store_problem, StoreFull))
    server.full = False
    main.join(DEADLINE_S)
    assert [isinstance(end, Done) and end.exit_code for end in ended] == [0]


def test_a_node_that_arrives_again_under_a_full_store_is_told_so_at_once(
    start: Callable[..., TestNode], server: MemoryServer
) -> None:
    a = start(min_nodes=1, max_nodes=1).arrive()
    a.enter()
    server.full = True
    a.arrive(failure="RuntimeError: no", exit_code=3)
    with pytest.raises(StoreFull):
        a.service.world_wait.run()


@pytest.mark.parametrize(
    ("more", "said"),
    [({"max_nodes": 4}, "2 to 4 nodes"), ({"library": "9.9.9"}, "9.9.9")],
)
def test_an_incompatible_joining_node_is_refused_and_the_job_unaffected(
    start: Callable[..., TestNode], more: dict[str, Any], said: str
) -> None:
    a, b = start().arrive(), start().arrive()
    a.enter(), b.enter()
    with pytest.raises(NodeRefused, match=said):
        start(**more).arrive()
    assert not a.service.newer_world()
    start().arrive().enter()


@pytest.mark.parametrize("job_has_tls", [True, False])
def test_a_mix_of_tls_and_plaintext_nodes_is_refused_with_a_clear_error(
    start: Callable[..., TestNode], tmp_path: Path, job_has_tls: bool
) -> None:
    authority = Authority(tmp_path, "nodes")
    pair = authority.issue("node")
    given = Tls(TlsFiles(authority.cacert, pair.cert, pair.key))
    own, other = (given, None) if job_has_tls else (None, given)
    a, b = start(tls=own).arrive(), start(tls=own).arrive()
    assert a.enter().tls is job_has_tls
    b.enter()
    with pytest.raises(NodeRefused, match=r"TLS between nodes \(node_cacert, node_cert, node_key"):
        start(tls=other).arrive()
    assert not a.service.newer_world()
    b.crash()
    start(tls=own).arrive().enter()


def test_a_spare_waits_beyond_the_join_timeout(
    start: Callable[..., TestNode], server: MemoryServer
) -> None:
    a, b, c = trio(start)
    short = replace(HASTY, join_timeout_s=0.2)
    spare = start(options=short).arrive()
    entered: list[WorldRecord] = []
    thread = threading.Thread(target=lambda: entered.append(spare.enter()), name="main")
    thread.start()
    thread.join(1.0)
    assert thread.is_alive()
    a.crash()
    b.follow(), c.follow()
    thread.join(DEADLINE_S)
    assert [world.node_ids for world in entered] == [(b.id, c.id, spare.id)]


def test_too_few_nodes_raise_a_clear_error(start: Callable[..., TestNode]) -> None:
    lonely = start(options=replace(HASTY, join_timeout_s=0.3)).arrive()
    with pytest.raises(JoinTimeout, match=r"min 2, max 3.*no world was ever formed"):
        lonely.enter()


def test_an_invalid_node_record_does_not_affect_other_nodes(
    start: Callable[..., TestNode], server: MemoryServer
) -> None:
    MemoryStore(server).put(KEYS.node("intruder"), b"{not json")
    nodes = trio(start)
    said = [e for n in nodes for e in n.journal.events if "intruder" in str(e)]
    assert said


def test_an_invalid_world_record_stops_a_joining_node_but_not_the_job(
    start: Callable[..., TestNode], server: MemoryServer
) -> None:
    a, b = start().arrive(), start().arrive()
    a.enter(), b.enter()
    MemoryStore(server).put(KEYS.world, b'{"version": 99}')
    with pytest.raises(RecordError, match=KEYS.world):
        start().arrive()
    assert not a.service.newer_world()
    # The next change repairs it.
    b.arrive("RuntimeError: boom")
    assert a.follow().generation == b.enter().generation == 2
    assert world_in(server).generation == 2


def test_a_job_goes_on_although_its_world_was_edited(
    start: Callable[..., TestNode], server: MemoryServer
) -> None:
    """The record names other members, which are proved dead as any others."""
    for node in trio(start, min_nodes=3):
        node.die()
    world = world_in(server)
    strangers = [
        replace(
            member,
            node_id=member.node_id[::-1],
            name=f"not {member.name}",
            process=replace(member.process, start_ticks=member.process.start_ticks + 1),
        )
        for member in world.members
    ]
    MemoryStore(server).put(KEYS.world, encode(replace(world, members=tuple(strangers))))
    nodes = [start(min_nodes=3).arrive() for _ in range(3)]
    worlds = [node.enter() for node in nodes]
    assert {w.generation for w in worlds} == {world.generation + 1}
    assert set(worlds[0].node_ids) == {node.id for node in nodes}


def test_random_crashes_and_joins_never_form_two_worlds(
    start: Callable[..., TestNode], server: MemoryServer
) -> None:
    """Fifteen rounds of a crash and a replacement, with live main threads throughout."""
    live: list[TestNode] = []
    stop = threading.Event()
    threads: list[threading.Thread] = []
    histories: dict[str, list[WorldRecord]] = {}

    def main(node: TestNode, crashed: threading.Event) -> None:
        node.arrive()
        while not stop.is_set() and not crashed.is_set():
            try:
                world = node.service.world_wait.run()
            except JoinTimeout:
                continue
            except CoordinationError:
                return  # crashed while it waited
            if crashed.is_set() or stop.is_set():
                return
            assert world is not None
            node.service.enter(world, waited_s=0.0)
            histories.setdefault(node.id, []).append(world)
            while not node.service.newer_world():
                if stop.wait(0.005) or crashed.is_set():
                    return
            node.arrive()

    crashes: dict[str, threading.Event] = {}

    def add() -> None:
        node = start(options=replace(HASTY, join_timeout_s=0.5))
        crashes[node.id] = threading.Event()
        threads.append(
            threading.Thread(target=main, args=(node, crashes[node.id]), name="main", daemon=True)
        )
        threads[-1].start()
        live.append(node)

    for _ in range(3):
        add()
    try:
        for round_ in range(15):
            eventually(lambda: set(world_in(server).node_ids) == {n.id for n in live})
            victim = live.pop(round_ % 3)
            crashes[victim.id].set()
            victim.die()
            add()
        expected = {n.id for n in live}
        eventually(
            lambda: all(
                histories.get(i) and set(histories[i][-1].node_ids) == expected for i in expected
            )
        )
    finally:
        stop.set()
        for thread in threads:
            thread.join(DEADLINE_S)
    for worlds in histories.values():
        generations = [w.generation for w in worlds]
        assert generations == sorted(set(generations))
    by_generation: dict[int, set[str]] = {}
    for worlds in histories.values():
        for world in worlds:
            by_generation.setdefault(world.generation, set()).add(world.nonce)
    assert all(len(nonces) == 1 for nonces in by_generation.values())


# ── a long life ──────────────────────────────────────────────────────────────────────────────


def objects_of(nodes: Iterable[TestNode]) -> int:
    """How many objects these nodes' services refer to, with each item of each container. (Numbers
    and texts count as items only: equal ones may be one object or several.)

    Without the test's own: the store and the events. And without what is kept of lost nodes for
    some minutes: heartbeats, and when they were lost.
    """
    passed: tuple[type, ...] = (type, ModuleType, FunctionType, FrameType, threading.Thread)
    passed += (
        int,
        float,
        str,
        bytes,
        MemoryServer,
        Recorder,
        liveness.Heartbeats,
        JobProgress,
        FlapTracker,
    )
    found: dict[int, object] = {}
    left: list[object] = [node.service for node in nodes]
    while left:
        thing = left.pop()
        if id(thing) not in found and not isinstance(thing, passed):
            found[id(thing)] = thing
            # (A few worlds are kept, with up to REMEMBERED breakages each: those count as one.)
            left += [] if isinstance(thing, WorldRecord) else gc.get_referents(thing)
            if isinstance(thing, MethodType):
                left.append(thing.__self__)
    containers = (dict, list, tuple, set, frozenset, deque)
    return len(found) + sum(len(c) for c in found.values() if isinstance(c, containers))


def counted(nodes: Iterable[TestNode], server: MemoryServer) -> dict[str, int]:
    return {
        "objects": objects_of(nodes),
        "keys": len(server.entries),
        "leases": len(server.leases),
        "watches": len(server.watches),
        "threads": threading.active_count(),
        "descriptors": psutil.Process().num_fds(),
    }


@pytest.mark.parametrize(
    "cycles",
    [16, pytest.param(2500, marks=[pytest.mark.soak, pytest.mark.timeout(7200)])],
    ids=["short", "long"],
)
def test_nodes_generations_and_terms_leave_nothing_behind(
    start: Callable[..., TestNode], server: MemoryServer, cycles: int
) -> None:
    """Two members stay. Others join, and leave gracefully or die: two generations each time."""
    a, b = start(options=HASTY).arrive(), start(options=HASTY).arrive()
    a.enter(), b.enter()

    def live(count: int, *, elects: bool) -> None:
        for cycle in range(count):
            c = TestNode(server, options=HASTY).arrive()
            try:
                assert {n.nonce for n in (a.follow(), b.follow(), c.enter())} == {nonce()}
                c.service.leave("SIGTERM") if cycle % 2 else c.die()
                assert {n.nonce for n in (a.follow(), b.follow())} == {nonce()}
            finally:
                c.service.close()
            if elects:
                server.delete(KEYS.leader)
                eventually(lambda: leader_in(server) in (a.id, b.id))

    def nonce() -> str:
        return world_in(server).nonce

    live(REMEMBERED, elects=False)
    live(2, elects=True)
    # Less than one for each node that comes. What is kept of the last worlds differs by up to 300
    # objects from moment to moment (a new leader reads again what it judges by). A node's record is
    # 60 objects: 16 that leaked would be 960.
    most = {what: count + cycles // 2 for what, count in counted((a, b), server).items()}
    most["objects"] += 500

    def too_many() -> dict[str, int]:
        counts = counted((a, b), server)
        return {what: count for what, count in counts.items() if count > most[what]}

    for elects in (True, False):  # many terms, then a long one
        live(cycles, elects=elects)
        with contextlib.suppress(AssertionError):
            eventually(lambda: not too_many())
        assert not too_many(), most
