"""Which world comes next: PROTOCOL section 4 as a pure function.

``decide(view, now, policy)`` looks at everything the leader knows and returns the next world
with its cause in words, what it waits for and until when, or that the job is over. No clock,
no I/O, no randomness: equal arguments give equal answers.

All times are seconds on the caller's monotonic clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from elastic.coordination.records import (
    Cause,
    Done,
    Member,
    Node,
    Outcome,
    World,
    WorldState,
)


class Liveness(Enum):
    """What probing a node's liveness port said last."""

    ALIVE = "alive"  # it answers, or was not in question
    SUSPECT = "suspect"  # silent, or being probed: the lease will decide
    DEAD = "dead"  # refused, or its host says the process is gone: proof


@dataclass(frozen=True, kw_only=True)
class NodeView:
    """A node whose key exists."""

    node: Node
    liveness: Liveness = Liveness.ALIVE
    state_since_s: float  # when the leader first saw it in its present state


@dataclass(frozen=True, kw_only=True)
class MissingMember:
    """A member of the current world whose key is gone: its lease is over."""

    member: Member
    proved_dead: bool  # refused, or its host says so; False: silent
    last_sign_s: float  # the last answer, key or event from it


@dataclass(frozen=True, kw_only=True)
class View:
    """Everything the leader knows, at one moment."""

    world: World | None
    world_since_s: float  # when the leader first saw this generation
    nodes: tuple[NodeView, ...]  # every node key, members and others, any order
    missing: tuple[MissingMember, ...]  # members of `world` without a node key
    done: Done | None = None
    cooling: Mapping[str, float] = field(default_factory=dict)  # node_id or name -> until


@dataclass(frozen=True, kw_only=True)
class Policy:
    """The rules' numbers. The first node of a job sets min and max; others must agree."""

    min_nodes: int
    max_nodes: int
    last_call_s: float = 3.0
    join_window_s: float = 1.0
    join_timeout_s: float = 600.0
    takeover_s: float = 300.0


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """The next world: its nodes in rank order."""

    nodes: tuple[Node, ...]
    state: WorldState
    mode: str  # "restart" | "in-process"
    cause: Cause
    reason: str
    planned: bool = False  # switch at a step boundary (in-process joins and leaves)


@dataclass(frozen=True, kw_only=True)
class Wait:
    """Nothing to do before ``until_s`` (None: before something changes)."""

    reason: str
    until_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class End:
    """The job is over."""

    outcome: Outcome
    reason: str
    exit_code: int


Decision = Proposal | Wait | End


def decide(view: View, now: float, policy: Policy) -> Decision:
    """The next world, or what is waited for."""
    raise AssertionError("being written")
