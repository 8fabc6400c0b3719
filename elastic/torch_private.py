"""Every private name of torch that workers lean on, and nothing else.

Differences between torch's versions are in here as well. :func:`check` is called by ``join()``:
where a torch lacks a name, that is one sentence before training, not an ``AttributeError`` in the
middle of a recovery. ``tests/contract/test_torch_private_names.py`` fails where another module uses
one. The agent's names are in :mod:`elastic.rendezvous.torch_private`, those of checkpoints in
:mod:`checkpoints.tensors.torch_private`; NCCL's are beside what is done with them.

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
_OF_A_SCALER = ("_device", "_growth_tracker", "_per_optimizer_states", "_scale")
_SCALES = ("_scale", "_growth_tracker")


def check() -> None:
    """Raise a ConfigError that lists all names which the installed torch lacks, if any."""
    missing = [path for path in NAMES if _found(path) is None]
    if not hasattr(dist, "set_timeout") and not hasattr(distributed_c10d, "_set_pg_timeout"):
        missing.append("torch.distributed.set_timeout")
    scaler = GradScaler("cpu", enabled=True)
    missing += [f"GradScaler.{name}" for name in _OF_A_SCALER if not hasattr(scaler, name)]
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


# FSDP1 ---------------------------------------------------------------------------------------


def is_flat_parameter(tensor: torch.Tensor) -> bool:
    """Whether it is what FSDP1 makes of a module's parameters.

    Not among :data:`NAMES`: a torch without FSDP1 has no tensors with this mark.
    """
    return getattr(tensor, "_is_flat_param", False) is True


# FSDP2 ---------------------------------------------------------------------------------------
#
# Not among :data:`NAMES`: to import it takes a second. tests/integration/test_sharded_options.py
# fails on a torch that has other names.


def fsdp_holds_gradients(part: Any) -> bool:
    """Whether a module of ``fully_shard`` has gradients of passes that reduced none
    (``set_requires_gradient_sync(False)``)."""
    for group in _fsdp_groups(part):
        for parameter in group.fsdp_params:
            if getattr(parameter, "unsharded_accumulated_grad", None) is not None:
                return True
            unsharded = getattr(parameter, "_unsharded_param", None)
            if unsharded is not None and unsharded.grad is not None:
                return True
    return False


def fsdp_is_root(part: Any) -> bool:
    """Whether torch has found, in the first forward pass, that no other module of ``fully_shard``
    is around this one. Before that ``reset_iter_state`` raises AttributeError (torch 2.13)."""
    return getattr(part._get_fsdp_state(), "_is_root", None) is True


def fsdp_settings(part: Any) -> list[str]:
    """The methods by which the script has changed how a module of ``fully_shard`` reduces."""
    changed = []
    for group in _fsdp_groups(part):
        if getattr(group, "gradient_divide_factor", None) is not None:
            changed.append("set_gradient_divide_factor")
        if getattr(group, "_all_reduce_hook", None) is not None:
            changed.append("set_all_reduce_hook")
        scatter = type(getattr(group, "_reduce_scatter_comm", None)).__name__
        if scatter not in ("DefaultReduceScatter", "NoneType"):
            changed.append("set_custom_reduce_scatter")
    return changed


def fsdp_originals(part: Any) -> list[tuple[torch.Tensor, object]]:
    """The sharded parameters of a module of ``fully_shard``, and what is the same for two of them
    that were one before; the latter is None where torch does not know it."""
    return [
        (parameter.sharded_param, getattr(parameter, "_orig_param_uid", None))
        for group in _fsdp_groups(part)
        for parameter in group.fsdp_params
    ]


def _fsdp_groups(part: Any) -> list[Any]:
    state = part._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # one, in older versions
        groups = [getattr(state, "_fsdp_param_group", None)]
    return [group for group in groups if group is not None]


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
