"""The facts about a world, each defined once: the records of others contain or extend these."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar, cast

T = TypeVar("T")


class WorldState(str, Enum):
    """Whether the world trains."""

    ACTIVE = "active"
    PAUSED = "paused"  # fewer than min_nodes: agree, save, wait


class Cause(str, Enum):
    """Why a world was formed."""

    FIRST = "first"
    LOST = "lost"  # a member is gone
    LEFT = "left"  # a member was asked to leave
    FAILURE = "failure"  # a failure with everyone alive
    JOINED = "joined"  # joining nodes
    PAUSED = "paused"  # fewer than min_nodes are left
    RESUMED = "resumed"  # enough nodes again
    TAKEOVER = "takeover"  # every member of the last world is gone


@dataclass(frozen=True, kw_only=True)
class WorldIdentity:
    """Which of a job's worlds it is."""

    generation: int  # only grows over the life of a job
    nonce: str  # hex, the same on all ranks, fresh for every world
    lineage: tuple[int, ...]  # earlier generations, oldest first, at most 32


@dataclass(frozen=True, kw_only=True)
class WorldSpec(WorldIdentity):
    """What was agreed about a world, the same for all of its ranks."""

    store_host: str  # rank 0's
    store_port: int
    switch_at_step: int | None  # the first step in it; None: at once
    state: WorldState
    cause: Cause
    reason: str  # a sentence for people
    committed_step: int | None = None  # a floor: if set, a start from zero is refused
    # Ranks that hold the model once. Replica by replica: rank // replica_size is a rank's replica.
    replica_size: int = 1


def nodes_per_replica(replica_size: int, nproc: int) -> int:
    """How many nodes with ``nproc`` workers a replica takes; 1 where a node has whole ones.

    >>> nodes_per_replica(8, 2), nodes_per_replica(2, 8)
    (4, 1)
    """
    return max(1, replica_size // nproc) if nproc > 0 else 1


@dataclass(frozen=True, kw_only=True)
class ReplicaSeat:
    """A node's place in a replica that takes several nodes."""

    node_id: str
    start: str  # of its workers: those of another start have no part in that replica


@dataclass(frozen=True, kw_only=True)
class NodeReplica:
    """Nodes that hold the model together, in the order of ranks; fewer while it waits for some."""

    nonce: str
    seats: tuple[ReplicaSeat, ...]


@dataclass(frozen=True, kw_only=True)
class RankAssignment:
    """The place of one worker in a world."""

    rank: int
    size: int  # number of workers
    local_rank: int
    local_size: int


# Of workers that get ready for a world which does not exist yet.
NO_WORLD = WorldIdentity(generation=0, nonce="", lineage=())


def derive(cls: Callable[..., T], *sources: object, **given: object) -> T:
    """A ``cls`` whose fields are as ``given``, else those of the first source that has them.

    Raises TypeError for a field that is in neither and has no default.

    >>> derive(WorldIdentity, NO_WORLD, generation=3)
    WorldIdentity(generation=3, nonce='', lineage=())
    """
    values = dict(given)
    for name in (field.name for field in dataclasses.fields(cast(Any, cls))):
        for source in sources:
            if name not in values and hasattr(source, name):
                values[name] = getattr(source, name)
    return cls(**values)
