"""Checks the result of ``run.build``'s function: refuses models that would train incorrectly."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from checkpoints.tensors.dtensors import is_dtensor
from elastic.errors import ConfigError

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
        _check_optimizer(name, _parameters(optimizer), known)


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


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]
