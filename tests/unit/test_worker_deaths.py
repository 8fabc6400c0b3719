"""What a node makes of the deaths of its workers, whenever it hears of them."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import cast

from membership_nodes import node

from elastic.agent.workers import Workers
from elastic.clock import ManualClock
from elastic.events import Event
from elastic.link.client import LinkClient
from elastic.link.protocol import Bye, Heartbeat, Hello, Message, Ready
from elastic.link.server import Worker, WorkerDeath
from elastic.membership.records import Keys, NodeState
from elastic.node.context import NodeContext
from elastic.node.status import NodeStatus
from elastic.worker.worlds import Worlds


class Silent:
    def emit(self, event: Event, *, level: int = 0) -> None:
        pass


class Context:
    """Of a node without a thread: its messages are handled where the test says so."""

    def __init__(self) -> None:
        record = replace(node("n1", NodeState.READY, in_process=True), nproc=1)
        self.status = NodeStatus(record, Keys.of("/elastic", "job"), 0.0)
        self.clock, self.journal = ManualClock(), Silent()

    def post(self, message: object) -> None:
        pass


def test_a_death_that_is_heard_of_after_the_next_start_is_not_one_of_it() -> None:
    """torchrun has ended the worker and is starting another; the node's thread was busy."""
    context = Context()
    workers = Workers(cast(NodeContext, context))
    old = Worker(pid=1 << 22, local_rank=0, token=1)
    workers.on_said(old, Hello(version=1, pid=old.pid, local_rank=0, library="0.1.0"))
    workers.on_said(old, Ready())
    workers._ready.add(old.pid)

    context.status.starts += 1  # as NodeService.warm_up does, on the main thread
    context.status.change_node(lambda n: replace(n, state=NodeState.STARTING, running=None))
    workers.on_ended(old, WorkerDeath(old.pid, 143, None, None))
    assert context.status.node.state is NodeState.STARTING
    assert context.status.node.failure is None


def test_the_last_words_of_a_worker_say_at_which_step() -> None:
    """As it has committed them: a heartbeat may be older."""
    steps = iter((41, 42))
    worlds = Worlds(
        abort=lambda: None,
        position=lambda: Heartbeat(generation=7, step=next(steps), phase="step", step_time_s=0.1),
        current_step=lambda: None,
    )
    assert worlds._position().step == 41
    said: list[Message] = []
    worlds._client = cast(LinkClient, SimpleNamespace(send=said.append, close=lambda: None))
    worlds.close(clean=False, error="ValueError: boom")
    assert said == [Bye(clean=False, error="ValueError: boom", step=42)]


def test_a_death_in_the_present_start_is_the_nodes() -> None:
    context = Context()
    workers = Workers(cast(NodeContext, context))
    worker = Worker(pid=1 << 22, local_rank=0, token=1)
    workers.on_said(worker, Hello(version=1, pid=worker.pid, local_rank=0, library="0.1.0"))
    workers.on_said(worker, Ready())
    workers._ready.add(worker.pid)
    workers.on_ended(worker, WorkerDeath(worker.pid, 1, None, None))
    assert context.status.node.state is NodeState.ARRIVED
    assert context.status.node.failure_exit_code == 1
