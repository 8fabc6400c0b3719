"""This process's replica: the ranks that together hold the model once.

Its group is torch's default group and exists as long as the process. If one rank left a step while
another continued, the other would wait, and match the leaving rank's next collective with one of
the last step. So the ranks of a replica leave together: a rank that detects the end of the world
reports it at the next point that all of them pass, and all raise.
"""

from __future__ import annotations

import datetime
import importlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]
    FileStore,
    PrefixStore,
    Store,
)

from elastic.clock import SYSTEM_CLOCK
from elastic.errors import ConfigError, GroupAborted, ReplicaLost, TrainingError
from elastic.mesh.split_ties import SplitTies
from elastic.messages.environment import number_on_node
from elastic.process_group import (
    DEFAULT_BACKENDS,
    TorchExceptHook,
    leave_errors_to_us,
    semantics_of,
)
from elastic.tuning import timeouts
from elastic.tuning.worker_intervals import REPLICA_MEETS_S, SLOWEST_LOOK_S
from elastic.world.arrival import GroupSpec, OpenStore, meet, open_store
from elastic.world.faults import is_world_fault
from elastic.world.mesh import ReplicaMesh

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_ALONE: AbstractContextManager[None] = nullcontext()
_CPU = torch.device("cpu")
_LEFT = "another rank of this replica has detected the end of the world"


class ReplicaMeeting(NamedTuple):
    """Where the ranks of a replica meet: in a file on their node, or in the store of the first of
    several nodes. ``nonce`` names this meeting."""

    folder: str
    nonce: str
    over_nodes: GroupSpec | None = None


class ModelReplica:
    """One per process. Without a mesh it is a single rank, and no method communicates."""

    def __init__(
        self,
        mesh: ReplicaMesh | None = None,
        *,
        local_rank: int = 0,
        device: torch.device = _CPU,
        backend: str = "gloo",
    ) -> None:
        self.mesh = mesh or ReplicaMesh()
        self.device = device
        self.backend = backend  # of torch's default group, as in init_process_group
        self.size = self.mesh.size
        self.position = local_rank % self.size
        self.split_ties = SplitTies() if self.mesh else None
        self._device_mesh: DeviceMesh | None = None
        self._store: OpenStore | None = None  # of a replica that spans nodes
        # For the sums below if the default group queues collectives on a device: the host needs
        # the result, and must not wait for device work that a dead rank blocks.
        self._control: Any = None
        # Each rank answers it with the sum that ends a backward pass: a separate collective at the
        # next boundary would cost as much again.
        self.question: Callable[[], Sequence[bool]] | None = None
        self._answers: tuple[bool, ...] | None = None

    @property
    def device_mesh(self) -> DeviceMesh:
        """The value of ``run.mesh``. Raises ConfigError without a mesh."""
        if self._device_mesh is None:
            raise ConfigError(
                "run.mesh: elastic.join() was called without a mesh",
                hint='pass the dimensions of a replica: elastic.join(mesh={"shard": 2})',
            )
        return self._device_mesh

    def form(self, meeting: ReplicaMeeting | None) -> None:
        """Create torch's default group and its mesh, once. None: a replica of one rank."""
        from torch.distributed.device_mesh import init_device_mesh

        size = self.size
        store: Any = dist.HashStore()  # type: ignore[attr-defined]
        if meeting is not None and meeting.over_nodes is not None:
            store = self._open_store(meeting.over_nodes)
        elif meeting is not None:
            store = FileStore(os.path.join(meeting.folder, f"replica-{meeting.nonce}"), size)
        self._compare_meshes(store)
        is_on_stream = semantics_of(self.device.type, self.backend).is_on_stream
        if is_on_stream:
            leave_errors_to_us(os.environ, is_in_process=True)
        timeout = datetime.timedelta(seconds=timeouts.collective_of_environment(os.environ))
        hook = TorchExceptHook()
        dist.init_process_group(
            self.backend,
            store=store,
            rank=self.position,
            world_size=size,
            timeout=timeout,
            device_id=self.device if self.device.type == "cuda" else None,
        )
        hook.installed()
        hook.remove()
        if is_on_stream:
            self._control = dist.ProcessGroupGloo(
                PrefixStore("control", store), self.position, size, timeout
            )
        self._device_mesh = init_device_mesh(
            self.device.type,
            tuple(size for _, size in self.mesh.dims),
            mesh_dim_names=tuple(name for name, _ in self.mesh.dims),
        )

    def _compare_meshes(self, store: Store) -> None:
        """Raise ConfigError on a rank whose mesh differs from the first rank's: their collectives
        would not match."""
        if self.position == 0:
            store.set("mesh", str(self.mesh))
        elif (first := store.get("mesh").decode()) != str(self.mesh):
            raise ConfigError(
                f"rank {self.position} of a replica called elastic.join(mesh=…) with the "
                f"dimensions {self.mesh}, its first rank with {first}",
                hint="pass the same mesh, in the same order, on every worker",
            )

    def _open_store(self, spec: GroupSpec) -> Store:
        """Open the store at the first node. It exists as long as the group: torch opens
        subgroups through it. Raises GroupBuildFailed if the others do not arrive."""
        self.position = spec.rank
        deadline_s = SYSTEM_CLOCK.monotonic() + REPLICA_MEETS_S
        while self._store is None:
            try:
                self._store = open_store(
                    spec,
                    _never_given_up,
                    deadline_s=deadline_s,
                    use_tcp_store="nccl" in self.backend,
                )
            except OSError:  # a data worker of the previous start may still hold the port
                if SYSTEM_CLOCK.monotonic() > deadline_s:
                    raise
                SYSTEM_CLOCK.sleep(SLOWEST_LOOK_S)
        client = self._store.client
        meet(client, spec, _never_given_up, deadline_s=deadline_s)
        limit_s = timeouts.collective_of_environment(os.environ)
        client.set_timeout(datetime.timedelta(seconds=limit_s))
        return PrefixStore(spec.nonce, client)

    def close(self) -> None:
        """Close the group and the store before the process ends."""
        if self._device_mesh is not None and dist.is_initialized():
            dist.destroy_process_group()
        if self._store is not None:
            self._store.close()

    # -- agreement of its ranks -----------------------------------------------------------------

    def sum(self, values: Sequence[float]) -> list[float]:
        """Sum values over the ranks of the replica. All of them call it.

        Raises ReplicaLost if one of them is gone: its shards are lost, and this process ends.
        """
        self._answers = None
        if self.size == 1:
            return list(values)
        total = torch.tensor(list(values), dtype=torch.float64, device="cpu")
        try:
            if self._control is None:
                dist.all_reduce(total)
            else:
                self._control.allreduce([total], dist.AllreduceOptions()).wait()
        except RuntimeError as error:
            raise self._lost(error) from error
        return [float(value) for value in total.tolist()]

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum a tensor on this rank's device over the ranks of the replica with the same stage, in
        place. On a GPU the sum is only queued, as with any torch collective.

        Raises ReplicaLost if one of them is gone.
        """
        if self.size == 1:
            return
        try:
            if self.mesh.stages == 1:
                dist.all_reduce(tensor)
                return
            for dim in self.mesh.dims_of_stage:
                dist.all_reduce(tensor, group=self.device_mesh.get_group(dim))
        except RuntimeError as error:
            raise self._lost(error) from error

    def _lost(self, error: RuntimeError) -> ReplicaLost:
        return ReplicaLost(f"a rank of this replica (mesh {self.mesh}) is gone: {error}")

    def sum_and_ask(self, values: Sequence[float]) -> list[float]:
        """Like :meth:`sum`, and collect the ranks' answers to :attr:`question` for
        :meth:`take_answers`."""
        asked = self.question() if self.question is not None and self.size > 1 else ()
        sums = self.sum([*values, *map(float, asked)])
        if asked:
            self._answers = tuple(number > 0 for number in sums[len(values) :])
        return sums[: len(values)]

    def take_answers(self) -> tuple[bool, ...] | None:
        """Whether any rank of the replica has answered yes; the same on all. Returned only once.

        None if they were not asked, or have communicated since: a rank that leaves a world on its
        own then expects the others at :meth:`any`.
        """
        answers, self._answers = self._answers, None
        return answers

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank of the replica. All of them call it."""
        return flag if self.size == 1 else self.sum([float(flag)])[0] > 0

    def all_numbers(self, number: int) -> list[int]:
        """The numbers that the ranks of the replica pass, by position."""
        numbers = [0.0] * self.size
        numbers[self.position] = float(number)
        return [int(each) for each in self.sum(numbers)]

    def whole(self) -> AbstractContextManager[None]:
        """The ranks of the replica leave this context together: if the world has ended for one, all
        raise. For collectives of the world: an abort ends them on some ranks only."""
        return _ALONE if self.size == 1 else self._whole()

    @contextmanager
    def _whole(self) -> Iterator[None]:
        fault: Exception | None = None
        try:
            yield
        except ReplicaLost:
            raise
        except Exception as error:
            if not is_world_fault(error):
                raise
            fault = error
        if self.any(fault is not None):
            raise fault if fault is not None else GroupAborted(_LEFT)

    def check_in(self) -> None:
        """Verify that the replica is complete before this rank leaves a world with it.

        Raises ReplicaLost otherwise.
        """
        self.sum([1.0])


def _never_given_up() -> None:
    """Never give up: the agent ends this process if a node of the replica is lost."""


def mesh_of(
    given: Mapping[str, int] | None, device: torch.device, backend: str | None = None
) -> ModelReplica:
    """The replica of ``elastic.join(mesh=…, backend=…)``, not formed yet.

    Raises ConfigError for a mesh or a backend that this node does not support.
    """
    mesh = ReplicaMesh.parse(given)
    if not mesh:
        return ModelReplica()
    mesh.check_node(
        int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        replica_size=int(os.environ.get("ELASTIC_REPLICA_SIZE", "1")),
    )
    if dist.is_initialized():
        raise TrainingError(
            "elastic.join(mesh=…) after torch.distributed.init_process_group(): torch's default "
            "group is the replica's, and elastic.join creates it",
            hint="remove init_process_group(); run.mesh is the DeviceMesh",
        )
    # Takes seconds on a busy machine: import it before the others wait in :meth:`form`.
    importlib.import_module("torch.distributed.device_mesh")
    return ModelReplica(
        mesh,
        local_rank=number_on_node(os.environ),
        device=device,
        backend=_backend_for(device, backend),
    )


def _backend_for(device: torch.device, given: str | None) -> str:
    """The backend of a replica's group. Raises ConfigError if replicas do not support it.

    >>> _backend_for(torch.device("cuda"), "nccl")
    'cpu:gloo,cuda:nccl'
    """
    default = DEFAULT_BACKENDS.get(device.type)
    if default is None:
        raise ConfigError(
            f"elastic.join(mesh=…) on {device.type}: replicas train on CPUs with gloo and on GPUs "
            "with NCCL",
            hint="omit mesh: sharded models recover by a restart (docs/how-to/sharded.md)",
        )
    if given is None or given == default:
        return default
    if device.type == "cpu" and given != "gloo":
        raise ConfigError(
            f"elastic.join(mesh=…, backend={given!r}): replicas on CPUs communicate with gloo",
            hint="omit backend",
        )
    if device.type == "cuda" and not semantics_of("cuda", given).is_on_stream:
        raise ConfigError(
            f"elastic.join(mesh=…, backend={given!r}): replicas on GPUs communicate with NCCL",
            hint="omit backend",
        )
    return f"cpu:gloo,cuda:{given}" if device.type == "cuda" and ":" not in given else given
