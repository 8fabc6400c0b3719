"""What the parts of a node's thread work with: its store, its rules, its board, its clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from elastic.agent.node_status import NodeStatus
from elastic.clock import Clock
from elastic.config import AgentOptions
from elastic.coordination.keyvalue import KeyValue
from elastic.coordination.membership import Policy
from elastic.coordination.records import Keys
from elastic.coordination.run_secret import RunSecret
from elastic.secure_channel.tls import Tls
from elastic.telemetry.journal import EventSink


@dataclass(frozen=True, kw_only=True)
class NodeContext:
    """Made once per node. ``post`` puts a message into the node's inbox, from any thread."""

    store: KeyValue
    keys: Keys
    secret: RunSecret
    options: AgentOptions
    policy: Policy
    status: NodeStatus
    clock: Clock
    journal: EventSink
    post: Callable[[object], None]
    tls: Tls | None = None  # between nodes
