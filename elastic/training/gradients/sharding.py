"""Detects sharded models by their tensors, and refuses them where they cannot work.

An in-process change of the world destroys its group and builds another one. DTensors (FSDP2's
``fully_shard``, ``parallelize_module``, anything on a DeviceMesh) and FSDP1 keep the groups that
they were created with, and a joining rank has no shards: neither DDP nor the transfer of state
between ranks can handle them. FSDP2 over the replicas of ``elastic.join(mesh=…)`` is supported
(:mod:`elastic.training.gradients.sharded`); all others recover by a restart of the workers,
without ``elastic.join``: every error names docs/how-to/sharded.md and the lines to use.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from checkpoints.tensors.dtensors import is_dtensor, local_of
from elastic import torch_fsdp, torch_private
from elastic.errors import ConfigError
from elastic.world.mesh import STAGES, ReplicaMesh

_INSTEAD = """\
FSDP2 in replicas recovers in process with elastic.join(mesh={"shard": 2}) and \
run.wrap(fully_shard(model, mesh=run.mesh["shard"])). FSDP2 over the whole world is built in each:
      def build(mesh):
          model = Net(); fully_shard(model, mesh=mesh)
          return model, torch.optim.AdamW(model.parameters())
      def train():
          model, optimizer = run.build(build)                     # in place of run.wrap, run.track
          for epoch in run.epochs(…): …
      run.retry(train)
Any other sharded model recovers by a restart of its workers (docs/how-to/sharded.md has complete \
loops). Replace elastic.join, run.wrap, run.track and run.retry by
      dist.init_process_group()                  # torchrun --rdzv-backend=etcd …
      fully_shard(model)                         # or parallelize_module(model, mesh, plan)
      optimizer = torch.optim.AdamW(model.parameters())           # after the model is sharded
      state = {"model": get_model_state_dict(model),
               "optimizer": get_optimizer_state_dict(model, optimizer)}
      if found := checkpoints.latest(folder).checkpoint:
          checkpoints.load(folder, found.name, into=state, group=dist.group.WORLD)
          set_optimizer_state_dict(model, optimizer, state["optimizer"])
    or train it unsharded with DDP: call run.wrap(model) without sharding it."""


class CurrentParameters:
    """The parameters of a module, read from where it keeps them: ``load_state_dict(assign=True)``
    replaces some. To walk a large module in every pass would take more than a millisecond.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._slots: list[tuple[dict[str, nn.Parameter | None], str]] = []
        self.find()

    def find(self) -> None:
        """Find where the module's parts keep their parameters."""
        self._slots = [
            (own, name)
            for part in self._module.modules()
            for own in (torch_private.parameters_of(part),)
            for name, parameter in own.items()
            if parameter is not None
        ]

    def read(self) -> list[nn.Parameter]:
        """The current parameters, each once, in the order of ``module.parameters()``."""
        found = [own.get(name) for own, name in self._slots]
        return list({id(p): p for p in found if p is not None}.values())


def refuse_module(call: str, module: nn.Module, *, stale: Iterable[str] = ()) -> None:
    """Raise ConfigError if ``module`` is sharded, naming the place.

    ``stale``: names of optimizers with parameters that no module has.
    """
    if found := _sharded_part(module):
        raise refusal(f"{call}: {found}{_created_before(stale)}")


def refuse_optimizer(call: str, optimizer: torch.optim.Optimizer) -> None:
    """Raise ConfigError if ``optimizer`` has a sharded parameter, naming it."""
    if found := sharded_parameter(optimizer):
        raise refusal(f"{call}: its {found}")


def refuse_tensors(call: str, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise ConfigError if one of these is sharded, naming it."""
    for name, tensor in tensors.items():
        if found := _description(tensor):
            raise refusal(f"{call}: {name} is {found}")


def refuse_stale_optimizers(module: str, names: Iterable[str]) -> None:
    """Raise ConfigError if there are tracked optimizers of parameters that no module has."""
    if stale := list(names):
        raise ConfigError(
            f"run.track({stale[0]}=…): the optimizer's parameters are not in the wrapped {module}: "
            "they were created before it was sharded, and get no gradients",
            hint="create the optimizer after fully_shard: torch.optim.AdamW(model.parameters())",
        )


def local_value(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor: its shard, or all of it."""
    return local_of(tensor) if is_dtensor(tensor) else tensor


def like(parameter: Any, local: torch.Tensor) -> torch.Tensor:
    """A tensor sharded like a parameter, of which ``local`` is this rank's part."""
    if not is_dtensor(parameter):
        return local
    from torch.distributed.tensor import DTensor

    whole: torch.Tensor = DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return whole


def ranks_along(device_mesh: Any) -> list[list[int]]:
    """For each dimension of a DeviceMesh, the ranks along it, including this one.

    Names would not do: a flattened dimension has a different one.
    """
    place, ranks = device_mesh.get_coordinate(), device_mesh.mesh
    if place is None:  # this rank is not in the mesh
        return [[]]
    every = slice(None)
    places = [(*place[:i], every, *place[i + 1 :]) for i in range(device_mesh.ndim)]
    return [ranks[row].tolist() for row in places]


def sharded_over(parameter: Any, mesh: ReplicaMesh) -> frozenset[str]:
    """The dimensions of the replica along which ranks hold different parts of a parameter, or
    parameters of different stages."""
    stages = frozenset({STAGES}) if mesh.stages > 1 else frozenset()
    if not is_dtensor(parameter):
        return stages
    along = zip(parameter.placements, ranks_along(parameter.device_mesh), strict=True)
    found = [mesh.dims_along(ranks) for placement, ranks in along if not placement.is_replicate()]
    return stages.union(*(dims for dims in found if dims is not None))


def is_sharded(module: nn.Module) -> bool:
    """Whether a module has sharded parts."""
    return bool(_sharded_part(module))


def sharded_parameter(optimizer: torch.optim.Optimizer) -> str:
    """The first sharded parameter of an optimizer, in words; "" if there is none."""
    for number, group in enumerate(optimizer.param_groups):
        names = group.get("param_names") or ()
        for index, parameter in enumerate(group["params"]):
            if found := _description(parameter):
                name = repr(names[index]) if index < len(names) else f"{index} of group {number}"
                return f"parameter {name} is {found}"
    return ""


def refusal(what: str) -> ConfigError:
    """The error for a sharded model, with the lines that replace the call."""
    return ConfigError(
        f"{what}; worlds cannot change around a sharded model in process", hint=_INSTEAD
    )


def named_tensors(place: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors in plain containers, each with its path below ``place``."""
    if isinstance(value, torch.Tensor):
        yield place, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from named_tensors(f"{place}/{key}", item)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from named_tensors(f"{place}/{index}", item)


def _sharded_part(module: nn.Module) -> str:
    """The first sharded part of a module, in words; "" if there is none."""
    for name, part in module.named_modules():
        if kind := _wrapper_of(part):
            return f"{repr(name) if name else f'the {type(part).__name__}'} is {kind}"
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if found := _description(tensor):
            return f"{name!r} is {found}"
    # A part without parameters of its own: those to shard are added, or materialised, later.
    if (fsdp := sys.modules.get("torch.distributed.fsdp")) is not None:
        for name, part in module.named_modules():
            if isinstance(part, fsdp.FSDPModule):
                return f"{name or type(part).__name__!r} was passed to fully_shard"
    return ""


def _wrapper_of(part: nn.Module) -> str:
    # Importing it takes a second; a script that has wrapped a module has imported it.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and isinstance(part, fsdp.FullyShardedDataParallel):
        return "a FullyShardedDataParallel (FSDP1)"
    return ""


def _description(tensor: torch.Tensor) -> str:
    if is_dtensor(tensor):
        placed: Any = tensor
        kinds = ", ".join(map(str, placed.placements))
        return f"a DTensor ({kinds} over {placed.device_mesh})"
    if torch_fsdp.is_flat_parameter(tensor):
        return "the flat parameter of a FullyShardedDataParallel (FSDP1)"
    return ""


def _created_before(optimizers: Iterable[str]) -> str:
    names = ", ".join(map(repr, optimizers))
    if not names:
        return ""
    return (
        f"; the optimizer tracked as {names} holds parameters of no wrapped module: created "
        "before the model was sharded, it would train parameters that sharding has replaced"
    )


def created_too_early(optimizer: torch.optim.Optimizer, step: int) -> ConfigError:
    """The error for an optimizer of parameters that sharding has replaced."""
    return ConfigError(
        f"{type(optimizer).__name__}.step() at step {step}: the optimizer has the "
        "parameters from before fully_shard, which get no gradients, so nothing is trained",
        hint="create the optimizer after fully_shard: torch.optim.AdamW(model.parameters()), and "
        "run.track(optimizer=optimizer)",
    )
