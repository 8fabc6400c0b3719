"""A worker's world: rank, size, generation and mesh."""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from elastic.errors import ConfigError
from elastic.wire.messages import (
    NO_WORLD,
    WorldIdentity,
    identity_in,
    number_on_node,
)

# ----------------------------------------------------------------------------
# The dimensions of a replica: the ranks that together hold one copy of the model.
#
# A world consists of replicas; the mesh names the dimensions inside one. This module decides which
# dimensions split the batch, for the sampler, the loaders and the random numbers of steps.

# Tensor, pipeline, context and expert parallelism: their ranks see the same samples.
_SAME_SAMPLES = ("tp", "pp", "cp", "ep")
STAGES = "pp"  # along it, ranks hold different stages of the model: other parameters
EXPERTS = "ep"  # along it, ranks hold different experts, and all other parameters whole
_KNOWN = "shard, dp*, tp, pp, cp, ep"


@dataclass(frozen=True)
class StagePlace:
    """The pipeline stage that a rank holds. The stages that an interleaved schedule gives one rank
    count as one."""

    index: int
    count: int
    ranks: tuple[int, ...]  # of the replica, that hold it

    @property
    def key(self) -> str:
        """The key of its state in a checkpoint."""
        return f"{STAGES}={self.index}"


def check_saved_stages(keys: Collection[str], stage: StagePlace | None, source: str) -> None:
    """Raise ConfigError unless a checkpoint with these top-level keys has this job's stages."""
    saved = sum(key.startswith(f"{STAGES}=") for key in keys) or 1
    here = stage.count if stage is not None else 1
    if saved != here:
        raise ConfigError(
            f"{source} has {_stages(saved)}, and this job {_stages(here)}: each stage has "
            "parameters of its own, so a checkpoint loads only at the number that saved it",
            hint=f'elastic.join(mesh={{"{STAGES}": {saved}, …}}), or another checkpoint folder'
            if saved > 1
            else f"elastic.join(mesh=…) without {STAGES!r}, or another checkpoint folder",
        )


def _stages(count: int) -> str:
    return f"{count} pipeline stages" if count > 1 else "no pipeline stages"


@dataclass(frozen=True)
class ReplicaMesh:
    """The dimensions of a replica in order, the last one varying fastest. Without any, each rank is
    a replica."""

    dims: tuple[tuple[str, int], ...] = ()

    @classmethod
    def parse(cls, given: Mapping[str, int] | None) -> ReplicaMesh:
        """Parse the argument of ``elastic.join(mesh=…)``.

        Raises ConfigError for an unknown name or an invalid size.

        >>> ReplicaMesh.parse({"shard": 4, "tp": 2}).size
        8
        """
        if given is None:
            return cls()
        if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
            raise ConfigError(
                f"mesh={given!r} is not a dict of dimensions and their sizes",
                hint='elastic.join(mesh={"shard": 4}): the dimensions of one replica',
            )
        if not given:
            raise ConfigError(
                "mesh={} names no dimension",
                hint='elastic.join(mesh={"shard": 4}); without mesh, each rank is a replica',
            )
        for name, size in given.items():
            if not (_splits_batch(name) or name in _SAME_SAMPLES):
                raise ConfigError(
                    f"mesh={dict(given)} has an unknown dimension {name!r}: do its ranks see the "
                    "same samples?",
                    hint=f"known dimensions: {_KNOWN}; shard and dp* split the batch. Replicas are "
                    "not a dimension: the mesh describes one, and a world has as many as fit",
                )
            if type(size) is not int or size < 1:
                raise ConfigError(
                    f"mesh={dict(given)}: dimension {name!r} has size {size!r}",
                    hint="pass a number of ranks, at least 1",
                )
        return cls(tuple(given.items()))

    def __bool__(self) -> bool:
        """Whether a mesh was given."""
        return bool(self.dims)

    @property
    def size(self) -> int:
        """The number of ranks in a replica."""
        return math.prod(size for _, size in self.dims)

    @property
    def data_dims(self) -> tuple[str, ...]:
        """The dimensions that split the batch and have more than one rank."""
        return tuple(name for name, size in self.dims if size > 1 and _splits_batch(name))

    @property
    def averaged_dims(self) -> tuple[str, ...]:
        """The dimensions of more than one rank along which ranks have different samples, or
        different parts of a sample: gradients are a mean over them."""
        return tuple(name for name in self.split_dims if _splits_batch(name) or name == "cp")

    @property
    def split_dims(self) -> tuple[str, ...]:
        """The dimensions that have more than one rank."""
        return tuple(name for name, size in self.dims if size > 1)

    @property
    def data_size(self) -> int:
        """The number of parts into which a replica splits its samples."""
        return math.prod(size for name, size in self.dims if _splits_batch(name))

    @property
    def has_stages(self) -> bool:
        """Whether ranks hold stages of the model: a dimension ``pp`` of any size."""
        return any(name == STAGES for name, _ in self.dims)

    @property
    def stages(self) -> int:
        """The number of stages into which the ranks of a replica divide the model."""
        return dict(self.dims).get(STAGES, 1)

    def stage_of(self, position: int) -> StagePlace | None:
        """The stage that the rank at ``position`` in the replica holds; None if there is only one.

        >>> ReplicaMesh((("shard", 2), ("pp", 2))).stage_of(3)
        StagePlace(index=1, count=2, ranks=(1, 3))
        """
        if self.stages == 1:
            return None
        dim = [name for name, _ in self.dims].index(STAGES)
        indices = [self.coordinates(rank)[dim] for rank in range(self.size)]
        own = indices[position]
        ranks = tuple(rank for rank, index in enumerate(indices) if index == own)
        return StagePlace(own, self.stages, ranks)

    @property
    def dims_of_stage(self) -> tuple[str, ...]:
        """The dimensions of more than one rank along which ranks hold the same stage."""
        return tuple(name for name in self.split_dims if name != STAGES)

    @property
    def same_part_dims(self) -> frozenset[str]:
        """Those of them along which ranks see the same samples: they update parameters that are not
        sharded over these each for itself."""
        return frozenset(self.dims_of_stage) - {*self.averaged_dims}

    def data_position(self, position: int) -> int:
        """The index of the part that the rank at ``position`` in the replica processes.

        >>> [ReplicaMesh((("shard", 2), ("tp", 2))).data_position(p) for p in range(4)]
        [0, 0, 1, 1]
        """
        part, stride = 0, self.size
        for name, size in self.dims:
            stride //= size
            if _splits_batch(name):
                part = part * size + position // stride % size
        return part

    def coordinates(self, position: int) -> tuple[int, ...]:
        """The coordinates of the rank at ``position`` in the replica, one per dimension.

        >>> ReplicaMesh((("shard", 2), ("tp", 2))).coordinates(2)
        (1, 0)
        """
        coordinates = []
        for _, size in reversed(self.dims):
            position, coordinate = divmod(position, size)
            coordinates.append(coordinate)
        return tuple(reversed(coordinates))

    def dims_along(self, positions: Sequence[int]) -> frozenset[str] | None:
        """The dimensions of more than one rank that these ranks span; None if they do not span
        whole dimensions.

        >>> mesh = ReplicaMesh((("shard", 2), ("cp", 2)))
        >>> sorted(mesh.dims_along([1, 3])), sorted(mesh.dims_along(range(4)))
        (['shard'], ['cp', 'shard'])
        """
        places = {self.coordinates(position) for position in positions if position < self.size}
        along = {i for i, each in enumerate(zip(*places, strict=True)) if len(set(each)) > 1}
        count = math.prod(self.dims[i][1] for i in along)
        if not len(places) == len(positions) == count:
            return None
        return frozenset(self.dims[i][0] for i in along)

    def first_holder(self, position: int, sharded: Collection[str]) -> int:
        """The first rank that holds the same part as the one at ``position``, where ``sharded``
        names the dimensions that split it.

        >>> ReplicaMesh((("shard", 2), ("tp", 2))).first_holder(3, {"shard"})
        2
        """
        first = 0
        for (name, size), at in zip(self.dims, self.coordinates(position), strict=True):
            first = first * size + (at if name in sharded else 0)
        return first

    def check_node(self, workers: int, *, replica_size: int = 1) -> None:
        """Raise ConfigError unless a node's workers form whole replicas, or are part of a replica
        that the agents form (``replica_size``)."""
        if replica_size > workers and replica_size != self.size:
            raise ConfigError(
                f"elastic.join(mesh=…) has replicas of {self.size} ranks ({self}), and the agents "
                f"form replicas of {replica_size}",
                hint=f"--rdzv-conf=replica_size={self.size} on every node "
                "(docs/how-to/replicas.md)",
            )
        if replica_size > workers or not (left := workers % self.size):
            return
        if self.size % workers == 0:
            raise ConfigError(
                f"{workers} workers on this node are part of a replica of {self.size} ranks "
                f"(mesh {self}), but the agent was not configured for replicas over "
                f"{self.size // workers} nodes",
                hint=f"--nproc-per-node={self.size}, or on every node "
                f"--rdzv-conf=replica_size={self.size} (docs/how-to/replicas.md)",
            )
        raise ConfigError(
            f"{workers} workers on this node cannot form replicas of {self.size} ranks "
            f"(mesh {self}): {left} of them would wait forever",
            hint=f"--nproc-per-node must be a multiple of {self.size}, or, for replicas over "
            f"several nodes, a divisor of it with --rdzv-conf=replica_size={self.size} "
            "(docs/how-to/replicas.md)",
        )

    def __str__(self) -> str:
        return " × ".join(f"{name}={size}" for name, size in self.dims) or "none"


def _splits_batch(name: str) -> bool:
    return name == "shard" or name.startswith("dp")


# ----------------------------------------------------------------------------
# The world from one worker's point of view: its rank, the size, the generation.

# Set by torchrun with any backend, and needed by env://. Without them a process is a world of one.
_LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, kw_only=True)
class World(WorldIdentity):
    """The ranks that train together in one generation.

    Attributes:
        generation: the number of this world; never decreases over the life of a job.
        nonce: hex, the same on all ranks, new for every world.
        lineage: earlier generations, oldest first.
        rank: this worker's rank, from 0.
        size: the number of workers.
        local_rank: this worker's rank on its node.
        local_size: the number of workers on this node.
        node: the name of this node, for people.
        is_launched: False for plain ``python train.py``, a world of one.
        mesh: the dimensions of a replica; without any, each rank is a replica.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
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
    world = identity_in(env)
    return world is not None and world.generation == NO_WORLD.generation


# MASTER_PORT of a worker that joins a running job, before its first world: frameworks parse it. A
# group that is opened there without elastic finds nobody: no unprivileged program listens on it.
_NO_PORT = 1


def identity_before_worlds(env: Mapping[str, str] = os.environ) -> tuple[int, int, dict[str, str]]:
    """The rank, the size and the environment of this worker before its first world: those in the
    largest world.

    A worker that joins a running job, or replaces a dead one, has the last ranks: frameworks let
    rank 0 create folders and open logs.

    >>> from elastic.wire.messages import identity_variable
    >>> env = {"RANK": "0", "LOCAL_WORLD_SIZE": "2", "ELASTIC_MAX_NODES": "3"}
    >>> rank, size, variables = identity_before_worlds({**env, **identity_variable(NO_WORLD)})
    >>> rank, size, variables["GROUP_RANK"]
    (4, 6, '2')
    """
    size, local_size = largest_world(env), _integer(env, "LOCAL_WORLD_SIZE", 1)
    nodes = max(1, size // local_size)
    rank, node = _integer(env, "RANK", 0), _integer(env, "GROUP_RANK", 0)
    ports = {}
    if joins_running_job(env):
        node = nodes - 1
        rank = node * local_size + number_on_node(env) or size - 1
        ports = {"MASTER_PORT": str(_NO_PORT)}
    variables = {
        "RANK": rank,
        "WORLD_SIZE": size,
        "GROUP_RANK": node,
        "GROUP_WORLD_SIZE": nodes,
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": size,
    }
    return rank, size, {name: str(value) for name, value in variables.items()} | ports


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
