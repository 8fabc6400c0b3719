"""Models that are built again for each world: parts, containers, loading."""

from __future__ import annotations

import functools
import gc
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

import checkpoints
from checkpoints.commit import read_manifest
from checkpoints.loading import Progress
from checkpoints.manifest import Manifest
from checkpoints.tensors import BY_NAME, is_dtensor, local_of
from checkpoints.tree import unflatten
from elastic import torch_fsdp, torch_private
from elastic.errors import SYSTEM_CLOCK, ConfigError, TrainingError
from elastic.telemetry.log import get_logger
from elastic.train.backward import EarlierGradients, ForwardHooks
from elastic.train.sharded import FSDPParts

# Between two garbage collections while parameters of the last world are still in memory: during a
# collection by another thread, which takes milliseconds, ours returns at once.
GARBAGE_SLICE_S = 0.01

# ----------------------------------------------------------------------------
# Limits garbage collection between two worlds to objects younger than the replaced model.
#
# FSDP modules are part of reference cycles, so only the garbage collector frees a model. A full
# collection traverses the 250,000 objects of torch's modules in 0.13 s of CPU time [measured,
# torch 2.13], on all ranks of a node at once while training waits. So objects that exist before a
# model is built are frozen, and a collection takes 0.025 s.

_FULL_EVERY = 10  # worlds: older objects of the script may have become garbage, too

_freezes = 0


def freeze_older_objects() -> None:
    """Limit collections to objects created from now on. Called before a model is built."""
    global _freezes
    if _freezes % _FULL_EVERY == 0:
        unfreeze_all()
        gc.collect()
    _freezes += 1
    gc.freeze()


def unfreeze_all() -> None:
    """Include all objects in collections again."""
    gc.unfreeze()


# ----------------------------------------------------------------------------
# Checks the result of ``run.build``'s function: refuses models that would train incorrectly.

_LINES = """\
def build(mesh):
          model = Net()
          fully_shard(model, mesh=mesh)                       # the mesh of each world
          return model, torch.optim.AdamW(model.parameters()) # after it is sharded"""

_used_meshes: list[weakref.ref[Any]] = []  # by identity: DeviceMeshes of equal size are equal


def forget_mesh(mesh: Any) -> None:
    """Refuse models on ``mesh`` from now on: its world has ended."""
    _used_meshes[:] = [known for known in _used_meshes if known() is not None]
    _used_meshes.append(weakref.ref(mesh))


def check_sharding(
    modules: Mapping[str, nn.Module], optimizers: Mapping[str, torch.optim.Optimizer], mesh: Any
) -> None:
    """Raise ConfigError unless FSDP2 has sharded every trained parameter over ``mesh``, and every
    optimizer trains such parameters only."""
    if not modules:
        raise ConfigError("the function of run.build() returned no module", hint=_LINES)
    for name, module in modules.items():
        for path, parameter in module.named_parameters():
            _check_parameter(f"{name}: {path!r}", parameter, mesh)
        if _is_trained(module) and not _has_fsdp(module):
            raise ConfigError(
                f"run.build(): {name} is sharded, but not by fully_shard: its gradients would not "
                "be reduced over the ranks of the world, which see different samples",
                hint="fully_shard(model, mesh=mesh); tensor parallelism over the world recovers by "
                "a restart: docs/how-to/sharded.md",
            )
    known = {id(p) for module in modules.values() for p in module.parameters()}
    for name, optimizer in optimizers.items():
        _check_optimizer(name, _parameters_checks(optimizer), known)


def _check_parameter(place: str, parameter: torch.Tensor, mesh: Any) -> None:
    if not is_dtensor(parameter):
        if parameter.requires_grad:
            raise ConfigError(
                f"run.build(): {place} is trained but not sharded: its gradients would not be "
                "reduced over the world",
                hint=f"shard the whole model, or use run.wrap for a model that is not sharded\n"
                f"      {_LINES}",
            )
        return
    own: Any = parameter
    if any(own.device_mesh is used() for used in _used_meshes):
        raise ConfigError(
            f"run.build(): {place} is sharded over the mesh of an ended world",
            hint=f"use the mesh that the function is called with\n      {_LINES}",
        )
    if own.device_mesh.ndim != 1 or own.device_mesh.size() != mesh.size():
        raise ConfigError(
            f"run.build(): {place} is sharded over {own.device_mesh}, but the world has "
            f"{mesh.size()} ranks in one dimension",
            hint=f"use the mesh that the function is called with\n      {_LINES}",
        )


def _check_optimizer(name: str, parameters: Iterable[torch.Tensor], known: set[int]) -> None:
    for number, parameter in enumerate(parameters):
        if id(parameter) not in known:
            raise ConfigError(
                f"run.build(): parameter {number} of {name} is in no returned module: an optimizer "
                "created before the model was sharded would train parameters that sharding has "
                "replaced",
                hint=_LINES,
            )


def _is_trained(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def _has_fsdp(module: nn.Module) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")  # importing it takes a second
    return fsdp is not None and any(isinstance(m, fsdp.FSDPModule) for m in module.modules())


def _parameters_checks(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


# ----------------------------------------------------------------------------
# Objects that hold optimizers: wrappers of one (SAM), and containers of several, as trainers have
# for the parts of a model, or for two kinds of optimizers.
#
# Updates are recorded for each inner optimizer. So a container is replaced by its optimizers, if
# it has no other state.

_OF_TORCH = frozenset({"defaults", "state", "param_groups"})  # those of the class Optimizer


def inner_optimizers(tracked: object) -> dict[str, Optimizer]:
    """Inner optimizers (SAM's ``base_optimizer``) by name, if the outer state excludes their
    state."""
    if not isinstance(tracked, Optimizer):
        return {}
    if type(tracked).state_dict is not Optimizer.state_dict:
        return {}  # it includes them
    return {name: inner for name, inner in vars(tracked).items() if isinstance(inner, Optimizer)}


def optimizers_instead_of(container: object) -> list[Optimizer]:
    """The optimizers in the lists, tuples and dicts of a container that only passes ``step()`` on
    to them; empty if the object may have other state: a number, a tensor, a list of something else.
    """
    attributes = getattr(container, "__dict__", {})
    if isinstance(container, type) or not callable(getattr(container, "step", None)):
        return []
    if isinstance(container, Optimizer):
        if not only_passes_on(container):
            return []
        attributes = {n: v for n, v in attributes.items() if n not in _OF_TORCH and n[0] != "_"}
    if not all(map(_has_no_other_state, attributes.values())):
        return []
    return _contained(container)


def only_passes_on(container: Optimizer) -> bool:
    """Whether all parameters of an optimizer are those of optimizers that it contains: its
    ``step()`` calls theirs."""
    inner = {id(p) for one in _contained(container) for p in _parameters_containers(one)}
    return bool(inner) and all(id(p) in inner for p in _parameters_containers(container))


def holder_of(optimizer: Optimizer, tracked: Mapping[str, object]) -> tuple[str, str] | None:
    """The name of the tracked object that contains ``optimizer`` in a list, tuple or dict, and the
    expression for all of its optimizers."""
    for name, holder in tracked.items():
        for attribute, held in getattr(holder, "__dict__", {}).items():
            if any(one is optimizer for one in _optimizers_in(held)):
                values = ".values()" if isinstance(held, Mapping) else ""
                return name, f"{name}.{attribute}{values}"
    return None


def _contained(container: object) -> list[Optimizer]:
    optimizers = {id(o): o for held in vars(container).values() for o in _optimizers_in(held)}
    return list(optimizers.values())


def _optimizers_in(held: object) -> list[Optimizer]:
    return [one for one in _items_containers(held) if isinstance(one, Optimizer)]


def _items_containers(held: object) -> list[object]:
    if isinstance(held, Mapping):
        return list(held.values())
    return list(held) if isinstance(held, (list, tuple)) else []


def _has_no_other_state(value: object) -> bool:
    stateless = (str, bool, nn.Module, Optimizer)
    if value is None or callable(value) or isinstance(value, stateless):
        return True
    is_collection = isinstance(value, (Mapping, list, tuple))
    return is_collection and all(isinstance(one, stateless) for one in _items_containers(value))


def _parameters_containers(optimizer: Optimizer) -> Iterable[object]:
    return (p for group in optimizer.param_groups for p in group["params"])


# ----------------------------------------------------------------------------
# Weights gradients for uneven shares, because FSDP takes the mean over ranks.
#
# A rank with n of a step's N samples has the gradient of the mean over its n samples. FSDP's mean
# over W ranks is correct if each gradient is multiplied by W·n/N first: the result is the gradient
# of the mean over all N samples. Every gradient passes through the reduce-scatter exactly once,
# whatever the script has computed it from, so the factor is applied there. Equal shares need none.

_NEARLY = 1e-12


class ShareWeight:
    """The factor of a module's gradients in the current step. ``parts``: those that
    ``fully_shard`` was applied to."""

    def __init__(self, parts: Iterable[Any]) -> None:
        self._factor = 1.0
        self._parts = list(parts)
        for part in self._parts:
            torch_fsdp.fsdp_wrap_reduce_scatters(part, self._weighted)

    def _weighted(self, of_torch: Any) -> WeightedReduceScatter:
        return WeightedReduceScatter(of_torch, self.weigh)

    def begin(self, factor: float) -> None:
        """Begin a step; ``factor`` is 1 if all ranks have the same number of samples.

        Gradients of earlier steps that are reduced with those of this one are multiplied by the
        ratio of their factor to this one. Raises TrainingError if this one is 0.
        """
        factor = 1.0 if abs(factor - 1.0) <= _NEARLY else factor
        before, self._factor = self._factor, factor
        if factor == before:
            return
        held = [g for part in self._parts for g in torch_fsdp.fsdp_held_gradients(part)]
        if not held:
            return
        if factor == 0.0:
            raise TrainingError(
                "this rank has no samples in this step, but gradients of earlier ones, accumulated "
                "under set_requires_gradient_sync(False)",
                hint="use DataLoader(…, drop_last=True), and a global_batch of at least one sample "
                "per rank",
            )
        for gradient in held:
            _weigh(gradient, before / factor)

    def weigh(self, gradients: torch.Tensor) -> None:
        """Multiply gradients by the factor, in place."""
        _weigh(gradients, self._factor)


def _weigh(gradients: torch.Tensor, factor: float) -> None:
    if factor == 0.0:
        gradients.zero_()  # × 0 would keep a NaN of the filler sample
    elif factor != 1.0:
        gradients.mul_(factor)


class WeightedReduceScatter:
    """A reduce-scatter of FSDP (``FSDPModule.set_custom_reduce_scatter``) that weighs its input."""

    def __init__(self, reduce_scatter: Any, weigh: Callable[[torch.Tensor], None]) -> None:
        self._reduce_scatter = reduce_scatter
        self._weigh = weigh

    def allocate(
        self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Memory for an input or an output."""
        memory: torch.Tensor = self._reduce_scatter.allocate(size, dtype=dtype, device=device)
        return memory

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        self._weigh(input_tensor)
        work: dist.Work | None = self._reduce_scatter(
            output_tensor=output_tensor,
            input_tensor=input_tensor,
            group=group,
            op=op,
            async_op=async_op,
        )
        return work


# ----------------------------------------------------------------------------
# The objects that the function of ``run.build`` created for one world.

_COLLECTIONS = 3
_FACTORS = ("set_gradient_divide_factor", "set_reduce_scatter_divide_factor")

AGAIN = """\
call run.build in the function that run.retry calls, and use its result:
      def train():
          model, optimizer = run.build(build)
          for epoch in run.epochs(…): …
      run.retry(train)"""


class Built:
    """Modules, optimizers and other objects with state, by their names in checkpoints.

    ``returned`` is the function's result: a module, or a tuple, list or dict with modules,
    optimizers and other objects that have ``state_dict`` and ``load_state_dict``.

    Raises ConfigError for anything else, and for a model that is not sharded over ``mesh``.
    """

    def __init__(self, returned: object, mesh: Any, *, generation: int) -> None:
        self.generation = generation
        self.modules: dict[str, nn.Module] = {}
        self.tracked: dict[str, Any] = {}
        for item in _items_built(returned):
            self._add(item)
        self._parts = [FSDPParts(module) for module in self.modules.values()]
        check_sharding(self.modules, self.optimizers, mesh)
        self._mesh = mesh
        for parts in self._parts:
            parts.check("run.build()", _FACTORS)
            parts.refuse_settings((*_FACTORS, "set_custom_reduce_scatter"))
            for module in parts.outermost:  # a container has no forward pass of its own
                ForwardHooks(module)
        self._weights = [ShareWeight(parts.parts) for parts in self._parts]
        self.earlier = [
            EarlierGradients(functools.partial(tuple, list(module.parameters())), parts.gathered)
            for module, parts in zip(self.modules.values(), self._parts, strict=True)
        ]

    def _add(self, item: Any) -> None:
        if isinstance(item, nn.Module):
            self.modules[_free_name("model", self.modules)] = item
            return
        if contained := optimizers_instead_of(item):
            for one in contained:
                self._add(one)
            return
        if not (hasattr(item, "state_dict") and hasattr(item, "load_state_dict")):
            raise ConfigError(
                f"the function of run.build() returned a {type(item).__name__}, which has no "
                "state_dict and load_state_dict: its state would be lost in each new world",
                hint="return model, optimizer (and scheduler, …); create stateless objects in the "
                "function that run.retry calls",
            )
        is_optimizer = isinstance(item, torch.optim.Optimizer)
        name = "optimizer" if is_optimizer else type(item).__name__.lower()
        self.tracked[_free_name(name, self.tracked)] = item

    @property
    def optimizers(self) -> dict[str, torch.optim.Optimizer]:
        """The optimizers."""
        return {n: t for n, t in self.tracked.items() if isinstance(t, torch.optim.Optimizer)}

    # -- steps --------------------------------------------------------------------------------

    def begin_step(self, share: float, size: int) -> None:
        """Begin a step in which this rank processes the fraction ``share`` of the global batch."""
        for weight in self._weights:
            weight.begin(share * size)

    def accumulating(self, stepped: Collection[str]) -> list[str]:
        """Optimizers that have not stepped, and keep gradients for a later step."""
        waiting = {n: o for n, o in self.optimizers.items() if n not in stepped}
        if waiting and any(parts.holds_gradients for parts in self._parts):
            return list(waiting)
        return [
            name
            for name, optimizer in waiting.items()
            if any(p.grad is not None for group in optimizer.param_groups for p in group["params"])
        ]

    # -- the end of its world -------------------------------------------------------------------

    def retire(self) -> Remains:
        """End the world: any later use of its objects raises TrainingError.

        Drops all references to them. The result reports whether they are still in memory.
        """
        remains = Remains(self)
        for module in self.modules.values():
            for part in module.modules():
                part.register_forward_pre_hook(_refusal_of("model", self.generation), prepend=True)
            module.register_state_dict_pre_hook(  # type: ignore[no-untyped-call]
                _refusal_of("model", self.generation)
            )
        for optimizer in self.optimizers.values():
            optimizer.register_step_pre_hook(_refusal_of("optimizer", self.generation))
        self.modules.clear()
        self.tracked.clear()
        self._weights.clear()
        self._parts.clear()
        forget_mesh(self._mesh)
        torch_private.forget_meshes()
        self._mesh = None
        return remains


class Remains:
    """Objects of an ended world that may still be in memory."""

    def __init__(self, built: Built) -> None:
        self._generation = built.generation
        self._parameters = [
            weakref.ref(parameter)
            for module in built.modules.values()
            for parameter in module.parameters()
        ]

    def collect(self) -> int:
        """Free unreferenced objects. Returns the size in bytes of parameters still in memory."""
        gc.collect()
        if self._is_in_memory():
            unfreeze_all()
        for _ in range(_COLLECTIONS):
            if not self._is_in_memory():
                return 0
            # While another thread collects, gc.collect() returns at once: let that thread finish.
            SYSTEM_CLOCK.sleep(GARBAGE_SLICE_S)
            gc.collect()
        left = (p for reference in self._parameters if (p := reference()) is not None)
        return sum(_local_bytes(parameter) for parameter in left)

    def _is_in_memory(self) -> bool:
        return any(reference() is not None for reference in self._parameters)

    def warn_if_in_memory(self) -> None:
        """Warn if the script keeps a model of an earlier world, which needs memory as well."""
        if size_bytes := self.collect():
            get_logger().warning(
                "%.1f MiB of the model built in generation %d are still in memory, because the "
                "script refers to it from outside the function that run.retry calls (a global, an "
                "attribute, a closure): the next model needs as much again",
                size_bytes / (1 << 20),
                self._generation,
            )


def _items_built(returned: object) -> Iterator[Any]:
    if isinstance(returned, Mapping):
        yield from returned.values()
    elif isinstance(returned, (tuple, list)):
        yield from returned
    elif returned is None:
        raise ConfigError(
            "the function of run.build() returned None", hint="return model, optimizer"
        )
    else:
        yield returned


def _free_name(wanted: str, taken: Mapping[str, object]) -> str:
    """Module names as in ``run.wrap``: model, model1, …"""
    count = sum(1 for name in taken if name.rstrip("0123456789") == wanted)
    return wanted if count == 0 else f"{wanted}{count}"


def _refusal_of(what: str, generation: int) -> Any:
    def refuse(*_: object) -> NoReturn:
        raise TrainingError(
            f"this {what} was built in generation {generation}, which has ended: its shards and "
            "process group belong to that world",
            hint=AGAIN,
        )

    return refuse


def _local_bytes(parameter: Any) -> int:
    local = local_of(parameter) if is_dtensor(parameter) else parameter
    return int(local.untyped_storage().nbytes())


# ----------------------------------------------------------------------------
# Loads a checkpoint into newly built objects. Each rank reads its shards.
#
# The layout of the saving ranks is irrelevant: shards are read by their position in the complete
# tensor (:mod:`checkpoints.tensors`).


def load_shards(
    storage: checkpoints.Storage,
    name: str,
    *,
    modules: Mapping[str, nn.Module],
    tracked: Mapping[str, Any],
    check: Callable[[Mapping[str, Any]], object],
    progress: Progress | None = None,
) -> checkpoints.LoadResult:
    """Read and verify a checkpoint: the modules' tensors in place, everything else into memory.

    If optimizer state has the shape of its sharded parameter, this rank's shard is read. ``check``
    is called before anything changes, with a state whose tensors have no memory, and raises if the
    state does not fit. ``progress``: as in :func:`checkpoints.load`.

    Raises checkpoints.LoadError.
    """
    manifest = read_manifest(storage, name)
    check(unflatten(manifest.tree, lambda path, tensor: _without_memory(manifest, tensor)))
    into: dict[str, Any] = {
        "model": {key: _tensors(module.state_dict()) for key, module in modules.items()},
        "tracked": {},
    }
    for key, item in tracked.items():
        if isinstance(item, torch.optim.Optimizer):
            into["tracked"][key] = {"state": _room_for_state(manifest, key, item)}
    saved = unflatten(manifest.tree, lambda path, tensor: tensor).get("gradients", {})
    into["gradients"] = {
        key: {
            str(index): torch.zeros_like(parameter.detach())
            for index, parameter in enumerate(modules[key].parameters())
            if str(index) in entries
        }
        for key, entries in saved.items()
        if key in modules
    }
    return checkpoints.load(storage, name, into=into, strict=False, progress=progress)


def _tensors(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}


def _without_memory(manifest: Manifest, tensor: str) -> torch.Tensor:
    spec = manifest.tensors[tensor].spec
    return torch.empty(spec.shape, dtype=BY_NAME[spec.dtype].torch, device="meta")


@dataclass(frozen=True)
class _Saved:
    """The name of a tensor in the checkpoint."""

    name: str


def _room_for_state(
    manifest: Manifest, key: str, optimizer: torch.optim.Optimizer
) -> dict[int, dict[str, torch.Tensor]]:
    """Empty shards for an optimizer's state in the checkpoint, in its parameters' layout."""
    saved = unflatten(manifest.tree, lambda path, name: _Saved(name))["tracked"].get(key)
    state = saved.get("state") if isinstance(saved, Mapping) else None
    if not isinstance(state, Mapping):
        return {}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    room: dict[int, dict[str, torch.Tensor]] = {}
    for index, parameter in enumerate(parameters):
        entries = state.get(index)
        if not is_dtensor(parameter) or not isinstance(entries, Mapping):
            continue
        room[index] = {
            entry: torch.zeros_like(parameter.detach(), dtype=BY_NAME[spec.dtype].torch)
            for entry, tensor in entries.items()
            if isinstance(tensor, _Saved)
            and (spec := manifest.tensors[tensor.name].spec).shape == tuple(parameter.shape)
        }
    return room
