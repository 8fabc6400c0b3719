"""Replicas of several ranks: their own group, and the groups of a world around them."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import importlib
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import (  # type: ignore[attr-defined]
    FileStore,
    HashStore,
    PrefixStore,
    Store,
)
from torch.nn.modules.module import register_module_parameter_registration_hook

from elastic.errors import SYSTEM_CLOCK, ConfigError, GroupAborted, ReplicaLost, TrainingError
from elastic.groups.collectives import OwnGroup, use_as_world
from elastic.groups.faults import is_world_fault
from elastic.groups.group import (
    DEFAULT_BACKENDS,
    ProcessGroup,
    leak,
    leave_errors_to_us,
    open_communicator,
)
from elastic.groups.pending import (
    PendingWorks,
    TorchExceptHook,
    backend_of,
    describe_group,
    semantics_of,
)
from elastic.groups.store import OpenStore, open_store, rendezvous
from elastic.groups.world import ReplicaMesh, World, world_from_environment
from elastic.link.link import GroupSpec
from elastic.telemetry.journal import EventSink
from elastic.tuning import intervals
from elastic.tuning.intervals import DRAIN_S, REPLICA_RENDEZVOUS_S, SLOWEST_LOOK_S
from elastic.wire.messages import number_on_node

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


# ----------------------------------------------------------------------------
# Tied weights that ``parallelize_module`` and ``distribute_module`` split.
#
# They replace each parameter of each module by a DTensor. If two modules share a parameter (an
# embedding and the head), each gets a DTensor of its own: they begin with the same values, and the
# optimizer updates each with its own gradient. torch does not report that; it reports each
# registration of a parameter, before the module has the new one.


class SplitTies:
    """Notes which parameters are replaced by DTensors, from now on."""

    def __init__(self) -> None:
        self._replaced = _Replaced()
        note = functools.partial(_note, self._replaced)
        weakref.finalize(self, register_module_parameter_registration_hook(note).remove)

    def check(self, module: nn.Module) -> None:
        """Raise ConfigError if parameters of ``module`` were one tied weight, and no longer are."""
        for first, second in self._replaced.pairs(module):
            raise ConfigError(
                f"run.wrap() of a module with DTensors: {first!r} and {second!r} were one tied "
                "weight, of which parallelize_module or distribute_module made two parameters",
                hint=f"tie them again after it: model.{second} = model.{first}. An nn.Embedding "
                "with RowwiseParallel and an nn.Linear with ColwiseParallel are both sharded over "
                "the vocabulary",
            )


@dataclass(frozen=True)
class _Place:
    """Where a parameter was replaced."""

    owner: weakref.ref[nn.Module]
    name: str


@dataclass(frozen=True)
class _Weight:
    """A parameter that was replaced, and where."""

    before: weakref.ref[nn.Parameter]
    places: list[_Place] = field(default_factory=list)


@dataclass
class _Replaced:
    """The parameters that were replaced."""

    _weights: list[_Weight] = field(default_factory=list)
    # By the id of a parameter, which another one may get after it was freed.
    _known: dict[int, _Weight] = field(default_factory=dict)

    def note(self, parameter: nn.Parameter, place: _Place) -> None:
        known = self._known.get(id(parameter))
        if known is None or known.before() is not parameter:
            known = self._known[id(parameter)] = _Weight(weakref.ref(parameter))
            self._weights.append(known)
        known.places.append(place)

    def pairs(self, module: nn.Module) -> Iterator[tuple[str, str]]:
        """The names in ``module`` of parameters that were one, and are two."""
        prefixes = {id(each): f"{name}." if name else "" for name, each in module.named_modules()}
        kept = {id(each): name for name, each in module.named_parameters()}
        for weight in self._weights:
            names: dict[int, str] = {}  # by parameter
            before = weight.before()
            if before is not None and id(before) in kept:  # by a module outside of the plan
                names[id(before)] = kept[id(before)]
            for place in weight.places:
                owner = place.owner()
                if owner is not None and id(owner) in prefixes:
                    now = getattr(owner, place.name, None)
                    names.setdefault(id(now), prefixes[id(owner)] + place.name)
            if len(names) > 1:
                first, second, *_ = names.values()
                yield first, second


def _note(replaced: _Replaced, owner: nn.Module, name: str, new: object) -> None:
    if not _is_dtensor(new):
        return
    old = getattr(owner, name, None)
    if isinstance(old, nn.Parameter) and not _is_dtensor(old):
        replaced.note(old, _Place(weakref.ref(owner), name))


def _is_dtensor(value: object) -> bool:
    return hasattr(value, "placements")  # without importing DTensor, which takes time


# ----------------------------------------------------------------------------
# This process's replica: the ranks that together hold the model once.
#
# Its group is torch's default group and exists as long as the process. If one rank left a step
# while another continued, the other would wait, and match the leaving rank's next collective with
# one of the last step. So the ranks of a replica leave together: a rank that detects the end of
# the world reports it at the next point that all of them pass, and all raise.

_ALONE: AbstractContextManager[None] = nullcontext()
_CPU = torch.device("cpu")
_LEFT = "another rank of this replica has detected the end of the world"


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

    def form(self, spec: GroupSpec | None = None, folder: str = "") -> None:
        """Create torch's default group and its mesh, once. None: a replica of one rank.

        Its ranks find each other in the store of the first of several nodes or, without a store's
        port, in a file in ``folder`` on their node."""
        from torch.distributed.device_mesh import init_device_mesh

        size = self.size
        store: Any = dist.HashStore()  # type: ignore[attr-defined]
        if spec is not None and spec.store_port:
            store = self._open_store(spec)
        elif spec is not None:
            store = FileStore(os.path.join(folder, f"replica-{spec.nonce}"), size)
        self._compare_meshes(store)
        is_on_stream = semantics_of(self.device.type, self.backend).is_on_stream
        if is_on_stream:
            leave_errors_to_us(os.environ, is_in_process=True)
        timeout = datetime.timedelta(seconds=intervals.collective_of_environment(os.environ))
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
        deadline_s = SYSTEM_CLOCK.monotonic() + REPLICA_RENDEZVOUS_S
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
        rendezvous(client, spec, _never_given_up, deadline_s=deadline_s)
        limit_s = intervals.collective_of_environment(os.environ)
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


# ----------------------------------------------------------------------------
# The groups of a world of replicas: all ranks, and the ranks at one position of each replica.
#
# They are not registered with torch. torch's default group belongs to the replica: destroying it
# would destroy every subgroup, and with them the mesh of each DTensor. Control messages and state
# use gloo, as do gradients on CPUs. On GPUs, the ranks at one position have a separate
# communicator, whose collectives are queued on a stream. The end of a world aborts only that one:
# FSDP's collectives may still run in the communicators of the replica.


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

    def synchronize(self) -> None:
        """As in the base class. All ranks of the replica synchronize the gradients of a step
        together, earlier: at the end of its backward pass."""
        super().synchronize()
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
            with self._limited("aborting", intervals.ABORT_S):
                across.backend.abort()
            return
        if not is_for_next:
            across.backend.shutdown()
            return
        with self._limited("destroying", intervals.DESTROY_S):
            across.backend.shutdown()

    def destroy(self, *, is_for_next: bool = False) -> None:
        """As in the base class; after the last world, also close the replica."""
        super().destroy(is_for_next=is_for_next)
        if not is_for_next:
            self.replica.close()


def _timeout() -> datetime.timedelta:
    return datetime.timedelta(seconds=intervals.collective_of_environment(os.environ))


def process_group(
    device: torch.device, backend: str | None, replica: ModelReplica, journal: EventSink | None
) -> ProcessGroup:
    """A process's group. torch's default group is the world's or, with a mesh, the replica's."""
    if not replica.mesh:
        return ProcessGroup(device, backend, journal)
    return ReplicaProcessGroup(device, replica, journal)
