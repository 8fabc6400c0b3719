"""Every private name of torch that workers lean on, and nothing else.

Differences between torch's versions are in here as well. :func:`check` is called by ``join()``:
where a torch lacks a name, that is one sentence before training, not an ``AttributeError`` in the
middle of a recovery. ``tests/contract/test_torch_private_names.py`` fails where another module uses
one. The agent's names are in :mod:`elastic.rendezvous.torch_private`, those of checkpoints in
:mod:`checkpoints.tensors.torch_private`; NCCL's are beside what is done with them,
and FSDP's in :mod:`elastic.torch_fsdp`.

Imports torch alone.
"""

from __future__ import annotations

import datetime
import functools
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from importlib import import_module
from operator import attrgetter
from types import CodeType
from typing import Any

import torch
import torch.distributed as dist
from torch.amp.grad_scaler import GradScaler
from torch.autograd import Variable
from torch.distributed import distributed_c10d
from torch.utils.data import DataLoader, dataloader

from elastic import torch_versions

# By dotted path; what an instance has is listed where the class declares it.
NAMES = (
    # The process group of a world.
    "torch.distributed.distributed_c10d._abort_process_group",
    "torch.distributed.distributed_c10d._get_default_group",
    "torch.distributed.distributed_c10d._world.group_count",
    "torch.distributed.distributed_c10d._world.pg_names",
    "torch.distributed.ProcessGroup._device_types",
    "torch.distributed.ProcessGroup._get_backend",
    "torch.distributed.ProcessGroup._get_sequence_number_for_group",
    "torch.distributed.Work._get_op_type",
    # DDP's reducer, and the methods of DDP's that ElasticDDP puts its own in the place of.
    "torch.distributed.Reducer._remove_autograd_hooks",
    "torch.distributed.Reducer._update_process_group",
    "torch.nn.parallel.DistributedDataParallel._distributed_broadcast_coalesced",
    "torch.nn.parallel.DistributedDataParallel._match_all_reduce_for_bwd_pass",
    "torch.nn.parallel.DistributedDataParallel._register_builtin_comm_hook",
    "torch.nn.parallel.DistributedDataParallel._set_static_graph",
    # The backward pass.
    "torch._C._current_graph_task_id",
    "torch.autograd.Variable._execution_engine.queue_callback",
    # Tensors.
    "torch.Tensor._version",
    # Many tensors at once.
    "torch._foreach_copy_",
    "torch._foreach_mul_",
    # Data workers.
    "torch.UntypedStorage._new_shared",
    "torch.utils.data.DataLoader._get_iterator",
    "torch.utils.data.dataloader._BaseDataLoaderIter.__next__",
    # The gradient scaler.
    "torch.amp.grad_scaler._refresh_per_optimizer_state",
)
# What an abort of communicators uses, where collectives run on a stream; a backend of NCCL's has
# _group_start and _group_end up to torch 2.14 (elastic/process_group/communicators.py).
ON_STREAM = (
    "torch.distributed.ProcessGroup._end_coalescing",
    "torch.distributed.ProcessGroup._start_coalescing",
)
# Of instances. Module.__init__ makes the tables of hooks anew; they belong to the user.
_HOOK_TABLES = (
    "_backward_pre_hooks",
    "_backward_hooks",
    "_is_full_backward_hook",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
_OF_A_MODULE = (*_HOOK_TABLES, "_buffers")
_OF_A_SCALER = ("_device", "_growth_tracker", "_per_optimizer_states", "_scale")
_SCALES = ("_scale", "_growth_tracker")


def check() -> None:
    """Raise a ConfigError that lists all names which the installed torch lacks, if any."""
    missing = [path for path in NAMES if _found(path) is None]
    if not hasattr(dist, "set_timeout") and not hasattr(distributed_c10d, "_set_pg_timeout"):
        missing.append("torch.distributed.set_timeout")
    scaler = GradScaler("cpu", enabled=True)
    missing += [f"GradScaler.{name}" for name in _OF_A_SCALER if not hasattr(scaler, name)]
    module = torch.nn.Module()
    missing += [f"Module.{name}" for name in _OF_A_MODULE if not hasattr(module, name)]
    _refuse(missing)


def check_streams() -> None:
    """The same of what is needed in addition where collectives run on a stream."""
    missing = [path for path in ON_STREAM if _found(path) is None]
    legacy = getattr(distributed_c10d, "ProcessGroupNCCL", None)  # not in builds without CUDA
    if legacy is not None and not hasattr(legacy, "supports_coalescing"):
        calls = ("_group_start", "_group_end")
        missing += [f"ProcessGroupNCCL.{name}" for name in calls if not hasattr(legacy, name)]
    _refuse(missing)


def _refuse(missing: list[str]) -> None:
    if missing:
        raise torch_versions.lacks(torch.__version__, ", ".join(missing), "elastic.join()")


def _found(path: str) -> Any:
    """What a dotted path leads to; None if there is no such thing."""
    parts = path.split(".")
    found: Any = import_module(parts[0])
    for depth, part in enumerate(parts[1:], start=2):
        if not hasattr(found, part):
            with suppress(ImportError):
                import_module(".".join(parts[:depth]))
        found = getattr(found, part, None)
        if found is None:
            return None
    return found


# The process group of a world ----------------------------------------------------------------


def set_group_timeout(timeout: datetime.timedelta) -> None:
    """Of all later collectives of the default group."""
    if hasattr(dist, "set_timeout"):  # torch 2.14
        dist.set_timeout(timeout)
    else:
        distributed_c10d._set_pg_timeout(timeout)


def default_group() -> dist.ProcessGroup:
    """The object itself, for who keeps it alive."""
    return distributed_c10d._get_default_group()


def forget_meshes() -> None:
    """Have DTensor forget what it knows of meshes: a DeviceMesh equals any other one of as many
    ranks, and the result of an operation carries the mesh that it was first called with
    [measured, torch 2.13: a Parameter made of a DTensor on a new mesh is on the old one]."""
    if "torch.distributed.tensor" in sys.modules:  # importing it takes a second
        debug = import_module("torch.distributed.tensor.debug")
        clear = getattr(debug, "_clear_sharding_prop_cache", None)
        if clear is not None:
            clear()


def forget_group_count() -> None:
    """Have the next default group be named like the first: all ranks must name it alike."""
    distributed_c10d._world.group_count = 0


def collectives_begun() -> int:
    """How many collectives of the default group this rank has begun.

    0 without a group, and where the backend does not count: gloo and NCCL do, a backend that was
    registered need not (torch/csrc/distributed/c10d/Backend.hpp, getSequenceNumberForGroup).
    """
    if not dist.is_initialized():
        return 0
    group: Any = distributed_c10d._get_default_group()
    try:
        return int(group._get_sequence_number_for_group())
    except RuntimeError:
        return 0


def collectives_of_groups() -> dict[str, int] | None:
    """The same of each group, by its name; None where one of them does not count."""
    counts: dict[str, int] = {}
    for group, name in list(distributed_c10d._world.pg_names.items()):
        counted: Any = group
        try:
            counts[name] = int(counted._get_sequence_number_for_group())
        except RuntimeError:
            return None
    return counts


def default_group_name() -> str:
    """What :func:`collectives_of_groups` calls the default group."""
    return distributed_c10d._world.pg_names[distributed_c10d._get_default_group()]


def error_of(work: Any) -> BaseException | None:
    """The error of a collective that torch has noticed by itself, without waiting for it.

    ``Work.exception`` is deprecated, and once in a process torch says so on stderr; but
    ``Work.wait``, which raises the error, aborts the communicator before
    (ProcessGroupNCCL.cpp, ``WorkNCCL::wait``), in the calling thread and without a deadline.
    """
    try:
        error = work.exception()
    except (AttributeError, NotImplementedError, TypeError, RuntimeError):
        return None  # another version's binding: wait() raises it
    return error if isinstance(error, BaseException) else None


def operation_of(work: Any) -> int:
    """Which operation it is: c10d's OpType; -1 where the work does not say."""
    try:
        return int(work._get_op_type())
    except (AttributeError, TypeError, RuntimeError):  # a work that is made in Python
        return -1


def flight_recorder_dumps() -> tuple[bytes, ...]:
    """What torch's flight recorders hold, as JSON: nothing has to be unpickled, and no stacks are
    taken. NCCL's is one of its own, and there only where torch has NCCL
    (torch/csrc/distributed/c10d/init.cpp)."""
    c10d = import_module("torch._C._distributed_c10d")
    names = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
    return tuple(bytes(getattr(c10d, name)()) for name in names if hasattr(c10d, name))


def has_subgroups() -> bool:
    """Whether there are other groups than the default one."""
    return len(distributed_c10d._world.pg_names) > 1


def abort_groups() -> None:
    """End all groups without waiting for what is queued on a device."""
    distributed_c10d._abort_process_group()


# DDP's reducer -------------------------------------------------------------------------------


def give_group(reducer: Any, group: dist.ProcessGroup) -> None:
    """Have the reducer ask this group for its collectives from now on."""
    reducer._update_process_group(group)


def remove_hooks(reducer: Any) -> None:
    """Take the reducer's hooks off the parameters."""
    reducer._remove_autograd_hooks()


# Sharded models ------------------------------------------------------------------------------


def reduce_scatter(output: torch.Tensor, given: torch.Tensor, **options: Any) -> dist.Work | None:
    """Of whole tensors; torch 2.13 has renamed it, and warns of the older name."""
    named: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    work: dist.Work | None = named(output, given, **options)
    return work


def strided_shard(dim: int, split_factor: int) -> Any:
    """The placement of FSDP over tensor parallelism. Not among :data:`NAMES`: where torch has
    another one, no tensor has this."""
    types = import_module("torch.distributed.tensor.placement_types")
    return types._StridedShard(dim, split_factor=split_factor)


# The backward pass ---------------------------------------------------------------------------


def current_backward() -> int:
    """A number of its own for each backward pass; -1 outside of all."""
    return torch._C._current_graph_task_id()


def call_after_backward(callback: Callable[[], None]) -> None:
    """Call back at the end of the present backward pass, before what is queued later."""
    Variable._execution_engine.queue_callback(callback)


# Modules and tensors -------------------------------------------------------------------------

_version_of = attrgetter("_version")


def hook_tables(module: torch.nn.Module) -> dict[str, Any]:
    """The hooks of a module, as they are in its ``__dict__``."""
    return {name: module.__dict__[name] for name in _HOOK_TABLES if name in module.__dict__}


def buffers_of(module: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    """Its own, without those of its parts."""
    return module._buffers


def count_of_changes(tensors: Iterable[torch.Tensor]) -> int:
    """A number that grows with every in-place change of any of them that torch counts."""
    return sum(map(_version_of, tensors))


# Many tensors at once ------------------------------------------------------------------------


def copy_each(to: Iterable[torch.Tensor], values: Iterable[torch.Tensor]) -> None:
    """Copy each tensor into its counterpart."""
    torch._foreach_copy_(list(to), list(values))


def multiply_each(tensors: Iterable[torch.Tensor], factor: float) -> None:
    """Multiply all in place."""
    torch._foreach_mul_(list(tensors), factor)


# Data workers --------------------------------------------------------------------------------


def use_shared_memory() -> None:
    """As a data worker does it to send a batch."""
    torch.UntypedStorage._new_shared(1)  # type: ignore[no-untyped-call]


def iterates_as_torch_does(kind: type[DataLoader[Any]]) -> bool:
    """Whether this class of loaders makes and keeps its iterators like ``DataLoader``."""
    return (kind.__iter__, kind._get_iterator) == (DataLoader.__iter__, DataLoader._get_iterator)


def unread_tasks(loader: DataLoader[Any]) -> tuple[Any, ...]:
    """The queues of batches that the loader's present workers are to read, if it has any."""
    return tuple(getattr(loader._iterator, "_index_queues", ()))


def watch_batches(enter: Callable[[], Any], leave: Callable[[Any], object]) -> None:
    """Call ``enter`` before any DataLoader of this process is asked for a batch, and ``leave``
    with what it returned afterwards."""
    kind: Any = dataloader._BaseDataLoaderIter
    of_torch = kind.__next__

    @functools.wraps(of_torch)
    def watched(iterator: Any) -> Any:
        before = enter()
        try:
            return of_torch(iterator)
        finally:
            leave(before)

    kind.__next__ = watched


def forget_iterator(loader: DataLoader[Any]) -> None:
    """Let go of the iterator that a loader with persistent workers keeps."""
    loader._iterator = None


# The gradient scaler -------------------------------------------------------------------------


def scales_of(scaler: GradScaler) -> dict[str, Any]:
    """Its scale and what decides about the next one, as they are: on the device, or still plain."""
    return {name: getattr(scaler, name) for name in _SCALES}


def set_scales(scaler: GradScaler, scales: dict[str, Any]) -> None:
    """Put back (copies of) what :func:`scales_of` gave, and forget what the optimizers have done
    in this step."""
    for name, value in scales.items():
        present = getattr(scaler, name)
        on = present.device if isinstance(present, torch.Tensor) else scaler._device
        setattr(scaler, name, None if value is None else value.detach().clone().to(on))
    refresh: Any = _found("torch.amp.grad_scaler._refresh_per_optimizer_state")
    scaler._per_optimizer_states = defaultdict(refresh)


# torch.compile -------------------------------------------------------------------------------


def keep_dynamo_out(code: CodeType, *, is_recursive: bool) -> None:
    """Have ``torch.compile`` skip this function, and what it calls if ``is_recursive``.

    As ``torch._dynamo.eval_frame.skip_code`` does it. Not among :data:`NAMES`: a torch that has
    other names for it still trains; compiled models fail there with Dynamo's own message.
    """
    with suppress(ImportError, AttributeError):
        from torch._C._dynamo import eval_frame

        action = eval_frame._FrameAction
        called = action.SKIP if is_recursive else action.DEFAULT
        strategy = eval_frame._FrameExecStrategy(action.SKIP, called)
        eval_frame.set_code_exec_strategy(code, strategy)
