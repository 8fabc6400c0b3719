"""The groups of a world of replicas: all ranks, and the ranks at one position of each replica.

Both are ours and known to nobody else: torch's default group is the replica's, and taking that one
down would take every subgroup along, and with them the mesh of each DTensor.
"""

from __future__ import annotations

import dataclasses
import datetime
import os

import torch
import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]
    HashStore,
    PrefixStore,
    Store,
)

from elastic.errors import ConfigError
from elastic.mesh.replica import ModelReplica
from elastic.process_group import (
    OwnGroup,
    PendingWorks,
    ProcessGroup,
    leak,
    use_as_world,
)
from elastic.telemetry.journal import EventSink
from elastic.tuning import timeouts
from elastic.tuning.worker_intervals import DRAIN_S
from elastic.world.world import World, world_from_environment


class ReplicaProcessGroup(ProcessGroup):
    """Owns the groups of one world at a time, around a replica that stays."""

    def __init__(
        self, device: torch.device, replica: ModelReplica, journal: EventSink | None = None
    ) -> None:
        super().__init__(device, "gloo", journal)
        self.replica = replica
        self._mesh = str(replica.mesh)
        self.world: OwnGroup | None = None
        self.across: OwnGroup | None = None  # this position of each replica

    @property
    def is_foreign(self) -> bool:
        """Never: torch's default group is the replica's."""
        return False

    def form(self) -> World:
        """A world of this rank alone, without a launcher; any other one is announced.

        Raises ConfigError under a launcher: worlds of replicas change in process only.
        """
        world = world_from_environment()
        if world.is_launched:
            raise ConfigError(
                "elastic.join(mesh=…) without run.retry: the world of the environment has one "
                "process group, and a restart of all workers for each change",
                hint="run.retry(train) around the training loop, under "
                "torchrun --rdzv-backend=etcd",
            )
        self._works = self._open_works()
        self._initialize(HashStore(), world.rank, world.size, 0.0)
        self._owned = True
        return dataclasses.replace(world, mesh=self.replica.mesh)

    def _open_works(self) -> PendingWorks:
        return PendingWorks()  # torch's default group keeps its own

    def _initialize(self, store: Store, rank: int, size: int, timeout_s: float) -> None:
        ranks = self.replica.mesh.size
        if size % ranks:
            raise ConfigError(
                f"a world of {size} ranks is not a number of replicas of {ranks} "
                f"(mesh {self.replica.mesh})",
                hint=f"--nproc-per-node: the same multiple of {ranks} on every node",
            )
        self.world = self._connect(PrefixStore("world", store), rank, size)
        position = PrefixStore(f"across-{rank % ranks}", store)
        self.across = self._connect(position, rank // ranks, size // ranks)
        use_as_world(self.world, self.across)

    def _connect(self, store: Store, rank: int, size: int) -> OwnGroup:
        timeout = datetime.timedelta(seconds=timeouts.collective_of_environment(os.environ))
        return OwnGroup(dist.ProcessGroupGloo(store, rank, size, timeout), self._works)

    def _dissolve(self, is_for_next: bool) -> bool:
        use_as_world(None)
        groups = [group for group in (self.world, self.across) if group is not None]
        self.world = self.across = None
        is_drained = self._works.drain(DRAIN_S)
        if not is_drained:
            for group in groups:
                leak(group.backend)
        return is_drained

    def destroy(self, *, is_for_next: bool = False) -> None:
        """As of any group; with the last world the replica ends, too."""
        super().destroy(is_for_next=is_for_next)
        if not is_for_next:
            self.replica.close()


def process_group(
    device: torch.device, backend: str | None, replica: ModelReplica, journal: EventSink | None
) -> ProcessGroup:
    """That of a process: torch's default group is the world's, or, with a mesh, the replica's.

    Raises ConfigError for a backend that replicas cannot have.
    """
    if not replica.mesh:
        return ProcessGroup(device, backend, journal)
    if backend not in (None, "gloo"):
        raise ConfigError(
            f"elastic.join(mesh=…, backend={backend!r}): replicas are built for gloo only so far",
            hint="omit backend",
        )
    return ReplicaProcessGroup(device, replica, journal)
