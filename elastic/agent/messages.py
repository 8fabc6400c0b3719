"""What arrives in the node's inbox, besides a leader's own (leadership/)."""

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
    """The store says the lease does not exist any more."""


@dataclass(frozen=True)
class ConnectionOpened:
    """A liveness connection has shown who is at its other end."""

    node_id: str
    is_leader: bool


@dataclass(frozen=True)
class ConnectionClosed:
    """A liveness connection with a named peer closed."""

    node_id: str
    was_leader: bool
    fell_silent: bool = False  # nobody closed it: nothing came from the peer's machine


@dataclass(frozen=True)
class ConnectionDropped:
    """This node closed its connection to a former leader."""

    node_id: str


@dataclass(frozen=True)
class PushedWorld:
    """The leader sent the world it has written, ahead of the store's watch."""

    record: bytes


@dataclass(frozen=True)
class WorkersStart:
    """torchrun is about to start this node's workers anew."""


@dataclass(frozen=True)
class ChangeNode:
    """The main thread changes the node's record."""

    change: Callable[[Node], Node]


@dataclass(frozen=True)
class Close:
    """End in order."""


def publish_change(context: NodeContext, change: Callable[[Node], Node]) -> None:
    """Change the node's record at once, for the calling thread to see, and have it published."""
    context.status.change_node(change)
    context.post(ChangeNode(lambda node: node))
