"""The world from one worker's point of view: its rank, the size, the generation."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field

from elastic.errors import ConfigError
from elastic.messages.environment import CALL_JOIN, identity_in, number_on_node
from elastic.messages.world import RankAssignment, WorldIdentity
from elastic.world.mesh import ReplicaMesh

# Set by torchrun with any backend, and needed by env://. Without them a process is a world of one.
_LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, kw_only=True)
class World(WorldIdentity, RankAssignment):
    """The ranks that train together in one generation.

    Attributes:
        generation: the number of this world; never decreases over the life of a job.
        rank: this worker's rank, from 0.
        size: the number of workers.
        local_rank: this worker's rank on its node.
        local_size: the number of workers on this node.
        nonce: hex, the same on all ranks, new for every world.
        lineage: earlier generations, oldest first.
        node: the name of this node, for people.
        is_launched: False for plain ``python train.py``, a world of one.
        mesh: the dimensions of a replica; without any, each rank is a replica.
    """

    node: str
    is_launched: bool
    mesh: ReplicaMesh = field(default_factory=ReplicaMesh)

    @property
    def replica(self) -> int:
        """The index of this rank's replica. A replica's ranks together hold one copy of the
        model."""
        return self.rank // self.mesh.size

    @property
    def replicas(self) -> int:
        """The number of replicas."""
        return self.size // self.mesh.size

    @property
    def rank_in_replica(self) -> int:
        """This rank's position in its replica, from 0; ranks at the same position hold the same
        shards."""
        return self.rank % self.mesh.size

    @property
    def data_rank(self) -> int:
        """The index of this rank's part of each global batch, from 0 to :attr:`data_size` - 1.

        Without a mesh it is the rank. The ranks of a tensor-parallel group, for example, share one.
        """
        own = self.mesh.data_position(self.rank_in_replica)
        return self.replica * self.mesh.data_size + own

    @property
    def data_size(self) -> int:
        """The number of parts into which each global batch is split."""
        return self.replicas * self.mesh.data_size


def is_launched(env: Mapping[str, str] = os.environ) -> bool:
    """Whether a launcher (torchrun) started this process as one of several.

    >>> is_launched({})
    False
    """
    present = [name for name in _LAUNCHED if env.get(name)]
    if not present or present == ["WORLD_SIZE"]:
        return False
    missing = [name for name in _LAUNCHED if name not in present]
    if missing and "RANK" in present:
        raise ConfigError(
            f"the environment has RANK={env['RANK']} but lacks {', '.join(missing)}",
            hint="start with torchrun, or unset RANK to train with one process",
        )
    return not missing


def joins_running_job(env: Mapping[str, str] = os.environ) -> bool:
    """Whether this process has no world yet, and will be given a place in one that trains.

    >>> joins_running_job({"MASTER_PORT": "29500"})
    False
    """
    return env.get("MASTER_PORT") == CALL_JOIN


def world_from_environment(env: Mapping[str, str] = os.environ) -> World:
    """Read the world from the environment; under another backend its nonce is still ``""``.

    With this library's backend the agent sets the world's identity. Under any other backend,
    torchrun's restart count replaces the generation, and the ranks agree on a nonce themselves.

    >>> world_from_environment({}).size
    1
    """
    launched = is_launched(env)
    identity = identity_in(env) or WorldIdentity(
        generation=_integer(env, "TORCHELASTIC_RESTART_COUNT", 0) + 1, nonce="", lineage=()
    )
    return World(
        generation=identity.generation,
        nonce=identity.nonce if launched else fresh_nonce(),
        lineage=identity.lineage,
        rank=_integer(env, "RANK", 0) if launched else 0,
        size=_integer(env, "WORLD_SIZE", 1) if launched else 1,
        local_size=_integer(env, "LOCAL_WORLD_SIZE", 1) if launched else 1,
        local_rank=(_integer(env, "LOCAL_RANK", 0) or number_on_node(env)) if launched else 0,
        node=node_name(env),
        is_launched=launched,
    )


def largest_world(env: Mapping[str, str] = os.environ) -> int:
    """The maximum number of workers of this job; the current number if the backend sets no maximum.

    >>> largest_world({"ELASTIC_MAX_NODES": "3", "LOCAL_WORLD_SIZE": "2"})
    6
    """
    nodes = _integer(env, "ELASTIC_MAX_NODES", 0)
    if nodes:
        return nodes * _integer(env, "LOCAL_WORLD_SIZE", 1)
    return _integer(env, "WORLD_SIZE", 1) if is_launched(env) else 1


def fresh_nonce() -> str:
    """Eight random hex digits."""
    return secrets.token_hex(4)


def node_name(env: Mapping[str, str] = os.environ) -> str:
    """This node's name for people: the agent's, else one made from torchrun's group rank."""
    if name := env.get("ELASTIC_NODE_NAME"):
        return name
    group = env.get("GROUP_RANK")
    return f"node-{group}" if group else "local"


def _integer(env: Mapping[str, str], name: str, default: int) -> int:
    text = env.get(name)
    if text is None:
        return default
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{name}={text!r} in the environment is not an integer") from None
