"""What the parts of a node's thread work with: its store, its rules, its board, its clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from elastic.clock import Clock
from elastic.membership.decision import Policy
from elastic.membership.records import Keys
from elastic.node.run_secret import RunSecret
from elastic.node.status import NodeStatus
from elastic.secure_channel.tls import Tls
from elastic.store.keyvalue import KeyValue
from elastic.telemetry.journal import EventSink
from elastic.tuning.agent_options import AgentOptions


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
