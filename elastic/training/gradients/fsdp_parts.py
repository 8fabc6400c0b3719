"""The parts of a module that ``fully_shard`` was applied to, their reductions and their settings.

The harness depends on FSDP's mean over ranks. So settings that change that mean are refused, before
and after ``run.wrap`` and ``run.build``.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from elastic import torch_fsdp
from elastic.errors import ConfigError
from elastic.torch_private import reduce_scatter
from elastic.training.gradients.across import AcrossReduction
from elastic.training.gradients.control_flags import COUNT
from elastic.training.gradients.matching.order import Unit

_SETTINGS = {
    "set_gradient_divide_factor": "gradients are the mean over the global batch in every world, "
    "also those of experts that are sharded over a part of the ranks; remove the call, or multiply "
    "the loss instead",
    "set_reduce_scatter_divide_factor": "gradients are the mean over the global batch in every "
    "world; multiply the loss instead",
    "set_all_reduce_hook": "gradients would bypass the reduction over the replicas; change them "
    "after backward()",
    "set_custom_reduce_scatter": "gradients would bypass the weights of uneven shares; change them "
    "after backward()",
}


class FSDPParts:
    """The FSDP parts of a module, in the order of ``modules()``; none without FSDP2.

    A part is what one call of ``fully_shard`` manages: several modules, as in
    ``fully_shard([norm, head])``, are one part, represented by the first of them.
    """

    def __init__(self, module: nn.Module) -> None:
        fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # importing it takes a second
        named = () if fsdp is None else module.named_modules()
        self._modules: list[Any] = []
        self._places: dict[int, list[str]] = {}  # by part
        firsts: dict[int, Any] = {}  # by state, which the modules keep alive
        for place, each in named:
            if isinstance(each, fsdp.FSDPModule):
                self._modules.append(each)
                part = firsts.setdefault(id(torch_fsdp.fsdp_state(each)), each)
                self._places.setdefault(id(part), []).append(place)
        self.parts: list[Any] = list(firsts.values())
        self.reshard()
        self._names = {id(p): name for name, p in module.named_parameters()}

    def reshard(self) -> None:
        """Let modules have their sharded parameters, which optimizers use: a forward pass without a
        backward pass (a test of shapes) leaves the outermost part with its unsharded ones."""
        for part in self.parts:
            part.reshard()

    def label(self, part: Any, name: str) -> str:
        """A part in an error: its places in the module that is called ``name``, and its kind."""
        places = [f"{name}.{place}" if place else name for place in self._places[id(part)]]
        kind = type(part).__name__.removeprefix("FSDP")
        return f"{', '.join(places)} ({kind})" if len(places) == 1 else ", ".join(places)

    @property
    def outermost(self) -> list[nn.Module]:
        """The modules that were passed to ``fully_shard`` and are in no other one of them."""
        inner = {id(m) for each in self._modules for m in each.modules() if m is not each}
        return [each for each in self._modules if id(each) not in inner]

    @property
    def holds_gradients(self) -> bool:
        """Whether gradients of backward passes without reduction wait for one with reduction
        (``set_requires_gradient_sync``)."""
        return any(torch_fsdp.fsdp_held_gradients(part) for part in self.parts)

    def reset(self) -> None:
        """Reset the state of an interrupted step. A module without a forward pass has none: its
        world may have ended before its first step."""
        for part in self.parts:
            torch_fsdp.fsdp_reset(part)

    def check(self, call: str, settings: Iterable[str] = tuple(_SETTINGS)) -> None:
        """Raise ConfigError for settings that change the mean, and for a tied weight in two parts.

        torch raises for the latter in the first forward pass, without naming the weight.
        """
        refused = frozenset(settings)
        for part in self.parts:
            for name in torch_fsdp.fsdp_settings(part):
                if name in refused:
                    raise _refusal(f"{call} of a module with {name}()", name)
        self._check_ties(call)

    def _check_ties(self, call: str) -> None:
        owners: dict[object, str] = {}
        for part in self.parts:
            for parameter, original in torch_fsdp.fsdp_originals(part):
                name = self._names.get(id(parameter), "?")
                if original is not None and original in owners:
                    raise ConfigError(
                        f"{call} of a sharded module: {name!r} and {owners[original]!r} were one "
                        "tied weight, which fully_shard split into two parameters of two groups",
                        hint="shard the modules that share it together: "
                        "fully_shard([model.embed, model.head], mesh=…), or leave both to the "
                        "outermost call",
                    )
                owners[original] = name

    def refuse_settings(self, settings: Iterable[str] = tuple(_SETTINGS)) -> None:
        """From now on, these methods of the parts raise ConfigError."""
        for module in self._modules:
            for name in settings:
                if hasattr(module, name):
                    setattr(module, name, _refusing(name))


class PartReduction:
    """Weighs and reduces the gradients of one FSDP part: its reduce-scatter
    (``FSDPModule.set_custom_reduce_scatter``) and its hook after that.

    ``scale``: FSDP's mean over its own ranks, times this, is the mean over all ranks of the replica
    whose samples have contributed.
    """

    def __init__(self, reduction: AcrossReduction, scale: float) -> None:
        self._reduction = reduction
        self._scale = scale
        self.unit: Unit | None = None  # this part, in the order of all
        self._is_weighed = False

    def allocate(
        self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Like FSDP's, with room for control flags after it."""
        count = math.prod(size)
        return torch.empty(count + COUNT, dtype=dtype, device=device)[:count].view(size)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        self._reduction.weigh_local(input_tensor, self._scale)
        self._is_weighed = True
        return reduce_scatter(output_tensor, input_tensor, op=op, group=group, async_op=async_op)

    def reduce(self, gradients: torch.Tensor) -> None:
        """FSDP's hook, called with each result. A part that is sharded over one rank has no
        reduce-scatter (``foreach_reduce``, torch 2.13)."""
        if not self._is_weighed:
            self._reduction.weigh_local(gradients, self._scale)
        self._is_weighed = False
        self._reduction.reduce(gradients, self.unit)


def _refusing(name: str) -> Any:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise _refusal(f"model.{name}()", name)

    return refuse


def _refusal(call: str, name: str) -> ConfigError:
    return ConfigError(
        f"{call} is not possible: the harness reduces with FSDP's mean", hint=_SETTINGS[name]
    )
