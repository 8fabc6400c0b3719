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
_KNOWN = "shard, dp*, tp, pp, cp, ep"


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
    def split_dims(self) -> tuple[str, ...]:
        """The dimensions that have more than one rank."""
        return tuple(name for name, size in self.dims if size > 1)

    @property
    def data_size(self) -> int:
        """The number of parts into which a replica splits its samples."""
        return math.prod(size for name, size in self.dims if _splits_batch(name))

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
