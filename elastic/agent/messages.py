"""The messages in the node's inbox, except those of a leader (leadership/)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from elastic.membership.records import Node
from elastic.node.context import NodeContext
from elastic.store.keyvalue import WatchEvent


@dataclass(frozen=True)
class BaseEvent:
    """Something changed under ``leader``, ``world`` or ``done``."""

    event: WatchEvent


@dataclass(frozen=True)
class LeaseEnded:
    """The lease no longer exists, according to the store."""


@dataclass(frozen=True)
class ConnectionOpened:
    """The node at the other end of a liveness connection has been identified."""

    node_id: str
    is_leader: bool


@dataclass(frozen=True)
class ConnectionClosed:
    """A liveness connection with a named peer closed."""

    node_id: str
    was_leader: bool
    fell_silent: bool = False  # not closed: nothing arrived from the peer's machine


@dataclass(frozen=True)
class ConnectionDropped:
    """This node closed its connection to a former leader."""

    node_id: str


@dataclass(frozen=True)
class PushedWorld:
    """The leader sent its new world, ahead of the store's watch."""

    record: bytes


@dataclass(frozen=True)
class WorkersStart:
    """torchrun is about to restart this node's workers."""


@dataclass(frozen=True)
class ReplacementEnded:
    """A process in the place of a dead worker has ended without having connected to the link."""

    pid: int
    local_rank: int
    exit_code: int  # negative: a signal


@dataclass(frozen=True)
class ChangeNode:
    """The main thread changes the node's record."""

    change: Callable[[Node], Node]


@dataclass(frozen=True)
class Close:
    """Close gracefully."""


def publish_change(context: NodeContext, change: Callable[[Node], Node]) -> None:
    """Change the node's record at once, visible to the calling thread, and have it published."""
    context.status.change_node(change)
    context.post(ChangeNode(lambda node: node))
