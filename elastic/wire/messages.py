"""What agents, workers and the records in etcd say about a world, and a worker's environment."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from elastic.errors import ConfigError

# ----------------------------------------------------------------------------
# What identifies a world, in each of its three forms: ``WorldRecord`` in etcd
# (membership/records.py), ``Assignment``, which a worker receives (link/link.py), and the public
# ``World`` (groups/world.py).


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
    UNFINISHED = "unfinished"  # a node failed or was lost in the script's end: it is run again


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


def nodes_per_replica(replica_size: int, nproc: int) -> int:
    """The number of nodes with ``nproc`` workers that a replica spans; 1 if it fits on a node.

    >>> nodes_per_replica(8, 2), nodes_per_replica(2, 8)
    (4, 1)
    """
    return max(1, replica_size // nproc) if nproc > 0 else 1


@dataclass(frozen=True, kw_only=True)
class ReplicaSlot:
    """A node's place in a replica that spans several nodes."""

    node_id: str
    start: str  # of its workers: those of another start are not in the replica


@dataclass(frozen=True, kw_only=True)
class NodeReplica:
    """Nodes that together hold one copy of the model, in the order of their ranks.

    Incomplete while the replica waits for nodes.
    """

    nonce: str
    slots: tuple[ReplicaSlot, ...]


@dataclass(frozen=True, kw_only=True)
class MemoryLocation:
    """Where a node serves its memory for checkpoints."""

    node_id: str
    name: str
    host: str
    port: int


# For workers that start before their first world exists.
NO_WORLD = WorldIdentity(generation=0, nonce="", lineage=())


# ----------------------------------------------------------------------------
# The environment of a worker: at its start, and after each change of worlds.
#
# torchrun sets its own variables; ``ELASTIC_WORLD`` holds further facts about the world as JSON. A
# script may read both.

WORLD_VARIABLE = "ELASTIC_WORLD"
# MASTER_PORT before a worker has a world: a script that builds a group shows it in its error.
CALL_JOIN = "call elastic.join()"


def identity_variable(world: WorldIdentity) -> dict[str, str]:
    """The variable that the agent adds to the environment that torchrun creates.

    >>> identity_variable(WorldIdentity(generation=3, nonce="3f9c", lineage=(1, 2)))
    {'ELASTIC_WORLD': '{"generation":3,"nonce":"3f9c","lineage":[1,2]}'}
    """
    fields = {"generation": world.generation, "nonce": world.nonce, "lineage": world.lineage}
    return {WORLD_VARIABLE: json.dumps(fields, separators=(",", ":"))}


def world_variables(
    world: WorldIdentity,
    *,
    rank: int,
    size: int,
    local_size: int,
    node_rank: int,
    nodes: int,
    store_host: str,
    store_port: int | str,
) -> dict[str, str]:
    """The environment variables of a world, as if torchrun had started this worker in it.

    Without LOCAL_RANK, which a worker keeps for its life (:func:`number_on_node`).
    """
    standard: dict[str, object] = {
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": local_size,
        "GROUP_RANK": node_rank,
        "GROUP_WORLD_SIZE": nodes,
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": size,
        "MASTER_ADDR": store_host,
        "MASTER_PORT": store_port,
    }
    return {name: str(value) for name, value in standard.items()} | identity_variable(world)


def number_on_node(env: Mapping[str, str]) -> int:
    """The worker's number among those of its node, by which its agent identifies it.

    That is LOCAL_RANK, except with torchrun's ``--virtual-local-rank``: there LOCAL_RANK is 0 for
    all of them, and each sees only its own GPU. But torchrun puts the error file of each into a
    folder with its number (torch 2.13, elastic/multiprocessing/api.py, ``LogsSpecs.reify``).

    >>> number_on_node({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"})
    1
    >>> virtual = {"LOCAL_RANK": "0", "TORCHELASTIC_ERROR_FILE": "/tmp/attempt_0/1/error.json"}
    >>> number_on_node({**virtual, "LOCAL_WORLD_SIZE": "2"})
    1
    """
    local_rank, local_size = int(env.get("LOCAL_RANK", 0)), int(env.get("LOCAL_WORLD_SIZE", 1))
    if local_rank or local_size == 1:
        return local_rank
    folder = os.path.basename(os.path.dirname(env.get("TORCHELASTIC_ERROR_FILE", "")))
    return int(folder) if folder.isdecimal() and int(folder) < local_size else local_rank


def identity_in(env: Mapping[str, str]) -> WorldIdentity | None:
    """The world that the agent has set; None under another rendezvous backend.

    Raises:
        ConfigError: the variable's value is not a world's identity.

    >>> identity_in(identity_variable(WorldIdentity(generation=3, nonce="3f9c", lineage=(1, 2))))
    WorldIdentity(generation=3, nonce='3f9c', lineage=(1, 2))
    """
    text = env.get(WORLD_VARIABLE)
    return _parsed(text) if text is not None else None


@functools.lru_cache(maxsize=1)  # every log line needs it
def _parsed(text: str) -> WorldIdentity:
    from elastic.wire import typed_json  # lazy: processes that only write need no msgspec

    try:
        data = typed_json.parse(text.encode(errors="surrogateescape"))
        return typed_json.convert(WorldIdentity, data)
    except typed_json.DecodeError as error:
        raise ConfigError(
            f"{WORLD_VARIABLE}={text[:200]!r} in the environment {error}",
            hint="the agent sets it; unset it to train alone",
        ) from None
