"""A module under ``elastic.join(mesh=…)`` as a part of the job: the counterpart of ElasticDDP.

The script keeps its module object; this one represents it in the job's state. FSDP's
collectives run within the replica; :mod:`elastic.training.gradients.across` adds those across
replicas, :mod:`elastic.training.gradients.stages` if the mesh has pipeline stages.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import nn

from checkpoints.tensors.dtensors import is_dtensor, local_of
from elastic.compiling import not_compiled
from elastic.errors import ConfigError, TrainingError
from elastic.mesh import ReplicaProcessGroup
from elastic.torch_fsdp import fsdp_held_gradients, fsdp_originals
from elastic.training.gradients.across import AcrossReduction
from elastic.training.gradients.coverage import check_coverage, exchanged_dims
from elastic.training.gradients.fingerprints import GradientFingerprints, HeldParts
from elastic.training.gradients.forward_phase import ForwardHooks
from elastic.training.gradients.fsdp_parts import FSDPParts, PartReduction
from elastic.training.gradients.matching.order import ReductionOrder, Unit
from elastic.training.gradients.reduction import NEARLY
from elastic.training.gradients.sharding import CurrentParameters, sharded_over
from elastic.training.gradients.stages import StageReduction, refuse_split_backward


class ShardedModule:
    """A module sharded over the replica, or complete on each of its ranks: one per ``run.wrap``.

    Raises ConfigError for an unsupported module.
    """

    def __init__(self, module: nn.Module, group: ReplicaProcessGroup) -> None:
        mesh = group.replica.mesh
        self._parts = FSDPParts(module)
        self._fsdp = self._parts.parts
        check_coverage(module, self._fsdp, mesh)
        if group.replica.split_ties is not None:
            group.replica.split_ties.check(module)
        self.module = module
        self.in_world = False
        self.require_backward_grad_sync = True  # each micro-batch is reduced: FSDP's default
        self._wrapped = tuple(module.parameters())  # the sharded ones
        self._in_world_parameters: tuple[nn.Parameter, ...] = ()
        self._group = group
        self._current = CurrentParameters(module)
        self._fingerprints = GradientFingerprints(
            [
                index
                for index, p in enumerate(self._wrapped)
                if mesh.same_part_dims - sharded_over(p, mesh)
            ],
            lambda: self.all_parameters,
        )
        self._parts.check("run.wrap()")
        exchanged = [exchanged_dims(part, mesh) for part in self._fsdp]
        self._exchanges_samples = bool(set().union(*exchanged) & set(mesh.data_dims))
        self.reduction: AcrossReduction = (
            StageReduction(group.replica, module.parameters, has_fsdp=bool(self._fsdp))
            if mesh.has_stages
            else AcrossReduction(group.replica)
        )
        self.reduction.holds_gradients = self._holds_gradients
        sizes = dict(mesh.dims)
        self._reductions: list[PartReduction] = []  # of the parts
        for part, dims in zip(self._fsdp, exchanged, strict=True):
            own = PartReduction(self.reduction, 1 / math.prod(sizes[dim] for dim in dims))
            try:
                part.set_all_reduce_hook(own.reduce)
                part.set_custom_reduce_scatter(own)
                self._reductions.append(own)
            except ValueError as error:
                raise ConfigError(
                    "run.wrap() of a module with several groups of parameters in one "
                    f"fully_shard (per-parameter meshes): {error}",
                    hint='fully_shard(module, mesh=run.mesh["shard"]) without shard_placement_fn '
                    "that returns a mesh",
                ) from error
        self._parts.refuse_settings()
        if not self._fsdp and not mesh.has_stages:
            self.reduction.watch(self._current, is_whole=not any(map(is_dtensor, self._wrapped)))
        ForwardHooks(module, self._forward_begins)
        if mesh.has_stages:
            inner = {id(part) for part in self._fsdp}
            for part in self._fsdp:
                if any(id(each) in inner for each in part.modules() if each is not part):
                    part.register_forward_pre_hook(_refuse_split_backward)

    def match(self, order: ReductionOrder, name: str) -> None:
        """Compare the order of reductions with other replicas; this module is called ``name``. With
        pipeline stages, all modules are reduced in one call, in a fixed order."""
        if self._group.replica.mesh.has_stages:
            return
        if not self._fsdp:
            label = f"the gradients of {name} ({type(self.module).__name__})"
            self.reduction.match(
                order, Unit(name, label, lambda: self._trains(self.all_parameters), _never)
            )
            return
        self.reduction.order = order
        for part, reduction in zip(self._fsdp, self._reductions, strict=True):
            parameters = tuple(p for p, _ in fsdp_originals(part))
            label = f"the gradients of {self._parts.label(part, name)}"
            reduction.unit = order.add(
                Unit(
                    name,
                    label,
                    functools.partial(self._trains, parameters),
                    functools.partial(_holds_gradients, part),
                )
            )

    def _trains(self, parameters: tuple[torch.Tensor, ...]) -> bool:
        return self.in_world and any(p.requires_grad for p in parameters)

    def _holds_gradients(self) -> bool:
        return self._parts.holds_gradients

    def _forward_begins(self) -> None:
        if self.in_world and self.reduction.failure is not None:
            raise self.reduction.failure  # swallowed by the script
        self.reduction.forward_begins()

    def enter_world(self) -> None:
        """Reduce over the replicas of the current world."""
        assert self._group.across is not None, "a world has groups"
        self.reduction.enter_across(self._group.across)
        self._current.find()
        self._fingerprints.begin()
        self.in_world = True
        found = tuple(self.module.parameters())
        if list(map(id, found)) == list(map(id, self._wrapped)):
            self._in_world_parameters = found

    def reshard(self) -> None:
        """Let the module have its sharded parameters, also after a forward pass of the script."""
        self._parts.reshard()

    def leave_world(self) -> None:
        """Release everything that belongs to the world, and FSDP's state of an interrupted step."""
        self.reduction.leave()
        self._fingerprints.end()
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
        if self._exchanges_samples and not self.reduction.has_even_share(weight):
            raise _uneven(weight)
        self.reduction.begin(weight)

    @property
    def holds_gradients(self) -> bool:
        """Whether backward passes without reduction have left gradients that are in no parameter's
        ``.grad``."""
        return self._parts.holds_gradients

    @property
    def all_parameters(self) -> tuple[nn.Parameter, ...]:
        """The sharded parameters, which optimizers use. With FSDP, in a world, those at its
        beginning, as in ElasticDDP. Without a world, or if the script has replaced some, the module
        is walked."""
        if not self._fsdp:
            return tuple(self._current.read())
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

    def held_parts(self) -> HeldParts:
        """This rank's parts of the parameters, and who else in the replica holds them."""
        replica = self._group.replica
        firsts = [
            replica.mesh.first_holder(replica.position, sharded_over(p, replica.mesh))
            for p in self.all_parameters
        ]
        names = [name for name, _ in self.module.named_parameters()]
        return HeldParts(names, firsts, self._fingerprints.taken)

    def gradients_compared(self) -> None:
        """Note that ranks with the same part of a parameter had the same gradient of it."""
        self._fingerprints.compared()

    def frozen_indices(self) -> list[int]:
        """Which parameters are not trained, in order."""
        return [i for i, p in enumerate(self.all_parameters) if not p.requires_grad]

    def set_frozen(self, indices: list[int]) -> None:
        """Train all parameters except these."""
        frozen = set(indices)
        for index, parameter in enumerate(self.all_parameters):
            if parameter.requires_grad is (index in frozen):
                parameter.requires_grad_(index not in frozen)


@not_compiled
def _refuse_split_backward(part: nn.Module, inputs: Any) -> None:
    if torch.is_grad_enabled():
        refuse_split_backward(type(part).__name__.removeprefix("FSDP"))


def _holds_gradients(part: nn.Module) -> bool:
    return bool(fsdp_held_gradients(part))


def _never() -> bool:
    return False


def _uneven(weight: float) -> TrainingError:
    return TrainingError(
        f"this rank has {weight:.4g} of the samples of this step, other ranks another share, and "
        "experts are sharded over a dimension that splits the batch: their gradients are sums over "
        "the tokens of several ranks, which can no longer be weighted by the ranks' shares",
        hint="DataLoader(…, drop_last=True) and a global_batch that every size of the world "
        'divides; or experts over a dimension "ep", whose ranks see the same samples',
    )
