"""Every private name of torch that is used, with what is expected of it."""

from __future__ import annotations

import datetime
import functools
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from importlib import import_module
from operator import attrgetter
from types import CodeType, FunctionType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.amp.grad_scaler import GradScaler
from torch.autograd import Variable
from torch.distributed import distributed_c10d
from torch.utils.data import DataLoader, dataloader

from elastic.errors import ConfigError

# ----------------------------------------------------------------------------
# The versions of torch that this package was tested with, and the message for other ones.
#
# The only place for these numbers: the messages, ``pyproject.toml`` and ``docs/compatibility.md``
# agree with it (``tests/unit/repository/test_torch_versions.py``). ``make compat`` verifies them.
# Imports nothing but :mod:`elastic.errors`, so that both sides of the control plane may use it.

OLDEST, NEWEST = "2.11", "2.15"
SUPPORTED = f"{OLDEST} to {NEWEST}"
NEWEST_NEEDS_PYTHON = (3, 11)


def lacks(version: object, names: str, needed_by: str) -> ConfigError:
    """The error to raise if the installed torch lacks some of torch's private names.

    Args:
        version: of the installed torch.
        names: the missing ones, as torch spells them.
        needed_by: what cannot work without them.
    """
    python = ".".join(map(str, NEWEST_NEEDS_PYTHON))
    of_python = (
        f"; {NEWEST} needs Python {python}" if sys.version_info < NEWEST_NEEDS_PYTHON else ""
    )
    return ConfigError(
        f"torch {version} lacks what {needed_by} needs: {names}",
        hint=f"use a torch from {SUPPORTED} (pip install 'torch>={OLDEST},<{after(NEWEST)}'"
        f"{of_python}), or a newer torch-elastic-harness",
    )


def is_supported(version: object) -> bool:
    """Whether a torch of this version was run with this package.

    >>> [is_supported(v) for v in ("2.10.1", "2.11.0", "2.15.0+cpu", "2.16.0a0+git", "3.0")]
    [False, True, True, False, False]
    """
    return _release(OLDEST) <= _release(str(version)) <= _release(NEWEST)


def after(version: str) -> str:
    """The minor version that follows.

    >>> after("2.15")
    '2.16'
    """
    major, minor = _release(version)
    return f"{major}.{minor + 1}"


def _release(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


# ----------------------------------------------------------------------------
# Every private name of torch on which workers depend, and nothing else.
#
# Differences between torch's versions are handled here, too. ``join()`` calls :func:`check`: if
# torch lacks a name, users get one error message before training, not an ``AttributeError`` in the
# middle of a recovery. ``tests/contract/test_torch_private_names.py`` fails if another module uses
# one. The agent's names are in :mod:`elastic.launcher.torch_agent`, those of checkpoints in
# :mod:`checkpoints.torch_private`, NCCL's where they are used, and FSDP's in
# :mod:`elastic.torch_fsdp`.
#
# Imports torch alone.

# By dotted path; attributes of instances are listed if the class declares them.
NAMES = (
    # The process group of a world.
    "torch.distributed.distributed_c10d._abort_process_group",
    "torch.distributed.distributed_c10d._get_default_group",
    "torch.distributed.distributed_c10d._get_default_store",
    "torch.distributed.distributed_c10d._update_default_pg",
    "torch.distributed.distributed_c10d._world.group_count",
    "torch.distributed.distributed_c10d._world.pg_group_ranks",
    "torch.distributed.distributed_c10d._world.pg_map",
    "torch.distributed.distributed_c10d._world.pg_names",
    "torch.distributed.ProcessGroup._device_types",
    "torch.distributed.ProcessGroup._get_backend",
    "torch.distributed.ProcessGroup._get_sequence_number_for_group",
    "torch.distributed.Work._get_op_type",
    # DDP's reducer, and the methods of DDP that ElasticDDP replaces.
    "torch.distributed.Reducer._rebuild_buckets",
    "torch.distributed.Reducer._remove_autograd_hooks",
    "torch.distributed.Reducer._update_process_group",
    "torch.nn.parallel.DistributedDataParallel._distributed_broadcast_coalesced",
    "torch.nn.parallel.DistributedDataParallel._match_all_reduce_for_bwd_pass",
    "torch.nn.parallel.DistributedDataParallel._register_builtin_comm_hook",
    "torch.nn.parallel.DistributedDataParallel._set_static_graph",
    # The backward pass.
    "torch._C._current_graph_task_id",
    "torch.autograd._engine_run_backward",
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
    "torch.utils.data.dataloader._MultiProcessingDataLoaderIter._reset",
    # The gradient scaler.
    "torch.amp.grad_scaler._refresh_per_optimizer_state",
)
# Used to abort communicators if collectives run on a stream; NCCL's backend has _group_start and
# _group_end up to torch 2.14 (elastic/groups/group.py).
ON_STREAM = (
    "torch.distributed.ProcessGroup._end_coalescing",
    "torch.distributed.ProcessGroup._start_coalescing",
)
# Attributes of instances. Module.__init__ creates the tables of hooks; they belong to the user.
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
_OF_A_MODULE = (*_HOOK_TABLES, "_buffers", "_non_persistent_buffers_set")
_OF_A_SCALER = ("_device", "_growth_tracker", "_per_optimizer_states", "_scale")
_SCALES = ("_scale", "_growth_tracker")


def check() -> None:
    """Raise a ConfigError that lists all names that the installed torch lacks, if any."""
    missing = [path for path in NAMES if _found(path) is None]
    if not hasattr(dist, "set_timeout") and not hasattr(distributed_c10d, "_set_pg_timeout"):
        missing.append("torch.distributed.set_timeout")
    scaler = GradScaler("cpu", enabled=True)
    missing += [f"GradScaler.{name}" for name in _OF_A_SCALER if not hasattr(scaler, name)]
    module = torch.nn.Module()
    missing += [f"Module.{name}" for name in _OF_A_MODULE if not hasattr(module, name)]
    _refuse(missing)


def check_streams() -> None:
    """Like :func:`check`, for the additional names that collectives on a stream require."""
    missing = [path for path in ON_STREAM if _found(path) is None]
    legacy = getattr(distributed_c10d, "ProcessGroupNCCL", None)  # not in builds without CUDA
    if legacy is not None and not hasattr(legacy, "supports_coalescing"):
        calls = ("_group_start", "_group_end")
        missing += [f"ProcessGroupNCCL.{name}" for name in calls if not hasattr(legacy, name)]
    _refuse(missing)


def _refuse(missing: list[str]) -> None:
    if missing:
        raise lacks(torch.__version__, ", ".join(missing), "elastic.join()")


def _found(path: str) -> Any:
    """The object at a dotted path; None if there is none."""
    parts = path.split(".")
    target: Any = import_module(parts[0])
    for depth, part in enumerate(parts[1:], start=2):
        if not hasattr(target, part):
            with suppress(ImportError):
                import_module(".".join(parts[:depth]))
        target = getattr(target, part, None)
        if target is None:
            return None
    return target


# The process group of a world ----------------------------------------------------------------


def set_group_timeout(timeout: datetime.timedelta) -> None:
    """Set the timeout of all later collectives of the default group."""
    if hasattr(dist, "set_timeout"):  # torch 2.14
        dist.set_timeout(timeout)
    else:
        distributed_c10d._set_pg_timeout(timeout)


def set_backend_timeout(backend: Any, timeout: datetime.timedelta) -> None:
    """Set the timeout of all later collectives of a backend that is in none of torch's groups."""
    if hasattr(backend, "set_timeout"):  # torch 2.13
        backend.set_timeout(timeout)
    else:
        backend._set_default_timeout(timeout)


def default_group() -> dist.ProcessGroup:
    """The default group itself, for callers that keep it alive."""
    return distributed_c10d._get_default_group()


# Collectives whose methods of torch's groups have private names.
COLLECTIVES = ("_allgather_base", "_reduce_scatter_base", "_start_coalescing")


def set_default_group(group: dist.ProcessGroup, backend: str) -> None:
    """Make an object of a subclass of ``dist.ProcessGroup`` the default group, without a store.

    ``init_process_group`` could do it with a registered backend; but this name would be what
    ``get_backend()`` returns, and torch does not forget a registered backend.
    """
    world: Any = distributed_c10d._world
    world.pg_map[group] = (backend, dist.HashStore())  # type: ignore[attr-defined]
    world.pg_names[group] = ""
    world.pg_group_ranks[group] = {rank: rank for rank in range(group.size())}
    distributed_c10d._update_default_pg(group)


def forget_meshes() -> None:
    """Clear DTensor's cache of meshes: a DeviceMesh equals any other one with as many ranks, and
    the result of an operation carries the mesh with which it was first called [measured, torch
    2.13: a Parameter made of a DTensor on a new mesh is on the old one]."""
    if "torch.distributed.tensor" in sys.modules:  # importing it takes a second
        debug = import_module("torch.distributed.tensor.debug")
        clear = getattr(debug, "_clear_sharding_prop_cache", None)
        if clear is not None:
            clear()


def forget_group_count() -> None:
    """Name the next default group like the first: all ranks must use the same name."""
    distributed_c10d._world.group_count = 0


def collectives_begun() -> int:
    """How many collectives of the default group this rank has begun.

    0 without a group, and if the backend does not count: gloo and NCCL do, a registered backend
    need not (torch/csrc/distributed/c10d/Backend.hpp, getSequenceNumberForGroup).
    """
    if not dist.is_initialized():
        return 0
    group: Any = distributed_c10d._get_default_group()
    try:
        return int(group._get_sequence_number_for_group())
    except RuntimeError:
        return 0


def collectives_of_groups() -> dict[str, int] | None:
    """The same for each group, by name; None if one of them does not count."""
    counts: dict[str, int] = {}
    for group, name in list(distributed_c10d._world.pg_names.items()):
        counted: Any = group
        try:
            counts[name] = int(counted._get_sequence_number_for_group())
        except RuntimeError:
            return None
    return counts


def groups() -> list[dist.ProcessGroup]:
    """All groups of this process."""
    return list(distributed_c10d._world.pg_names)


def default_group_name() -> str:
    """The name of the default group in :func:`collectives_of_groups`."""
    return distributed_c10d._world.pg_names[distributed_c10d._get_default_group()]


def error_of(work: Any) -> BaseException | None:
    """The error of a collective that torch has already detected; does not wait for it.

    ``Work.exception`` is deprecated, with one warning per process on stderr; but ``Work.wait``,
    which raises the error, first aborts the communicator (ProcessGroupNCCL.cpp,
    ``WorkNCCL::wait``), in the calling thread and without a deadline.
    """
    try:
        error = work.exception()
    except (AttributeError, NotImplementedError, TypeError, RuntimeError):
        return None  # another version's binding: wait() raises it
    return error if isinstance(error, BaseException) else None


def operation_of(work: Any) -> int:
    """The operation, as c10d's OpType; -1 if the work does not have it."""
    try:
        return int(work._get_op_type())
    except (AttributeError, TypeError, RuntimeError):  # a work that was created in Python
        return -1


def flight_recorder_dumps() -> tuple[bytes, ...]:
    """The content of torch's flight recorders, as JSON: nothing has to be unpickled, and no stacks
    are taken. NCCL has its own, which exists only if torch has NCCL
    (torch/csrc/distributed/c10d/init.cpp)."""
    c10d = import_module("torch._C._distributed_c10d")
    names = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
    return tuple(bytes(getattr(c10d, name)()) for name in names if hasattr(c10d, name))


def default_store() -> Any:
    """The store of the default group."""
    return distributed_c10d._get_default_store()


def has_subgroups() -> bool:
    """Whether there are other groups than the default one."""
    return len(distributed_c10d._world.pg_names) > 1


def abort_groups() -> None:
    """End all groups without waiting for operations that are queued on a device."""
    distributed_c10d._abort_process_group()


# DDP's reducer -------------------------------------------------------------------------------


def give_group(reducer: Any, group: dist.ProcessGroup) -> None:
    """Make the reducer use this group for its collectives."""
    reducer._update_process_group(group)


def remove_hooks(reducer: Any) -> None:
    """Remove the reducer's hooks from the parameters."""
    reducer._remove_autograd_hooks()


def prepare_again(reducer: Any, losses: Sequence[torch.Tensor]) -> None:
    """Prepare the reducer for another backward pass, as DDP does in its forward pass. ``losses``:
    those of the pass, if the reducer is to find unused parameters."""
    reducer._rebuild_buckets()  # after the first pass, once: it records the order of gradients
    reducer.prepare_for_backward(list(losses))


# Sharded models ------------------------------------------------------------------------------


def reduce_scatter(output: torch.Tensor, given: torch.Tensor, **options: Any) -> dist.Work | None:
    """Reduce-scatter of whole tensors; torch 2.13 renamed it, and warns about the old name."""
    named: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    work: dist.Work | None = named(output, given, **options)
    return work


def strided_shard(dim: int, split_factor: int) -> Any:
    """The placement of FSDP over tensor parallelism. Not among :data:`NAMES`: if torch has another
    one, no tensor has this."""
    types = import_module("torch.distributed.tensor.placement_types")
    return types._StridedShard(dim, split_factor=split_factor)


# The backward pass ---------------------------------------------------------------------------


NO_BACKWARD = -1


def current_backward() -> int:
    """A unique number for each backward pass; :data:`NO_BACKWARD` outside of one."""
    return torch._C._current_graph_task_id()


def watch_backward(begin: Callable[[Sequence[Any]], Callable[[bool], object]]) -> None:
    """Call ``begin`` with the losses before each ``backward()``, and its result at the end with
    whether the pass has succeeded. Not for ``torch.autograd.grad``, which adds to no gradients."""
    module: Any = torch.autograd
    of_torch = module._engine_run_backward

    @functools.wraps(of_torch)
    def watched(losses: Sequence[Any], *args: Any, **options: Any) -> Any:
        if not options.get("accumulate_grad"):
            return of_torch(losses, *args, **options)
        end, has_succeeded = begin(losses), False
        try:
            result = of_torch(losses, *args, **options)
            has_succeeded = True
        finally:
            end(has_succeeded)
        return result

    module._engine_run_backward = watched


def call_after_backward(callback: Callable[[], None]) -> None:
    """Call back at the end of the current backward pass, before callbacks queued later."""
    Variable._execution_engine.queue_callback(callback)


# Modules and tensors -------------------------------------------------------------------------

_version_of = attrgetter("_version")


def hook_tables(module: torch.nn.Module) -> dict[str, Any]:
    """The hooks of a module, as they are in its ``__dict__``."""
    return {name: module.__dict__[name] for name in _HOOK_TABLES if name in module.__dict__}


_HOOKS_OF = {
    kind: tuple(name for name in _HOOK_TABLES if kind in name) for kind in ("forward", "backward")
}


def hooks_of_pass(module: torch.nn.Module, kind: str) -> list[Any]:
    """A module's own hooks that are called in a pass, ``"forward"`` or ``"backward"``."""
    tables = [module.__dict__.get(name) for name in _HOOKS_OF[kind]]
    return [hook for table in tables if isinstance(table, dict) for hook in table.values()]


def hooks_of(owner: object) -> list[dict[int, Any]]:
    """The tables of the hooks of a module, tensor or optimizer, by the number of each hook."""
    tables: Iterable[Any]
    if isinstance(owner, torch.nn.Module):
        tables = hook_tables(owner).values()
    elif isinstance(owner, torch.Tensor):
        tables = (owner._backward_hooks, owner._post_accumulate_grad_hooks)
    else:
        tables = (table for name, table in vars(owner).items() if name.endswith("_hooks"))
    return [table for table in tables if isinstance(table, dict)]


def compiled(module: torch.nn.Module) -> torch.nn.Module | None:
    """The module of which this one is ``torch.compile(module)``; None if it is none."""
    return module._modules.get("_orig_mod")


def buffers_of(module: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    """A module's own buffers, without those of its submodules."""
    return module._buffers


def transient_buffers_of(module: torch.nn.Module) -> set[str]:
    """The names of a module's own buffers that are not in its ``state_dict``."""
    return module._non_persistent_buffers_set


def changes_saved_state(optimizer: torch.optim.Optimizer) -> bool:
    """Whether hooks add to the optimizer's ``state_dict``."""
    return bool(optimizer._optimizer_state_dict_post_hooks)


def has_step_pre_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether functions run before the optimizer's step, and before its closure."""
    return bool(optimizer._optimizer_step_pre_hooks)


def parameters_of(module: torch.nn.Module) -> dict[str, torch.nn.Parameter | None]:
    """A module's own parameters, without those of its submodules."""
    return module._parameters


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
    """Allocate shared memory, as a data worker does to send a batch."""
    torch.UntypedStorage._new_shared(1)  # type: ignore[no-untyped-call]


def iterates_as_torch_does(kind: type[DataLoader[Any]]) -> bool:
    """Whether this class of loaders creates and keeps its iterators like ``DataLoader``."""
    return (kind.__iter__, kind._get_iterator) == (DataLoader.__iter__, DataLoader._get_iterator)


def unread_tasks(loader: DataLoader[Any]) -> tuple[Any, ...]:
    """The queues from which the loader's current workers read their tasks, if it has any."""
    return tuple(getattr(loader._iterator, "_index_queues", ()))


def watch_batches(
    enter: Callable[[Any], Any],
    leave: Callable[[Any], object],
    *,
    enter_reset: Callable[[Any], Any] | None = None,
) -> None:
    """Call ``enter`` with the iterator before any DataLoader of this process waits for its data
    workers, and ``leave`` with what it returned afterwards. ``enter_reset``: instead of ``enter``,
    before another pass with kept workers.

    It waits for a batch, and, before another pass, for kept workers to end the former one. (That
    they are started does not count: pickling a data set may take minutes.)
    """
    kind: Any = dataloader._BaseDataLoaderIter
    of_workers: Any = dataloader._MultiProcessingDataLoaderIter
    next_batch, reset = kind.__next__, of_workers._reset

    @functools.wraps(next_batch)
    def watched_next(iterator: Any) -> Any:
        before = enter(iterator)
        try:
            return next_batch(iterator)
        finally:
            leave(before)

    @functools.wraps(reset)
    def watched_reset(iterator: Any, loader: Any, first_iter: bool = False) -> None:
        if first_iter:
            reset(iterator, loader, first_iter)
            return
        before = (enter_reset or enter)(iterator)
        try:
            reset(iterator, loader, first_iter)
        finally:
            leave(before)

    kind.__next__, of_workers._reset = watched_next, watched_reset


def watch_loaders(begin: Callable[[DataLoader[Any]], object]) -> None:
    """Call ``begin`` with any DataLoader of this process before it starts its data workers."""
    kind: Any = DataLoader
    get_iterator = kind._get_iterator

    @functools.wraps(get_iterator)
    def watched(loader: DataLoader[Any]) -> Any:
        begin(loader)
        return get_iterator(loader)

    kind._get_iterator = watched


def forget_iterator(loader: DataLoader[Any]) -> None:
    """Drop the iterator that a loader with persistent workers keeps."""
    loader._iterator = None


# The gradient scaler -------------------------------------------------------------------------


def scales_of(scaler: GradScaler) -> dict[str, Any]:
    """The scale and the growth tracker as stored: on the device, or still plain numbers."""
    return {name: getattr(scaler, name) for name in _SCALES}


def set_scales(scaler: GradScaler, scales: dict[str, Any]) -> None:
    """Restore copies of the result of :func:`scales_of`, and reset the state that the scaler keeps
    per optimizer in a step."""
    for name, value in scales.items():
        current = getattr(scaler, name)
        on = current.device if isinstance(current, torch.Tensor) else scaler._device
        setattr(scaler, name, None if value is None else value.detach().clone().to(on))
    refresh: Any = _found("torch.amp.grad_scaler._refresh_per_optimizer_state")
    scaler._per_optimizer_states = defaultdict(refresh)


# torch.compile -------------------------------------------------------------------------------


def exclude_from_dynamo(code: CodeType, *, is_recursive: bool) -> None:
    """Have ``torch.compile`` skip this function, and what it calls if ``is_recursive``.

    Like ``torch._dynamo.eval_frame.skip_code``. Not among :data:`NAMES`: a torch with other names
    still trains; compiled models then fail with Dynamo's own message.
    """
    with suppress(ImportError, AttributeError):
        from torch._C._dynamo import eval_frame

        action = eval_frame._FrameAction
        called = action.SKIP if is_recursive else action.DEFAULT
        strategy = eval_frame._FrameExecStrategy(action.SKIP, called)
        eval_frame.set_code_exec_strategy(code, strategy)


def end_dynamo_graph(function: Callable[..., Any], reason: str) -> None:
    """Have ``torch.compile`` end its graph where a compiled function calls this one, instead of
    tracing the call. ``reason`` is shown with ``fullgraph=True``, which allows no end.

    Like ``torch.compiler.disable`` without the wrapper, which imports Dynamo.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = reason  # type: ignore[attr-defined]


# ----------------------------------------------------------------------------
# Excludes functions of this package from ``torch.compile``.
#
# Compiled models, optimizer steps and training functions of the script run this package's Python:
# in forward passes, in hooks of optimizers, and where they call the API. Dynamo would trace it,
# and fail ("ProcessGroup name not set") or turn its decisions into constants. So each function
# that a compiled function of the script can reach is excluded: it ends the graph, and runs as it
# is. ``torch.compiler.disable`` has the same effect, but imports Dynamo, which takes seconds that
# most jobs need not spend.

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


def not_compiled(function: F) -> F:
    """Run ``function`` uncompiled, including the functions that it calls."""
    _skip(function, is_recursive=True)
    end_dynamo_graph(
        function,
        "torch-elastic-harness runs it uncompiled. Without fullgraph=True, the code around it is "
        "compiled",
    )
    return function


def not_compiled_methods(kind: type[T]) -> type[T]:
    """Run all methods of a class uncompiled. Getters of properties are methods, too."""
    for member in vars(kind).values():
        function = member.fget if isinstance(member, property) else member
        if isinstance(function, FunctionType):
            not_compiled(function)
    return kind


def not_compiled_itself(function: F) -> F:
    """Run ``function`` uncompiled; the functions that it calls may be compiled (a module's own
    forward)."""
    _skip(function, is_recursive=False)
    return function


def _skip(function: Callable[..., Any], *, is_recursive: bool) -> None:
    exclude_from_dynamo(function.__code__, is_recursive=is_recursive)
