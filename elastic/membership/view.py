"""What the leader knows, and what it can decide: the arguments and answers of ``decide``.

All times are seconds on the caller's monotonic clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from elastic.membership.records import (
    Cause,
    Done,
    FailureReport,
    Member,
    Node,
    Outcome,
    WorldRecord,
    WorldState,
)
from elastic.tuning.agent_intervals import CUT_OFF_S, FAILURE_SETTLE_S, ORIGIN_SETTLE_S, SUSPECT_S
from elastic.tuning.agent_options import AgentOptions
from elastic.tuning.timeouts import Timeouts


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
    suspect_since_s: float | None = None  # when it became SUSPECT; None: not, or not known


@dataclass(frozen=True, kw_only=True)
class MissingMember:
    """A member of the current world whose key is gone: its lease is over."""

    member: Member
    proved_dead: bool  # refused, or its host says so; False: silent
    last_sign_s: float  # the last answer, key or event from it
    finished: bool = False  # the last state it was seen in was FINISHED
    running: WorldRecord | None = None  # the world that its workers ran when it was seen last


@dataclass(frozen=True, kw_only=True)
class View:
    """Everything the leader knows, at one moment."""

    world: WorldRecord | None
    world_since_s: float  # when the leader first saw this generation
    nodes: tuple[NodeView, ...]  # every node key, members and others, any order
    missing: tuple[MissingMember, ...]  # members of `world` without a node key
    done: Done | None = None
    quarantined: Mapping[str, float] = field(default_factory=dict)  # node_id or name -> until
    failure_reports: tuple[FailureReport, ...] = ()  # of running workers (in-process mode)
    # Node ids whose ranks are slower than the others, and why; only where they may be left out.
    stragglers: Mapping[str, str] = field(default_factory=dict)
    failing_since_s: float | None = None  # when the leader saw the first report of this world


@dataclass(frozen=True, kw_only=True)
class Policy:
    """The rules' numbers.

    ``min_nodes`` and ``max_nodes`` are the leader's own. A job goes by those of its first node,
    which stand in every world: a leader that disagrees is itself refused.
    """

    min_nodes: int
    max_nodes: int
    last_call_s: float = Timeouts.last_call_s
    join_window_s: float = Timeouts.join_window_s
    join_timeout_s: float = Timeouts.join_timeout_s
    takeover_s: float = Timeouts.takeover_s
    failure_settle_s: float = FAILURE_SETTLE_S
    origin_settle_s: float = ORIGIN_SETTLE_S
    suspect_s: float = SUSPECT_S
    cut_off_s: float = CUT_OFF_S

    @classmethod
    def of(cls, node: Node, options: AgentOptions) -> Policy:
        """The rules of a job that ``node`` leads."""
        return cls(
            min_nodes=node.min_nodes,
            max_nodes=node.max_nodes,
            last_call_s=options.last_call_s,
            join_window_s=options.join_window_s,
            join_timeout_s=options.join_timeout_s,
            takeover_s=options.takeover_s,
        )


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """The next world: its nodes in rank order."""

    generation: int  # larger than any that a node or the store has seen
    nodes: tuple[Node, ...]
    state: WorldState
    mode: str  # "restart" | "in-process"
    cause: Cause
    reason: str
    min_nodes: int  # the job's, from its first node
    max_nodes: int
    library: str  # the job's version of this library
    tls: bool = False  # the job's nodes connect with TLS
    replica_size: int = 1  # ranks that hold the model once
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
