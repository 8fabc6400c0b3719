"""Events of membership: joining and leaving nodes, the leader, worlds, the end of the job."""

from __future__ import annotations

from dataclasses import dataclass

from elastic.events.base import Event


@dataclass(frozen=True, kw_only=True)
class NodeArrived(Event):
    """This node waits for a world. ``failure`` and ``exit_code`` are those of the worker whose
    failure is the reason."""

    after_generation: int  # the generation that its workers have left; 0: none
    failure: str | None  # of its workers; null: none
    exit_code: int | None  # theirs


@dataclass(frozen=True, kw_only=True)
class WorldFormed(Event):
    """A world was agreed."""

    generation: int  # of the new world
    nodes: tuple[str, ...]  # names, in the order of ranks
    size: int  # number of workers
    state: str  # "active", or "paused" with too few nodes
    mode: str  # "restart" or "in-process": how workers enter it
    cause: str  # first, lost, left, failure, joined, paused, resumed or takeover
    reason: str  # a sentence


@dataclass(frozen=True, kw_only=True)
class WorldEntered(Event):
    """This node passes the world to its workers."""

    generation: int  # of the world
    first_rank: int  # global rank of this node's local rank 0
    size: int  # number of workers in the world
    waited_s: float  # since this node arrived


@dataclass(frozen=True, kw_only=True)
class Waiting(Event):
    """The leader waits before it forms the next world."""

    reason: str  # what it waits for, a sentence


@dataclass(frozen=True, kw_only=True)
class LeaderChanged(Event):
    """The job has another leader, or none."""

    leader: str | None  # node id; null: none


@dataclass(frozen=True, kw_only=True)
class NodeSuspected(Event):
    """A member may be dead."""

    suspect: str  # name of the member
    reason: str  # the evidence


@dataclass(frozen=True, kw_only=True)
class NodeLost(Event):
    """A member is lost."""

    lost: str  # name of the member
    reason: str  # the proof


@dataclass(frozen=True, kw_only=True)
class NodeFound(Event):
    """A node that was considered dead responds."""

    found: str  # name of the node
    reason: str  # how it was detected


@dataclass(frozen=True, kw_only=True)
class NodeLeaving(Event):
    """This node was asked to leave."""

    reason: str  # the origin of the request


@dataclass(frozen=True, kw_only=True)
class FailureJudged(Event):
    """The leader's verdict on the failure that broke a world, and the evidence."""

    generation: int  # of the world that broke
    failed: str  # the node's name
    action: str  # restart, exclude-node or stop
    rule: str  # its name: docs/reference/failures.md
    confidence: str  # in the verdict
    reason: str  # a sentence
    evidence: str  # the text that the rule has matched


@dataclass(frozen=True, kw_only=True)
class JobEnded(Event):
    """The job has ended."""

    outcome: str  # "success" or "failure"
    reason: str  # a sentence
    exit_code: int  # the job's


@dataclass(frozen=True, kw_only=True)
class FailureTimelineWritten(Event):
    """The job has failed: a page with its failures, their times, and the actions taken."""

    timeline: str  # the page
    report: str  # the path of the same page; "": it could not be written
    problem: str  # why not


@dataclass(frozen=True, kw_only=True)
class NodeParked(Event):
    """The job has ended; this agent keeps running without workers until SIGTERM."""

    outcome: str  # "success" or "failure"
    exit_code: int  # the job's
    reason: str  # how the job ended
