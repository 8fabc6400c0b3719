"""The process group that a script or a framework creates itself: deferred to the first world.

``torch.distributed.init_process_group()`` after ``elastic.join()`` only creates a placeholder: with
a rank and a size, but without connections. The first world replaces it by its own group.
"""

from __future__ import annotations

import datetime
import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from types import FrameType, ModuleType
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from elastic import torch_private
from elastic.errors import ConfigError, TrainingError
from elastic.groups.pending import have_ended
from elastic.groups.world import identity_before_worlds, is_launched
from elastic.telemetry.log import get_logger

# Bound here, because what scripts call is replaced.
init_process_group = dist.init_process_group
destroy_process_group = dist.destroy_process_group
_new_group = dist.new_group
_barrier = dist.barrier

_LATER = (
    "call it in a loop of the function that run.retry calls, or in run.on_world(function). Before "
    "that: `with run.node_first():` to prepare data once per node, run.on_main(function) for rank "
    "0, and run.state for values that all ranks share"
)
_WRAP = "model = run.wrap(model) replaces DistributedDataParallel(model)"


# ----------------------------------------------------------------------------
# The placeholder: torch's default group before the first world.
#
# A group rather than replaced functions: `is_initialized()`, `get_rank()` and `get_world_size()`
# then agree, however they are imported, and the usual `not is_initialized() or get_rank() == 0`
# does not make every rank the main one. Collectives are refused: nobody can provide their results.


class Placeholder(dist.ProcessGroup):
    """Has the rank and the size that frameworks read in their constructors; refuses collectives."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]

    def shutdown(self) -> None:
        """Do nothing: there are no connections."""

    @property
    def group_name(self) -> NoReturn:
        """Refused: DeviceMesh, fully_shard and functional collectives look a group up by it."""
        _refuse("a process group")


# Everything else in torch's class communicates, or begins to.
_LOCAL = frozenset(
    {"BackendType", "abort", "boxed", "name", "rank", "set_timeout", "size", "unbox"}
)


def _collectives() -> Iterator[str]:
    for name in dir(dist.ProcessGroup):
        if name in vars(Placeholder) or name in _LOCAL:
            continue
        is_public = not name.startswith("_") or name in torch_private.COLLECTIVES
        if is_public and callable(getattr(dist.ProcessGroup, name)):
            yield name


def _refusing(name: str) -> Callable[..., NoReturn]:
    def refuse(self: Placeholder, *args: Any, **options: Any) -> NoReturn:
        _refuse(name)

    return refuse


for _name in _collectives():
    setattr(Placeholder, _name, _refusing(_name))


def _refuse(call: str) -> NoReturn:
    called = _called(call)
    raise TrainingError(
        f"{called} before the first world: there are no other ranks yet",
        hint=_WRAP if called.startswith("DistributedDataParallel") else _LATER,
    )


def _called(call: str) -> str:
    """The function of torch that the script has called, and where."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _module(frame) in ("torch", "elastic"):
        call = _public_name(frame) or call
        frame = frame.f_back
    line = f" at {frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else ""
    return f"{call}(){line}"


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _public_name(frame: FrameType) -> str | None:
    """The name by which a script calls a function of torch; None for an inner one."""
    name = frame.f_code.co_name
    if name == "__init__":
        name = type(frame.f_locals.get("self")).__name__
    is_torchs = _module(frame) == "torch" and name != "wrapper"  # of torch's decorators
    return name if is_torchs and not name.startswith("_") else None


# ----------------------------------------------------------------------------
# The script's calls of torch's functions.


class _Completed(dist.Work):
    def wait(self, timeout: datetime.timedelta = datetime.timedelta(0)) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class DeferredGroup:
    """Handles the script's calls of the functions below, and sets the environment that frameworks
    read before the first world. One per process.

    ``owns_group``: whether the current default group is that of a world. ``has_entered``: whether
    the script has entered a world since the last call of its training function.
    """

    def __init__(
        self,
        device: torch.device,
        backend: str,
        owns_group: Callable[[], bool],
        has_entered: Callable[[], bool],
    ) -> None:
        self._device = device
        self._backend = backend
        self._owns_group = owns_group
        self._has_entered = has_entered
        self._has_warned = False
        self._is_installed = False
        self._rebound: list[tuple[ModuleType, str, Any]] = []
        self._placeholder: Placeholder | None = None
        self._rank, self._size, self._variables = identity_before_worlds(os.environ)
        self._of_agent: dict[str, str] = {}
        # What scripts pass that have read the environment: before elastic.join(), or after.
        self._known = {(-1, -1), (self._rank, self._size)}
        self._replaced = {
            init_process_group: self._replacing(init_process_group, self._init),
            destroy_process_group: self._replacing(destroy_process_group, self._destroy),
            _new_group: self._replacing(_new_group, self._create_subgroup),
            _barrier: self._replacing(_barrier, self._wait_for_all),
        }

    @property
    def is_pending(self) -> bool:
        """Whether torch's default group is the placeholder."""
        return self._placeholder is not None and dist.group.WORLD is self._placeholder

    def install(self) -> None:
        """Defer from now on."""
        self._is_installed = True
        self._rebound = _rebind(self._replaced)
        if is_launched(os.environ):
            self._of_agent = {name: os.environ.get(name, "") for name in self._variables}
            self._known.add((int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])))
            os.environ.update(self._variables)

    def end(self) -> None:
        """Remove the placeholder, and restore the agent's environment: a world begins.
        Idempotent."""
        os.environ.update(self._of_agent)
        self._of_agent = {}
        if self._placeholder is not None:
            have_ended([self._placeholder], "before the first world")
        if self.is_pending:
            destroy_process_group()
        self._placeholder = None

    def remove(self) -> None:
        """Undo all changes: the last world has ended. Idempotent."""
        self.end()
        for module, name, function in self._rebound:
            if getattr(module, name, None) is self._replaced[function]:
                setattr(module, name, function)
        self._rebound, self._is_installed = [], False

    def _replacing(self, function: Any, own: Callable[..., Any]) -> Any:
        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            # Modules that were imported meanwhile keep this function beyond `remove`.
            return (own if self._is_installed else function)(*args, **options)

        return call

    def _init(self, *args: Any, **options: Any) -> None:
        if dist.is_initialized() and not self.is_pending and not self._owns_group():
            init_process_group(*args, **options)  # raises
        self._check(**inspect.signature(init_process_group).bind(*args, **options).arguments)
        if dist.is_initialized():
            return
        self._placeholder = Placeholder(self._rank, self._size)
        torch_private.set_default_group(self._placeholder, self._backend)
        if self._rank == 0:
            get_logger().info(
                "init_process_group() is deferred: run.retry or the first loop creates the process "
                "group. Until then the rank is %d of %d, as in the largest world",
                self._rank,
                self._size,
            )

    def _destroy(self, group: Any = None) -> None:
        is_default = group is None or group is dist.group.WORLD
        if is_default and self._owns_group():
            return  # it belongs to the world: elastic destroys it, and may still need it
        destroy_process_group(group)

    def _create_subgroup(self, *args: Any, **options: Any) -> Any:
        if self.is_pending:
            _refuse("new_group")
        return _new_group(*args, **options)

    def _wait_for_all(
        self, group: Any = None, async_op: bool = False, *args: Any, **options: Any
    ) -> Any:
        """A barrier. It returns at once in a function of run.retry that has not entered its world
        yet: a joining node is not in a world there, so the others must not wait for it."""
        is_default = group is None or group is dist.group.WORLD
        if not (is_default and dist.is_initialized()) or self._has_entered():
            return _barrier(group, async_op, *args, **options)
        if self.is_pending and self._rank == 0 and not self._has_warned:
            self._has_warned = True
            get_logger().warning(
                "%s waits for no other rank: there is no world yet. If others need what comes "
                "before it, use `with run.node_first():`",
                _called("barrier"),
            )
        return _Completed() if async_op else None

    def _check(
        self,
        backend: str | None = None,
        rank: int = -1,
        world_size: int = -1,
        device_id: torch.device | int | None = None,
        **others: Any,
    ) -> None:
        """Raise ConfigError if a call contradicts the groups of the worlds. The launcher provides
        addresses, and options of the job the timeouts."""
        self._check_backend(backend)
        if isinstance(device_id, int):
            device_id = torch.device(self._device.type, device_id)
        if device_id is not None and device_id.type != "cpu" and device_id != self._device:
            raise ConfigError(
                f"init_process_group(device_id={str(device_id)!r}) in a worker that trains on "
                f"{str(self._device)!r}",
                hint="device_id=run.device, or without device_id",
            )
        known = set(self._known)
        if dist.is_initialized():
            known.add((dist.get_rank(), dist.get_world_size()))
        ranks, sizes = zip(*known, strict=True)
        if rank not in ranks or world_size not in sizes:
            raise ConfigError(
                f"init_process_group(rank={rank}, world_size={world_size}) in a worker of rank "
                f"{self._rank} of {self._size} before its first world",
                hint="omit rank and world_size: the world sets them",
            )

    def _check_backend(self, given: str | None) -> None:
        if given is None:
            return
        device = self._device.type
        asked = _backend_of(given, device)
        own = _backend_of(self._backend, device)
        if asked != own:
            raise ConfigError(
                f"init_process_group({given!r}): on this worker's device, {device}, that is "
                f"{asked or 'no backend'}, and the groups of worlds use {own}",
                hint=f"elastic.join(backend={given!r}) sets the backend of worlds"
                if asked
                else f"init_process_group({own!r}), or without a backend",
            )


def _backend_of(backend: str, device: str) -> str | None:
    """The backend for a device.

    >>> _backend_of("cpu:gloo,cuda:nccl", "cuda"), _backend_of("nccl", "cpu")
    ('nccl', None)
    """
    config = dist.distributed_c10d.BackendConfig(dist.Backend(backend))
    name = config.get_device_backend_map().get(device)
    return str(name) if name is not None else None


# By id, the modules that were searched before a fork and have none of the functions: a search reads
# about a million names, and a child process copies the memory of each.
_without_them: dict[int, Any] = {}


def note_modules_without() -> None:
    """Called in a process that is about to fork: its children search only other modules."""
    functions = {id(f) for f in (init_process_group, destroy_process_group, _new_group, _barrier)}
    for module in list(sys.modules.values()):
        if functions.isdisjoint(map(id, _names_of(module).values())):
            _without_them[id(module)] = module


def _rebind(others: Mapping[Any, Any]) -> list[tuple[ModuleType, str, Any]]:
    """Replace functions in every module that has imported them, except in this package. Returns
    what was there: module, name and function.

    ``from torch.distributed import init_process_group`` copies one (PyTorch's tutorials, nanoGPT).
    """
    by_id = {id(function): other for function, other in others.items()}
    places = []
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] == "elastic" or id(module) in _without_them:
            continue
        names = _names_of(module)
        if not by_id.keys().isdisjoint(map(id, names.values())):  # in C: most modules have none
            places += [(module, name, value) for name, value in names.items() if id(value) in by_id]
    for module, name, function in places:
        setattr(module, name, by_id[id(function)])
    return places


def _names_of(module: Any) -> dict[str, Any]:
    return dict(getattr(module, "__dict__", {}))
