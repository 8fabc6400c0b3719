"""A module that is sharded over ``run.mesh``, as a part of the job: what ElasticDDP is to others.

The script's module stays the object that it is; this one stands for it in the job's state. FSDP's
collectives run within the replica; :mod:`elastic.training.gradients.across` adds those between
replicas.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from checkpoints.tensors.dtensors import is_dtensor, local_of
from elastic.compiling import not_compiled
from elastic.errors import ConfigError, TrainingError
from elastic.hangs.facts import COMPUTE, Phase
from elastic.hangs.phases import phases
from elastic.mesh import ReplicaProcessGroup
from elastic.training.gradients.across import AcrossReduction, WeightedReduceScatter
from elastic.training.gradients.fsdp_parts import FSDPParts
from elastic.training.gradients.reduction import NEARLY
from elastic.world.mesh import ReplicaMesh


class ShardedModule:
    """One per ``run.wrap`` of a sharded module. Raises ConfigError for one that cannot be."""

    def __init__(self, module: nn.Module, group: ReplicaProcessGroup) -> None:
        mesh = group.replica.mesh
        _check(module, mesh)
        self.module = module
        self.reduction = AcrossReduction(group.replica)
        self.in_world = False
        self.require_backward_grad_sync = True  # each micro-batch is reduced: FSDP's default
        self._wrapped = tuple(module.parameters())  # the sharded ones
        self._in_world_parameters: tuple[nn.Parameter, ...] = ()
        self._group = group
        self._parts = FSDPParts(module)
        self._fsdp = self._parts.parts
        if self._fsdp and not hasattr(FSDPModule, "reset_iter_state"):
            raise ConfigError(
                f"run.wrap() of a module with fully_shard, on torch {torch.__version__}: it cannot "
                "drop what FSDP has accumulated of an interrupted step (reset_iter_state)",
                hint="torch 2.13 or later; with older ones sharded models recover by a restart "
                "(docs/how-to/sharded.md)",
            )
        self._parts.check("run.wrap()")
        self.reduction.holds_gradients = self._holds_gradients
        for part in self._fsdp:
            try:
                part.set_all_reduce_hook(self.reduction.reduce)
                part.set_custom_reduce_scatter(WeightedReduceScatter(self.reduction))
            except ValueError as error:
                raise ConfigError(
                    "run.wrap() of a module with several groups of parameters in one "
                    f"fully_shard (per-parameter meshes): {error}",
                    hint='fully_shard(module, mesh=run.mesh["shard"]) without shard_placement_fn '
                    "that returns a mesh",
                ) from error
        self._parts.refuse_settings()
        if not self._fsdp:
            self.reduction.watch(list(module.parameters()))
        module.register_forward_pre_hook(self._note_forward)

    def _holds_gradients(self) -> bool:
        return self._parts.holds_gradients

    @not_compiled
    def _note_forward(self, module: nn.Module, inputs: Any) -> None:
        if not (module.training and torch.is_grad_enabled()):
            phases.enter(Phase.EVALUATION)
            return
        phases.enter(COMPUTE)
        if self.in_world and self.reduction.failure is not None:
            raise self.reduction.failure  # swallowed by the script
        self.reduction.has_forward = True

    def enter_world(self) -> None:
        """Reduce over the replicas of the present world."""
        assert self._group.across is not None, "a world has groups"
        self.reduction.enter_across(self._group.across)
        self.in_world = True
        found = tuple(self.module.parameters())
        if list(map(id, found)) == list(map(id, self._wrapped)):
            self._in_world_parameters = found

    def leave_world(self) -> None:
        """Hold nothing of the world; forget what FSDP has kept of an interrupted step."""
        self.reduction.leave()
        self._in_world_parameters = ()
        if self.in_world:
            self.in_world = False
            self._parts.reset()

    def begin_step(self, weight: float) -> None:
        """A step begins, in which this rank holds the part ``weight`` of the global batch."""
        before = self.reduction.weight
        if abs(weight - before) > NEARLY and self.holds_gradients:
            raise TrainingError(
                "gradients accumulated under set_requires_gradient_sync(False) cannot be added to "
                f"those of a step in which this rank has another share of the samples "
                f"({weight:.4g}, before {before:.4g}): the last batch of an epoch is smaller, or "
                "the shares of ranks differ",
                hint="DataLoader(…, drop_last=True) and a global_batch that every size of the "
                "world divides; or leave set_requires_gradient_sync alone: each pass is reduced",
            )
        self.reduction.begin(weight)

    @property
    def holds_gradients(self) -> bool:
        """Whether it has gradients that are in no parameter's ``.grad``: those of passes that
        reduced none."""
        return self._parts.holds_gradients

    @property
    def all_parameters(self) -> tuple[nn.Parameter, ...]:
        """The sharded ones, which optimizers have; in a world those that it began with, as in
        ElasticDDP. Without a world, and where the script has replaced some, a walk finds them."""
        return self._in_world_parameters or tuple(self.module.parameters())

    @property
    def local_parameters(self) -> tuple[torch.Tensor, ...]:
        """This rank's shards of them."""
        return tuple(local_of(p) if is_dtensor(p) else p for p in self.all_parameters)

    @property
    def counted_parameters(self) -> tuple[torch.Tensor, ...]:
        """Those whose changes torch counts: the script may change a DTensor, or its shard."""
        parameters: tuple[Any, ...] = self.all_parameters
        with torch.no_grad():
            return (*parameters, *(p.to_local() for p in parameters if is_dtensor(p)))

    def frozen_indices(self) -> list[int]:
        """Which of the parameters are not trained, in their order."""
        return [i for i, p in enumerate(self.all_parameters) if not p.requires_grad]

    def set_frozen(self, indices: list[int]) -> None:
        """Train all parameters but these."""
        frozen = set(indices)
        for index, parameter in enumerate(self.all_parameters):
            if parameter.requires_grad is (index in frozen):
                parameter.requires_grad_(index not in frozen)


def _check(module: nn.Module, mesh: ReplicaMesh) -> None:
    """Raise ConfigError unless something reduces the gradients of each parameter over every
    dimension that splits the batch, and all of it is on the replica's mesh."""
    parameters = dict(module.named_parameters())
    is_fsdp = any(isinstance(part, FSDPModule) for part in module.modules())
    if not is_fsdp and (mesh.data_dims or not any(map(is_dtensor, parameters.values()))):
        raise ConfigError(
            "run.wrap() of a module without fully_shard, under elastic.join(mesh=…): nothing "
            "reduces its gradients over the replica",
            hint='model = run.wrap(fully_shard(model, mesh=run.mesh["shard"])); tensor '
            "parallelism alone is for meshes that split no samples, and modules that each rank "
            "holds whole are not built yet",
        )
    for name, parameter in parameters.items():
        if is_dtensor(parameter):
            _check_parameter(name, parameter, mesh)
        elif is_fsdp:
            raise ConfigError(
                f"run.wrap() of a sharded module: its parameter {name!r} is not sharded, nothing "
                "would reduce its gradients",
                hint="fully_shard the outermost module, too, and without ignored_params",
            )


def _check_parameter(name: str, parameter: Any, mesh: ReplicaMesh) -> None:
    theirs, sizes = parameter.device_mesh, dict(mesh.dims)
    names = theirs.mesh_dim_names
    if names is None and theirs.ndim == len(mesh.dims) == 1:
        names = (mesh.dims[0][0],)  # fully_shard(model): over torch's default group
    given = dict(zip(names or (), theirs.shape, strict=False))
    if not given or any(sizes.get(dim) != size for dim, size in given.items()):
        raise ConfigError(
            f"run.wrap() of a module sharded over another mesh: {name!r} is on {theirs}, and a "
            f"replica is {mesh}",
            hint='fully_shard(model, mesh=run.mesh["shard"]): run.mesh has the dimensions of '
            "elastic.join(mesh=…)",
        )
    for dim in mesh.data_dims:
        if dim not in given:
            raise ConfigError(
                f"run.wrap() of a sharded module: {name!r} is on {theirs}, which lacks the "
                f"dimension {dim!r}: it splits the batch, and nothing would reduce over it",
                hint=f'fully_shard(model, mesh=run.mesh["{dim}"])',
            )
        placement = parameter.placements[list(given).index(dim)]
        if placement.is_replicate():
            raise ConfigError(
                f"run.wrap() of a module with a replicate dimension of its own: {name!r} is "
                f"replicated over {dim!r}",
                hint="the replicas of a job are those of elastic.join(mesh=…): name the sharded "
                'dimension alone, fully_shard(model, mesh=run.mesh["shard"])',
            )
