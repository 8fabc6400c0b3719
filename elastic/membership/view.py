"""The leader's view, and its possible decisions: the arguments and results of ``decide``.

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
    WorldReference,
    WorldState,
)
from elastic.tuning.agent_intervals import CUT_OFF_S, FAILURE_SETTLE_S, ORIGIN_SETTLE_S, SUSPECT_S
from elastic.tuning.agent_options import AgentOptions
from elastic.tuning.timeouts import Timeouts


class Liveness(Enum):
    """The last result of probing a node's liveness port."""

    ALIVE = "alive"  # it responds, or was never suspected
    SUSPECT = "suspect"  # silent, or being probed: the lease will decide
    DEAD = "dead"  # refused, or its host reports the process as ended: proof


@dataclass(frozen=True, kw_only=True)
class NodeView:
    """A node whose key exists."""

    node: Node
    liveness: Liveness = Liveness.ALIVE
    state_since_s: float  # when the leader first saw it in its current state
    suspect_since_s: float | None = None  # when it became SUSPECT; None: not, or not known


@dataclass(frozen=True, kw_only=True)
class MissingMember:
    """A member of the current world whose key is missing: its lease has expired."""

    member: Member
    proved_dead: bool  # refused, or its host reports so; False: silent
    last_sign_s: float  # the last answer, key or event from it
    finished: bool = False  # the last state it was seen in was FINISHED
    is_known: bool = True  # False: this leader has never seen its key, and knows no more of it
    running: WorldReference | None = None  # the world that its workers ran when it was seen last
    is_overdue: bool = False  # its key exists, but it has been silent for too long


@dataclass(frozen=True, kw_only=True)
class View:
    """All data of the leader at one moment."""

    world: WorldRecord | None
    world_since_s: float  # when the leader first saw this generation
    nodes: tuple[NodeView, ...]  # every node key, members and others, any order
    missing: tuple[MissingMember, ...]  # members of `world` without a node key
    done: Done | None = None
    quarantined: Mapping[str, float] = field(default_factory=dict)  # node_id or name -> until
    quarantine_reasons: Mapping[str, str] = field(default_factory=dict)  # node_id -> in words
    failure_reports: tuple[FailureReport, ...] = ()  # of running workers (in-process mode)
    # Node ids of stragglers, and why; only if they may be excluded.
    stragglers: Mapping[str, str] = field(default_factory=dict)
    failing_since_s: float | None = None  # when the leader saw the first report of this world
    # The next attempt of the same members, after several of whose groups none could be built.
    retry_at_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Policy:
    """The parameters of the rules.

    ``min_nodes`` and ``max_nodes`` are the leader's own. The job uses those of its first node,
    which are part of every world: a leader with different ones is refused, too.
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
    leave_grace_s: float = Timeouts.leave_grace_s

    @property
    def leave_s(self) -> float:
        """The longest time that nodes are waited for whose workers leave or are ended. Their agents
        kill them after ``leave_grace_s``; if an agent is frozen, their permission to train has
        expired by ``takeover_s``."""
        return self.takeover_s + self.leave_grace_s

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
            leave_grace_s=options.leave_grace_s,
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
    outside: tuple[Node, ...] = ()  # other nodes: their memory may hold the job's newest state
    left_in_order: bool = False  # without nodes: all members of the last world were asked to leave


@dataclass(frozen=True, kw_only=True)
class Wait:
    """Nothing to do before ``until_s`` (None: before something changes)."""

    reason: str
    until_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class End:
    """The job has ended."""

    outcome: Outcome
    reason: str
    exit_code: int


Decision = Proposal | Wait | End
