"""A module under ``elastic.join(mesh=…)`` as a part of the job: the counterpart of ElasticDDP.

The script keeps its module object; this one represents it in the job's state. FSDP's
collectives run within the replica; :mod:`elastic.training.gradients.across` adds those across
replicas, :mod:`elastic.training.gradients.stages` if the mesh has pipeline stages.
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
from elastic.training.gradients.sharding import ranks_along, refusal, sharded_over
from elastic.training.gradients.stages import StageReduction
from elastic.world.mesh import STAGES, ReplicaMesh

# Dimensions along which ranks hold different parameters, and whose gradients nothing would reduce.
_OTHER_PARAMETERS = {
    "ep": "its ranks hold different experts of the model",
}


class ShardedModule:
    """A module sharded over the replica, or complete on each of its ranks: one per ``run.wrap``.

    Raises ConfigError for an unsupported module.
    """

    def __init__(self, module: nn.Module, group: ReplicaProcessGroup) -> None:
        mesh = group.replica.mesh
        _check(module, mesh)
        self.module = module
        self.in_world = False
        self.require_backward_grad_sync = True  # each micro-batch is reduced: FSDP's default
        self._wrapped = tuple(module.parameters())  # the sharded ones
        self._in_world_parameters: tuple[nn.Parameter, ...] = ()
        self._group = group
        self._parts = FSDPParts(module)
        self._fsdp = self._parts.parts
        self._parts.check("run.wrap()")
        self.reduction: AcrossReduction = (
            StageReduction(group.replica, module.parameters, has_fsdp=bool(self._fsdp))
            if mesh.has_stages
            else AcrossReduction(group.replica)
        )
        self.reduction.holds_gradients = self._holds_gradients
        for part in self._fsdp:
            try:
                if not mesh.has_stages:
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
        if not self._fsdp and not mesh.has_stages:
            parameters = list(module.parameters())
            self.reduction.watch(parameters, is_whole=not any(map(is_dtensor, parameters)))
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
        self.reduction.forward_begins()

    def enter_world(self) -> None:
        """Reduce over the replicas of the current world."""
        assert self._group.across is not None, "a world has groups"
        self.reduction.enter_across(self._group.across)
        self.in_world = True
        found = tuple(self.module.parameters())
        if list(map(id, found)) == list(map(id, self._wrapped)):
            self._in_world_parameters = found

    def leave_world(self) -> None:
        """Release everything that belongs to the world, and FSDP's state of an interrupted step."""
        self.reduction.leave()
        self._in_world_parameters = ()
        if self.in_world:
            self.in_world = False
            self._parts.reset()

    def begin_step(self, weight: float) -> None:
        """Begin a step in which this rank has the fraction ``weight`` of the global batch."""
        before = self.reduction.weight
        is_held, is_unsummed = self.holds_gradients, self.reduction.holds_unweighted
        if abs(weight - before) > NEARLY and (is_held or is_unsummed):
            how = "under set_requires_gradient_sync(False)" if is_held else "in earlier steps"
            raise TrainingError(
                f"gradients accumulated {how} cannot be added to "
                f"those of a step in which this rank has another share of the samples "
                f"({weight:.4g}, before {before:.4g}): the last batch of an epoch is smaller, or "
                "the shares of ranks differ",
                hint="DataLoader(…, drop_last=True) and a global_batch that every size of the "
                "world divides"
                + ("; or do not call set_requires_gradient_sync: each pass is reduced" * is_held),
            )
        self.reduction.begin(weight)

    @property
    def holds_gradients(self) -> bool:
        """Whether backward passes without reduction have left gradients that are in no parameter's
        ``.grad``."""
        return self._parts.holds_gradients

    @property
    def all_parameters(self) -> tuple[nn.Parameter, ...]:
        """The sharded parameters, which optimizers use. In a world, those at its beginning, as in
        ElasticDDP. Without a world, or if the script has replaced some, the module is walked."""
        return self._in_world_parameters or tuple(self.module.parameters())

    @property
    def local_parameters(self) -> tuple[torch.Tensor, ...]:
        """This rank's shards of the parameters."""
        return tuple(local_of(p) if is_dtensor(p) else p for p in self.all_parameters)

    @property
    def counted_parameters(self) -> tuple[torch.Tensor, ...]:
        """The tensors whose versions torch counts: a script may change a DTensor or its shard."""
        parameters: tuple[Any, ...] = self.all_parameters
        with torch.no_grad():
            return (*parameters, *(p.to_local() for p in parameters if is_dtensor(p)))

    def first_holders(self) -> tuple[int, ...]:
        """For each parameter, the first rank of the replica that holds the same part of it."""
        replica = self._group.replica
        return tuple(
            replica.mesh.first_holder(replica.position, sharded_over(p, replica.mesh))
            for p in self.all_parameters
        )

    def frozen_indices(self) -> list[int]:
        """Which parameters are not trained, in order."""
        return [i for i, p in enumerate(self.all_parameters) if not p.requires_grad]

    def set_frozen(self, indices: list[int]) -> None:
        """Train all parameters except these."""
        frozen = set(indices)
        for index, parameter in enumerate(self.all_parameters):
            if parameter.requires_grad is (index in frozen):
                parameter.requires_grad_(index not in frozen)


def _check(module: nn.Module, mesh: ReplicaMesh) -> None:
    """Raise ConfigError unless every parameter is on the replica's mesh, and its gradients are
    reduced over each dimension that splits the batch or its samples."""
    _check_dimensions(mesh)
    parameters = dict(module.named_parameters())
    is_fsdp = any(isinstance(part, FSDPModule) for part in module.modules())
    is_split = bool(mesh.data_dims) or "cp" in mesh.split_dims
    if not is_fsdp and is_split and any(map(is_dtensor, parameters.values())):
        raise ConfigError(
            "run.wrap() of a module with DTensors and without fully_shard, under elastic.join(mesh="
            f"{mesh}): nothing reduces its gradients over the replica",
            hint='model = run.wrap(fully_shard(model, mesh=run.mesh["shard"])); tensor '
            "parallelism alone requires a mesh that splits no samples",
        )
    for name, parameter in parameters.items():
        if is_dtensor(parameter):
            _check_parameter(name, parameter, mesh)
        elif is_fsdp:
            raise ConfigError(
                f"run.wrap() of a sharded module: its parameter {name!r} is not sharded, "
                "so nothing would reduce its gradients",
                hint="apply fully_shard to the outermost module, too, without ignored_params",
            )


def _check_dimensions(mesh: ReplicaMesh) -> None:
    """Raise ConfigError for dimensions whose ranks hold different parameters."""
    for dim, why in _OTHER_PARAMETERS.items():
        if dim in mesh.split_dims:
            raise refusal(
                f"run.wrap() under elastic.join(mesh=…) with the dimension {dim!r}: {why}, but "
                "ranks at the same position of a shard must have the same state"
            )


def _check_parameter(name: str, parameter: Any, mesh: ReplicaMesh) -> None:
    device_mesh = parameter.device_mesh
    along = [mesh.dims_along(ranks) for ranks in ranks_along(device_mesh)]
    if any(dims is None for dims in along):
        raise ConfigError(
            f"run.wrap() of a module sharded over another mesh: {name!r} is on {device_mesh}, "
            f"the replica on {mesh}",
            hint='fully_shard(model, mesh=run.mesh["shard"]): run.mesh has the dimensions of '
            "elastic.join(mesh=…)",
        )
    spanned = {dim: i for i, dims in enumerate(along) for dim in dims or ()}
    if STAGES in spanned:
        raise ConfigError(
            f"run.wrap() of a sharded module: {name!r} is on {device_mesh}, which spans the "
            f"dimension {STAGES!r}: its ranks hold different stages",
            hint='fully_shard(stage, mesh=run.mesh["shard"]): shard each stage over its own ranks',
        )
    for dim in mesh.data_dims:
        if dim not in spanned:
            raise ConfigError(
                f"run.wrap() of a sharded module: {name!r} is on {device_mesh}, which lacks "
                f"the dimension {dim!r}: it splits the batch, and nothing would reduce over it",
                hint=f'fully_shard(model, mesh=run.mesh["{dim}"])',
            )
        if parameter.placements[spanned[dim]].is_replicate():
            raise ConfigError(
                f"run.wrap() of a module with its own replicate dimension: {name!r} is "
                f"replicated over {dim!r}",
                hint="the replicas of a job come from elastic.join(mesh=…): pass only the sharded "
                'dimension: fully_shard(model, mesh=run.mesh["shard"])',
            )
    if "cp" in mesh.split_dims and (
        "cp" not in spanned or parameter.placements[spanned["cp"]].is_replicate()
    ):
        names = ", ".join(f'"{dim}"' for dim in (*mesh.data_dims, "cp"))
        raise ConfigError(
            f"run.wrap() of a sharded module: {name!r} is on {device_mesh}, which lacks the "
            "dimension 'cp': its ranks have different parts of each sample, and nothing would "
            "reduce over it",
            hint=f'fully_shard(model, mesh=run.mesh[{names}]._flatten("shard_cp")): FSDP then '
            "averages over the parts, too",
        )
