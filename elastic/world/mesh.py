"""The dimensions of a replica: the ranks that together hold one copy of the model.

A world consists of replicas; the mesh names the dimensions inside one. This module decides which
dimensions split the batch, for the sampler, the loaders and the random numbers of steps.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from elastic.errors import ConfigError

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
        found = []
        for _, size in reversed(self.dims):
            position, coordinate = divmod(position, size)
            found.append(coordinate)
        return tuple(reversed(found))

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
        found = 0
        for (name, size), at in zip(self.dims, self.coordinates(position), strict=True):
            found = found * size + (at if name in sharded else 0)
        return found

    def check_node(self, workers: int, *, replica_size: int = 1) -> None:
        """Raise ConfigError unless a node's workers form whole replicas, or are part of a replica
        that the agents form (``replica_size``)."""
        if replica_size > workers and replica_size != self.size:
            raise ConfigError(
                f"elastic.join(mesh=…) has replicas of {self.size} ranks ({self}), and the agents "
                f"form replicas of {replica_size}",
                hint=f"--rdzv-conf=replica_size={self.size} on every node (docs/how-to/sharded.md)",
            )
        if replica_size > workers or not (left := workers % self.size):
            return
        if self.size % workers == 0:
            raise ConfigError(
                f"{workers} workers on this node are part of a replica of {self.size} ranks "
                f"(mesh {self}), but the agent was not configured for replicas over "
                f"{self.size // workers} nodes",
                hint=f"--nproc-per-node={self.size}, or on every node "
                f"--rdzv-conf=replica_size={self.size} (docs/how-to/sharded.md)",
            )
        raise ConfigError(
            f"{workers} workers on this node cannot form replicas of {self.size} ranks "
            f"(mesh {self}): {left} of them would wait forever",
            hint=f"--nproc-per-node must be a multiple of {self.size}, or, for replicas over "
            f"several nodes, a divisor of it with --rdzv-conf=replica_size={self.size} "
            "(docs/how-to/sharded.md)",
        )

    def __str__(self) -> str:
        return " × ".join(f"{name}={size}" for name, size in self.dims) or "none"


def _splits_batch(name: str) -> bool:
    return name == "shard" or name.startswith("dp")
