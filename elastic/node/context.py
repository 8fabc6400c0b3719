"""The objects shared by the parts of a node's thread: its store, rules, status and clock."""

from __future__ import annotations

import queue
from dataclasses import dataclass, field, replace

from elastic.clock import SYSTEM_CLOCK, Clock
from elastic.failures.kernel_log import KernelLog
from elastic.membership.records import Keys, Node
from elastic.node.run_secret import RunSecret
from elastic.node.status import NodeStatus
from elastic.secure_channel.tls import Tls
from elastic.store.keyvalue import KeyValue
from elastic.telemetry.journal import EventSink
from elastic.tuning.agent_options import AgentOptions


class Inbox:
    """Messages for a node's thread."""

    def __init__(self) -> None:
        self._messages: queue.SimpleQueue[object] = queue.SimpleQueue()

    def put(self, message: object) -> None:
        """Add a message, from any thread or signal handler."""
        self._messages.put(message)

    def take(self, timeout_s: float) -> list[object]:
        """Take all messages; blocks until there is one or ``timeout_s`` has passed. On the node's
        thread."""
        messages: list[object] = []
        try:
            messages.append(self._messages.get(timeout=timeout_s))
            while True:
                messages.append(self._messages.get_nowait())
        except queue.Empty:
            return messages


@dataclass(frozen=True, kw_only=True)
class NodeContext:
    """Created once per node, by :meth:`of`."""

    store: KeyValue
    keys: Keys
    secret: RunSecret
    options: AgentOptions
    status: NodeStatus
    journal: EventSink
    clock: Clock = SYSTEM_CLOCK
    tls: Tls | None = None  # between nodes
    inbox: Inbox = field(default_factory=Inbox)
    kernel_log: KernelLog = field(default_factory=KernelLog)  # closed by the service

    @classmethod
    def of(
        cls,
        node: Node,
        *,
        store: KeyValue,
        keys: Keys,
        secret: RunSecret,
        options: AgentOptions,
        journal: EventSink,
        clock: Clock = SYSTEM_CLOCK,
        tls: Tls | None = None,
    ) -> NodeContext:
        """The context of a node that starts."""
        node = replace(node, tls=tls is not None)  # so that all nodes can check compatibility
        return cls(
            store=store,
            keys=keys,
            secret=secret,
            options=options,
            status=NodeStatus(node, keys, clock.monotonic()),
            journal=journal,
            clock=clock,
            tls=tls,
        )

    def post(self, message: object) -> None:
        """Put a message into the node's inbox, from any thread or signal handler."""
        self.inbox.put(message)
