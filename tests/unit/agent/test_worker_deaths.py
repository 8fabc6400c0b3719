"""How a node handles the deaths of its workers, whenever they are reported."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

import pytest
from kit.journal import MemoryJournal
from kit.manual_clock import ManualClock
from kit.membership_nodes import named, node, proposal, seen, view, world

from elastic.agent.kernel_log import KernelLog
from elastic.agent.metrics import NodeMetrics
from elastic.agent.node import NodeContext, NodeStatus
from elastic.agent.workers import Workers
from elastic.link.link import (
    IN_STEP,
    ClientHandshakeRequest,
    CountEvents,
    Entered,
    Exiting,
    Heartbeat,
    InTraining,
    LinkServer,
    Message,
    Ready,
    Worker,
    WorkerDeath,
)
from elastic.membership.records import Keys, NodeState
from elastic.membership.view import Policy
from elastic.telemetry.events import CheckpointSaved, Waiting
from elastic.tuning.options import AgentOptions
from elastic.worker.worlds import Worlds

ALONE = Policy(min_nodes=1, max_nodes=4)


class Context:
    """The context of a node without a thread: the tests handle its messages."""

    def __init__(self) -> None:
        record = replace(node("n1", NodeState.READY, in_process=True), nproc=1)
        self.status = NodeStatus(record, Keys.of("/elastic", "job"), 0.0)
        self.clock, self.journal = ManualClock(), MemoryJournal()
        self.options = AgentOptions()
        self.kernel_log = KernelLog()

    def post(self, message: object) -> None:
        pass


class Agent:
    """Records what a worker sends."""

    def __init__(self, sent: list[Message]) -> None:
        self.send = self.send_heartbeat = sent.append

    def close(self) -> None:
        pass


class Links(LinkServer):
    """The link server of an agent without a thread; records what it sends."""

    def __init__(self, sent: list[Message], **callbacks: Any) -> None:
        super().__init__(**callbacks)
        self.sent = sent
        self.present: list[Worker] = []

    def send(self, message: Message, to: Worker | None = None) -> None:
        self.sent.append(message)

    def workers(self) -> tuple[Worker, ...]:
        return tuple(self.present)


def test_a_death_reported_after_the_next_start_is_ignored() -> None:
    """torchrun has ended the worker and starts another; the node's thread was busy."""
    context = Context()
    workers = Workers(cast(NodeContext, context))
    old = Worker(pid=1 << 22, local_rank=0, token=1)
    workers.on_message(
        old, ClientHandshakeRequest(version=1, pid=old.pid, local_rank=0, library="0.1.0")
    )
    workers.on_message(old, Ready())

    context.status.starts += 1  # as NodeService.warm_up does, on the main thread
    context.status.change_node(lambda n: replace(n, state=NodeState.STARTING, running=None))
    workers.on_ended(old, WorkerDeath(old.pid, 143, None, None))
    assert context.status.node.state is NodeState.STARTING
    assert context.status.node.failure is None


def test_an_exiting_worker_reports_its_last_committed_step() -> None:
    """The committed step: a heartbeat may be older."""
    steps = iter((41, 42))

    def position() -> Heartbeat:
        return Heartbeat(generation=7, step=next(steps), phase="step", step_time_s=0.1)

    worlds = Worlds(
        abort=lambda: None,
        position=position,
        current_step=lambda: None,
    )
    assert position().step == 41
    sent: list[Message] = []
    worlds.attach(Agent(sent))
    worlds.close(clean=False, error="ValueError: boom")
    assert sent == [Exiting(clean=False, error="ValueError: boom", step=42)]


def test_a_death_after_the_current_start_is_a_failure_of_the_node() -> None:
    context = Context()
    workers = Workers(cast(NodeContext, context))
    worker = Worker(pid=1 << 22, local_rank=0, token=1)
    workers.on_message(
        worker, ClientHandshakeRequest(version=1, pid=worker.pid, local_rank=0, library="0.1.0")
    )
    workers.on_message(worker, Ready())
    workers.on_ended(worker, WorkerDeath(worker.pid, 1, None, None))
    assert context.status.node.state is NodeState.ARRIVED
    assert context.status.node.failure_exit_code == 1


@pytest.mark.parametrize(
    ("death_of", "is_replaced"),
    [(lambda worker: killed(worker), True), (lambda worker: failed(worker), False)],
    ids=["killed", "failed"],
)
def test_two_workers_that_die_in_succession_are_replaced(
    death_of: Callable[[Worker], WorkerDeath], is_replaced: bool
) -> None:
    """torchrun may see the second death first, and asks before the node's thread has decided."""
    context = Context()
    links: list[Links] = []

    def make_server(**callbacks: Any) -> Links:
        links.append(Links([], **callbacks))
        return links[-1]

    workers = Workers(cast(NodeContext, context), make_server=make_server)
    status = context.status
    status.can_replace = True
    status.change_node(lambda n: replace(n, nproc=3))
    three = [Worker(pid=(1 << 22) + n, local_rank=n, token=n) for n in range(3)]
    for worker in three:
        links[0].present.append(worker)
        workers.on_message(
            worker, ClientHandshakeRequest(version=1, pid=worker.pid, local_rank=0, library="0.1.0")
        )
        workers.on_message(worker, Ready())
    for dead in three[:2]:
        assert status.is_to_be_replaced(dead.pid) is None, "the node's thread decides"
        links[0].present.remove(dead)
        workers.on_ended(dead, WorkerDeath(dead.pid, None, 9, None))
        assert status.is_to_be_replaced(dead.pid) is True
    starting = replace(three[0], pid=three[2].pid + 1)
    assert status.is_to_be_replaced(starting.pid) is False, "it has not joined"
    links[0].present.append(starting)
    workers.on_message(
        starting, ClientHandshakeRequest(version=1, pid=starting.pid, local_rank=0, library="0.1.0")
    )
    assert status.is_to_be_replaced(starting.pid) is None, "the node's thread decides"
    links[0].present.remove(starting)
    workers.on_ended(starting, death_of(starting))
    assert status.is_to_be_replaced(starting.pid) is is_replaced
    assert status.node.state is NodeState.STARTING


def killed(worker: Worker) -> WorkerDeath:
    return WorkerDeath(worker.pid, None, 9, None)


def failed(worker: Worker) -> WorkerDeath:
    """By an error of its own: a replacement would fail, too."""
    return WorkerDeath(worker.pid, 1, None, None)


def test_events_are_sent_only_to_an_agent_that_requests_them() -> None:
    worlds = Worlds(
        abort=lambda: None,
        position=lambda: Heartbeat(generation=7, step=1, phase="step", step_time_s=0.1),
        current_step=lambda: None,
    )
    sent: list[Message] = []
    worlds.attach(Agent(sent))
    saved = CheckpointSaved(name="step-10", step=10, duration_s=3.0, stall_s=0.5, bytes=1000)
    worlds.count(saved)
    assert sent == []
    worlds.receive(CountEvents())
    worlds.count(saved)
    worlds.count(Waiting(reason="not counted"))
    assert sent == [saved]


@pytest.mark.parametrize("collects_worker_events", [False, True])
def test_an_agent_requests_events_only_if_it_has_metrics(
    collects_worker_events: bool,
) -> None:
    context = Context()
    metrics = NodeMetrics(context.clock, collects_worker_events=collects_worker_events)
    sent: list[Message] = []
    workers = Workers(cast(NodeContext, context), metrics=metrics, make_server=partial(Links, sent))
    worker = Worker(pid=1 << 22, local_rank=0, token=1)
    workers.on_message(
        worker, ClientHandshakeRequest(version=1, pid=worker.pid, local_rank=0, library="0.1.0")
    )
    assert (CountEvents() in sent) == collects_worker_events
    context.clock.advance(3)
    assert metrics.heartbeat_age_s == 3
    workers.on_ended(worker, WorkerDeath(worker.pid, 0, None, None))
    assert metrics.heartbeat_age_s is None


def test_a_step_has_begun_when_the_first_worker_reports_it() -> None:
    """In its current world; building a group does not count as a step."""
    context = Context()
    workers = Workers(cast(NodeContext, context))
    first, second = (Worker(pid=(1 << 22) + n, local_rank=n, token=n) for n in range(2))
    forming = Heartbeat(generation=7, step=0, phase="other", step_time_s=0.0)
    for worker, heartbeat, begun in (
        (first, forming, 0),
        (second, replace(forming, phase=IN_STEP), 0),
        (first, replace(forming, phase=IN_STEP), 7),
        (first, replace(forming, generation=8), 7),
        (first, replace(forming, generation=8, step_time_s=0.1), 8),
    ):
        workers.on_message(worker, heartbeat)
        assert context.status.stepping_generation == begun


def test_a_worker_that_builds_the_next_group_has_begun_no_step_there() -> None:
    """It still has the step time of its last world."""
    context = Context()
    workers = Workers(cast(NodeContext, context))
    worker = Worker(pid=1 << 22, local_rank=0, token=0)
    known = Heartbeat(generation=7, step=3, phase="other", step_time_s=0.1)
    workers.on_message(worker, Entered(generation=7, step=3))
    workers.on_message(worker, known)
    workers.on_message(worker, replace(known, generation=8))
    assert context.status.stepping_generation == 7
    workers.on_message(worker, Entered(generation=8, step=3))
    workers.on_message(worker, replace(known, generation=8))
    assert context.status.stepping_generation == 8


def test_a_node_whose_worker_cannot_be_ended_is_out_of_every_world_until_it_has() -> None:
    """It is blocked in the kernel: the others must neither wait for its end nor for its restart."""
    context = Context()
    workers = Workers(cast(NodeContext, context))
    worker = Worker(pid=1 << 22, local_rank=0, token=1)
    workers.on_message(
        worker, ClientHandshakeRequest(version=1, pid=worker.pid, local_rank=0, library="0.1.0")
    )
    workers.on_message(worker, Ready())
    context.status.change_node(lambda n: replace(n, running=world("n1", "n2")))
    context.status.stopping = True  # torchrun has sent SIGKILL and waits
    workers.is_hung(worker.pid, "rank 0 hangs in a checkpoint")
    workers.deaths.on_unkillable(worker.pid, "SIGKILL has had no effect")
    record = context.status.node
    assert (record.state, record.running, record.arrived_for) == (NodeState.FAILED, None, 7)
    assert record.failure == "hang: rank 0 hangs in a checkpoint; SIGKILL has had no effect"
    group = world("n1", "n2", mode="in-process")
    others = seen(node("n2", NodeState.READY, in_process=True, running=group))
    next_world = proposal(view(group, seen(replace(record, in_process=True)), others), policy=ALONE)
    assert named(next_world) == ["n2"]
    workers.on_ended(worker, WorkerDeath(worker.pid, None, 9, None))
    assert context.status.node.state is NodeState.FAILED, "torchrun restarts the workers now"


def ready(pid: int = 1 << 22) -> tuple[Context, Workers, Worker]:
    """The supervision of a node with a worker that trains."""
    context = Context()
    workers = Workers(cast(NodeContext, context))
    worker = Worker(pid=pid, local_rank=0, token=1)
    workers.on_message(
        worker, ClientHandshakeRequest(version=1, pid=pid, local_rank=0, library="0.1.0")
    )
    workers.on_message(worker, Ready())
    return context, workers, worker


def test_a_worker_that_announces_its_failure_is_excluded_before_it_has_ended() -> None:
    context, workers, worker = ready()
    group = world("n1", generation=3, mode="in-process")
    context.status.node = replace(context.status.node, running=group)
    notice = Exiting(clean=False, error="ValueError: boom", step=41, exit_code=7)
    workers.on_message(worker, notice)
    failed = context.status.node
    assert failed.state is NodeState.ARRIVED and failed.running is None
    assert (failed.failure, failed.failure_exit_code) == ("ValueError: boom", 7)
    assert (failed.failure_step, failed.ran_generation) == (41, 3)

    workers.on_message(worker, Ready())  # nothing that it sends counts any more
    workers.on_ended(worker, WorkerDeath(worker.pid, 1, None, notice))
    assert context.status.node == failed, "one failure, not two"


@pytest.mark.parametrize(
    ("has_trained", "error", "is_excluded"),
    [
        (True, "ValueError: boom", True),
        (True, "RuntimeError: Connection closed by peer [127.0.0.1]:4711", False),
        (False, "ValueError: boom", False),
    ],
)
def test_a_worker_without_retry_is_excluded_once_others_have_trained_with_it(
    has_trained: bool, error: str, is_excluded: bool
) -> None:
    """It never reports that it can change worlds. An exception leaves its loop, and with it the
    training, before it is announced."""
    context = Context()
    workers = Workers(cast(NodeContext, context))
    worker = Worker(pid=1 << 22, local_rank=0, token=1)
    workers.on_message(
        worker, ClientHandshakeRequest(version=1, pid=worker.pid, local_rank=0, library="0.1.0")
    )
    group = world("n1", "n2", generation=3, mode="restart")
    before = replace(context.status.node, state=NodeState.STARTING, running=group)
    context.status.node = before
    for value in (True, False) if has_trained else ():
        workers.on_message(worker, InTraining(value=value))
    workers.on_message(worker, Exiting(clean=False, error=error, exit_code=7))
    if not is_excluded:
        assert context.status.node == before, "torchrun restarts it"
        return
    failed = context.status.node
    assert failed.state is NodeState.ARRIVED and failed.running is None
    assert (failed.failure, failed.failure_exit_code) == (error, 7)


@pytest.mark.parametrize("state", [NodeState.LEAVING, NodeState.ARRIVED])
def test_an_announced_failure_counts_only_while_the_node_trains(state: NodeState) -> None:
    context, workers, worker = ready()
    context.status.change_node(lambda n: replace(n, state=state))
    before = context.status.node
    workers.on_message(worker, Exiting(clean=False, error="ValueError: boom"))
    assert context.status.node == before


def test_an_exception_that_the_script_handles_fails_only_with_its_exit_code() -> None:
    context, workers, worker = ready()
    notice = Exiting(clean=True, error="ValueError: pruned")
    workers.on_message(worker, notice)
    assert context.status.node.state is NodeState.READY
    workers.on_ended(worker, WorkerDeath(worker.pid, 0, None, notice))
    assert context.status.node.failure is None

    context, workers, worker = ready()
    workers.on_message(worker, notice)
    workers.on_ended(worker, WorkerDeath(worker.pid, 1, None, notice))
    assert context.status.node.failure == "ValueError: pruned"


def test_a_bare_exit_is_the_same_failure_whether_its_death_or_torchrun_is_first() -> None:
    """Failures are compared: one that torchrun reports has no text without an error file."""
    context, workers, worker = ready()
    workers.on_ended(worker, WorkerDeath(worker.pid, 1, None, None))
    node = context.status.node
    assert node.state is NodeState.ARRIVED
    assert (node.failure, node.failure_exit_code) == (None, 1)


def test_a_worker_that_exits_with_0_during_training_has_failed() -> None:
    """By os._exit(0): torchrun would count its node as finished, and the others wait for it."""
    context, workers, worker = ready()
    group = world("n1", "n2", generation=3, mode="in-process")
    context.status.node = replace(context.status.node, running=group)
    workers.on_message(worker, InTraining(value=True))
    assert context.status.has_failed_with_0(worker.pid) is None, "the link has not reported it"
    workers.on_ended(worker, WorkerDeath(worker.pid, 0, None, None))
    failed = context.status.node
    assert failed.state is NodeState.ARRIVED and failed.running is None
    assert failed.failure is not None and "exit code 0 during training" in failed.failure
    assert failed.failure_exit_code == 1
    assert context.status.has_failed_with_0(worker.pid) is True


@pytest.mark.parametrize(
    ("nodes", "is_in_training", "notice"),
    [
        (("n1", "n2"), False, None),  # os._exit(0) after training, as some libraries need it
        (("n1", "n2"), True, Exiting(clean=True, error="")),
        (("n1",), True, None),  # no other rank waits for it
    ],
)
def test_a_worker_that_exits_with_0_otherwise_has_finished(
    nodes: tuple[str, ...], is_in_training: bool, notice: Exiting | None
) -> None:
    context, workers, worker = ready()
    group = world(*nodes, generation=3, mode="in-process")
    context.status.node = replace(context.status.node, running=group)
    workers.on_message(worker, InTraining(value=True))
    workers.on_message(worker, InTraining(value=is_in_training))
    workers.on_ended(worker, WorkerDeath(worker.pid, 0, None, notice))
    assert context.status.node.failure is None
    assert context.status.has_failed_with_0(worker.pid) is False


def test_a_worker_announces_its_failure_once() -> None:
    sent: list[Message] = []
    at_step = Heartbeat(generation=7, step=5, phase="step", step_time_s=0.1)
    worlds = Worlds(abort=lambda: None, position=lambda: at_step, current_step=lambda: None)
    worlds.attach(Agent(sent))
    worlds.fail("ValueError: boom", 1)
    worlds.close(clean=False, error="ValueError: boom")
    assert sent == [Exiting(clean=False, error="ValueError: boom", step=5, exit_code=1)]


def test_a_node_publishes_the_last_world_that_it_ran_whatever_ended_its_workers() -> None:
    """Also after a restart without a failure: a leader learns from it who has trained on."""
    status, group = Context().status, world("n1", generation=3)
    status.change_node(lambda node: replace(node, state=NodeState.STARTING, running=group))
    status.change_node(lambda node: replace(node, state=NodeState.ARRIVED, running=None))
    status.change_node(lambda node: replace(node, state=NodeState.STARTING))
    assert (status.node.running, status.node.last_run) == (None, 3)
