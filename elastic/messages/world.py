"""The facts about a world, each defined once: other records contain or extend these."""

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
    LOST = "lost"  # a member is lost
    LEFT = "left"  # a member was asked to leave
    FAILURE = "failure"  # a failure with all members alive
    JOINED = "joined"  # joining nodes
    PAUSED = "paused"  # fewer than min_nodes remain
    RESUMED = "resumed"  # enough nodes again
    TAKEOVER = "takeover"  # every member of the last world is lost


@dataclass(frozen=True, kw_only=True)
class WorldReference:
    """Names one of a job's worlds. Two leaders may have proposed the same generation, so the nonce
    is part of it."""

    generation: int  # never decreases over the life of a job
    nonce: str  # hex, the same on all ranks, new for every world


@dataclass(frozen=True, kw_only=True)
class WorldIdentity(WorldReference):
    """Identifies one of a job's worlds, and those before it."""

    lineage: tuple[int, ...]  # earlier generations, oldest first, at most 32


@dataclass(frozen=True, kw_only=True)
class WorldSpec(WorldIdentity):
    """The agreed properties of a world, the same for all of its ranks."""

    store_host: str  # rank 0's
    store_port: int
    switch_at_step: int | None  # the first step in this world; None: switch at once
    state: WorldState
    cause: Cause
    reason: str  # a sentence for users
    committed_step: int | None = None  # a lower bound: if set, training must not start from zero
    # Ranks that together hold one copy of the model: consecutive ones, so that a rank's replica is
    # rank // replica_size.
    replica_size: int = 1


def nodes_per_replica(replica_size: int, nproc: int) -> int:
    """The number of nodes with ``nproc`` workers that a replica spans; 1 if it fits on a node.

    >>> nodes_per_replica(8, 2), nodes_per_replica(2, 8)
    (4, 1)
    """
    return max(1, replica_size // nproc) if nproc > 0 else 1


@dataclass(frozen=True, kw_only=True)
class ReplicaSeat:
    """A node's place in a replica that spans several nodes."""

    node_id: str
    start: str  # of its workers: those of another start are not in the replica


@dataclass(frozen=True, kw_only=True)
class NodeReplica:
    """Nodes that together hold one copy of the model, in the order of their ranks.

    Incomplete while the replica waits for nodes.
    """

    nonce: str
    seats: tuple[ReplicaSeat, ...]


@dataclass(frozen=True, kw_only=True)
class MemoryLocation:
    """Where a node serves its memory for checkpoints."""

    node_id: str
    name: str
    host: str
    port: int


@dataclass(frozen=True, kw_only=True)
class RankAssignment:
    """The ranks of one worker in a world."""

    rank: int
    size: int  # number of workers
    local_rank: int
    local_size: int


# For workers that start before their first world exists.
NO_WORLD = WorldIdentity(generation=0, nonce="", lineage=())


def derive(cls: Callable[..., T], *sources: object, **given: object) -> T:
    """Build a ``cls`` with the fields ``given``, else those of the first source that has them.

    Raises TypeError if neither has a field that has no default.

    >>> derive(WorldIdentity, NO_WORLD, generation=3)
    WorldIdentity(generation=3, nonce='', lineage=())
    """
    values = dict(given)
    for name in (field.name for field in dataclasses.fields(cast(Any, cls))):
        for source in sources:
            if name not in values and hasattr(source, name):
                values[name] = getattr(source, name)
    return cls(**values)
