"""The objects that the function of ``run.build`` created for one world."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch import nn

from checkpoints.tensors.dtensors import is_dtensor, local_of
from elastic import torch_private
from elastic.clock import SYSTEM_CLOCK
from elastic.errors import ConfigError, TrainingError
from elastic.telemetry.log import get_logger
from elastic.training.gradients.forward_phase import ForwardHooks
from elastic.training.gradients.fsdp_parts import FSDPParts
from elastic.training.rebuilding import garbage
from elastic.training.rebuilding.checks import check_sharding, forget_mesh
from elastic.training.rebuilding.containers import optimizers_instead_of
from elastic.training.rebuilding.shares import ShareWeight
from elastic.tuning.worker_intervals import GARBAGE_SLICE_S

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
        for item in _items(returned):
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

    def frozen_indices(self) -> dict[str, list[int]]:
        """For each module, the indices of the parameters that are not trained."""
        return {
            name: [i for i, p in enumerate(module.parameters()) if not p.requires_grad]
            for name, module in self.modules.items()
        }

    def set_frozen(self, name: str, indices: list[int]) -> None:
        """Train all parameters of a module except these."""
        frozen = set(indices)
        for index, parameter in enumerate(self.modules[name].parameters()):
            if parameter.requires_grad is (index in frozen):
                parameter.requires_grad_(index not in frozen)

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
            garbage.unfreeze_all()
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


def _items(returned: object) -> Iterator[Any]:
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
