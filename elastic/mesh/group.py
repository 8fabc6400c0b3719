"""The groups of a world of replicas: all ranks, and the ranks at one position of each replica.

They are not registered with torch. torch's default group belongs to the replica: destroying it
would destroy every subgroup, and with them the mesh of each DTensor. Control messages and state use
gloo, as do gradients on CPUs. On GPUs, the ranks at one position have a separate communicator,
whose collectives are queued on a stream. The end of a world aborts only that one: FSDP's
collectives may still run in the communicators of the replica.
"""

from __future__ import annotations

import dataclasses
import datetime
import os
from collections.abc import Callable

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
    backend_of,
    describe_group,
    leak,
    open_communicator,
    semantics_of,
    use_as_world,
)
from elastic.telemetry.journal import EventSink
from elastic.tuning import timeouts
from elastic.tuning.worker_intervals import DRAIN_S
from elastic.world.world import World, world_from_environment


class ReplicaProcessGroup(ProcessGroup):
    """Owns the groups of one world at a time, around a replica that persists."""

    def __init__(
        self, device: torch.device, replica: ModelReplica, journal: EventSink | None = None
    ) -> None:
        self._gradient_works = PendingWorks()  # on a stream; see across
        super().__init__(device, replica.backend, journal)
        self.replica = replica
        self._mesh = str(replica.mesh)
        self.world: OwnGroup | None = None
        self.peers: OwnGroup | None = None  # this position of each replica
        self.across: OwnGroup | None = None  # the same ranks, for gradients on this device

    @property
    def is_foreign(self) -> bool:
        """Always False: torch's default group belongs to the replica."""
        return False

    def form(self) -> World:
        """Form a world of one rank, without a launcher; all other worlds are announced.

        Raises ConfigError under a launcher: worlds of replicas change in process only.
        """
        world = world_from_environment()
        if world.is_launched:
            raise ConfigError(
                "elastic.join(mesh=…) without run.retry: each change of the world would restart "
                "all workers",
                hint="run the training loop in run.retry(train), under "
                "torchrun --rdzv-backend=etcd",
            )
        self._works = self._open_works()
        self._initialize(HashStore(), world.rank, world.size, 0.0)
        self._owned = True
        return dataclasses.replace(world, mesh=self.replica.mesh)

    def _open_works(self) -> PendingWorks:
        # No `record`: if a collective fails that the script has queued in the replica's groups,
        # the replica is lost, and its processes end.
        self._gradient_works = PendingWorks(is_on_stream=True, on_error=self.abort)
        describe_group(is_on_stream=self._is_on_stream)
        return PendingWorks()  # torch's default group tracks its own works

    def settle(self) -> None:
        """As in the base class. All ranks of the replica settle the gradients of a step together,
        earlier: at the end of its backward pass."""
        super().settle()
        self._gradient_works.raise_failure()

    @property
    def may_be_garbage(self) -> bool:
        """As in the base class."""
        return super().may_be_garbage or (
            self._is_on_stream and self._gradient_works.may_be_garbage
        )

    def _abort_works(self) -> None:
        super()._abort_works()
        self._gradient_works.abort()

    def _communicator_abort(self) -> Callable[[], object] | None:
        across = self.across
        return None if across is None or not across.is_on_stream else across.backend.abort

    def _initialize(self, store: Store, rank: int, size: int, timeout_s: float) -> None:
        ranks = self.replica.mesh.size
        if size % ranks:
            raise ConfigError(
                f"a world of {size} ranks is not a multiple of the replica size {ranks} "
                f"(mesh {self.replica.mesh})",
                hint=f"set --nproc-per-node to the same multiple of {ranks} on every node",
            )
        self.world = self._connect(PrefixStore("world", store), rank, size)
        position = PrefixStore(f"across-{rank % ranks}", store)
        self.peers = self.across = self._connect(position, rank // ranks, size // ranks)
        if self._is_on_stream and self.peers.size > 1:
            device_store = PrefixStore("device", position)
            self.across = self._open_communicator(device_store, self.peers.rank, self.peers.size)
        use_as_world(self.world, self.peers)

    def _connect(self, store: Store, rank: int, size: int) -> OwnGroup:
        return OwnGroup(dist.ProcessGroupGloo(store, rank, size, _timeout()), self._works)

    def _open_communicator(self, store: Store, rank: int, size: int) -> OwnGroup:
        name = backend_of(self.device.type, self.replica.backend)
        return OwnGroup(
            open_communicator(name, store, rank, size, device=self.device, timeout=_timeout()),
            self._gradient_works,
            semantics=semantics_of(self.device.type, self.replica.backend),
            device=self.device,
        )

    def _dissolve(self, is_for_next: bool) -> bool:
        use_as_world(None)
        groups = [group for group in (self.world, self.peers) if group is not None]
        across = self.across
        self.world = self.peers = self.across = None
        if across is not None and across.is_on_stream:
            self._close_communicator(across, is_for_next)
        is_drained = self._works.drain(DRAIN_S)
        if not is_drained:
            for group in groups:
                leak(group.backend)
        return is_drained

    def _close_communicator(self, across: OwnGroup, is_for_next: bool) -> None:
        """Shut it down, or abort it again in case the first abort failed. Ranks shut down together
        with their peers, which may still read this rank's part of a last result."""
        across.works.drain(DRAIN_S)
        if self.is_aborted:
            with self._limited("aborting", timeouts.ABORT_S):
                across.backend.abort()
            return
        if not is_for_next:
            across.backend.shutdown()
            return
        with self._limited("destroying", timeouts.DESTROY_S):
            across.backend.shutdown()

    def destroy(self, *, is_for_next: bool = False) -> None:
        """As in the base class; after the last world, also close the replica."""
        super().destroy(is_for_next=is_for_next)
        if not is_for_next:
            self.replica.close()


def _timeout() -> datetime.timedelta:
    return datetime.timedelta(seconds=timeouts.collective_of_environment(os.environ))


def process_group(
    device: torch.device, backend: str | None, replica: ModelReplica, journal: EventSink | None
) -> ProcessGroup:
    """A process's group. torch's default group is the world's or, with a mesh, the replica's."""
    if not replica.mesh:
        return ProcessGroup(device, backend, journal)
    return ReplicaProcessGroup(device, replica, journal)
