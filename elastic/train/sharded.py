"""Gradients of sharded models: weights of shares, and reductions across replicas."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from checkpoints.tensors import is_dtensor, local_of
from elastic import torch_fsdp
from elastic.errors import ConfigError, GroupAborted, TrainingError
from elastic.groups.collectives import OwnGroup
from elastic.groups.replica import ModelReplica, ReplicaProcessGroup
from elastic.groups.world import EXPERTS, STAGES, ReplicaMesh
from elastic.hangs.page import SCRIPT, phases
from elastic.torch_fsdp import fsdp_held_gradients, fsdp_meshes, fsdp_originals
from elastic.torch_private import (
    call_after_backward,
    copy_each,
    current_backward,
    not_compiled,
    reduce_scatter,
)
from elastic.train import backward
from elastic.train.backward import EarlierGradients, ForwardHooks
from elastic.train.order import (
    COUNT,
    ReductionOrder,
    Room,
    Sent,
    Unit,
    absent,
    in_replica,
    others_without,
    write_present,
)
from elastic.train.reduction import NEARLY, Filler, Reduction
from elastic.train.sharding import (
    CurrentParameters,
    GradientFingerprints,
    HeldParts,
    like,
    local_value,
    ranks_along,
    sharded_over,
)

# ----------------------------------------------------------------------------
# Gradients that a rank lacks, of single parameters: zeros, if other ranks have some.


@dataclass(frozen=True)
class UncertainGradients:
    """Gradients of a bucket of which this rank lacks some, or all: it does not know yet whether
    others have them."""

    parameters: Sequence[torch.nn.Parameter]
    sums: Sequence[torch.Tensor]  # of this rank's parts
    counts: torch.Tensor  # once the sum has ended: ranks with a gradient, by parameter

    @property
    def users(self) -> list[float]:
        """The numbers of ranks with a gradient."""
        counted: list[float] = self.counts.abs().tolist()  # abs: of complex numbers, too
        return counted

    def resolve(self, in_replica: Mapping[int, float]) -> None:
        """Create missing gradients, unless no rank has any from its samples.

        ``in_replica``: the counts of all parts, by parameter. An expert without tokens has zeros,
        like its rows in an unsharded model, if another one in the same weight has some.
        """
        for parameter, total, count in zip(self.parameters, self.sums, self.users, strict=True):
            if not in_replica.get(id(parameter), count):
                parameter.grad = None
            elif parameter.grad is None:
                parameter.grad = like(parameter, total)


def place_like(parameter: Any) -> None:
    """Give a gradient the placements of its parameter, by collectives of the replica.

    torch leaves that to the optimizer: the gradient of a parameter that each rank holds whole may
    be the ranks' parts of a sum (``SequenceParallel``). Whether it is depends on the number of
    samples: with fewer than ranks, DTensors are not split. So replicas would sum parts with wholes.
    """
    gradient = parameter.grad
    if is_dtensor(gradient) and gradient.placements != parameter.placements:
        parameter.grad = gradient.redistribute(placements=parameter.placements)


def gradient_dtype(parameter: torch.Tensor) -> torch.dtype:
    return parameter.dtype if parameter.grad is None else parameter.grad.dtype


def local_gradient(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's part of the gradient, or zeros."""
    if parameter.grad is None:
        return torch.zeros_like(local_value(parameter.detach()))
    return local_value(parameter.grad.detach())


# ----------------------------------------------------------------------------
# Gradients of sharded models, reduced across replicas separately for each position's shards.
#
# FSDP has averaged them over the ranks of the replica that split its samples (reduce-scatter); the
# sum over replicas remains. ``FSDPModule.set_all_reduce_hook`` calls
# :meth:`AcrossReduction.reduce` with each group of parameters, in Python, in the middle of the
# backward pass (``foreach_reduce`` in torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py).
# If the world has ended, it does not raise: FSDP's collectives within the replica continue on all
# of its ranks. At the end of the backward pass, a sum over the replica determines whether the
# gradients are valid. This is the only collective of a step besides those of the gradients:
# control flags follow the first bucket across replicas, as with DDP, and are then added to the
# sum, as is the replica's question for the next boundary (``ModelReplica.question``).
#
# Without FSDP, a module's local gradients are summed in buckets at the end of the backward pass:
# over the replicas, and first within the replica if each of its ranks holds the entire module.
#
# Shares of the batch may differ by a sample, between replicas and within one. So before the
# reduce-scatter, a rank's gradients are multiplied by the ratio of its share to an even share.

_LEFT = "the world has ended for a rank of this replica: this step's gradients are incomplete"


class AcrossReduction(Reduction):
    """Sums the gradients of one module's shards over the replicas of a world."""

    def __init__(self, replica: ModelReplica) -> None:
        super().__init__()
        backward.watch()
        self._replica = replica
        self._across: OwnGroup | None = None  # None outside of a world
        self._fault: Exception | None = None  # of this rank, not yet exchanged
        self._pass: int | None = None  # the backward pass that ends with a call of _finish
        self._end: torch.Tensor | None = None  # flags of this step, not yet exchanged
        self._room: Room | None = None  # holds their sum once the collective has ended
        self._ends: list[tuple[Unit, torch.Tensor]] = []  # of other sums, not yet ended
        self._current: CurrentParameters | None = None  # of a module without FSDP
        self._parameters: list[torch.nn.Parameter] = []  # trained ones, when they were last read
        self._hooked: list[torch.nn.Parameter] = []
        self._is_whole = False  # every rank of the replica holds the entire module
        self._uncertain: list[UncertainGradients] = []  # until their sums have ended
        self._split: list[torch.nn.Parameter] = []  # along dimensions with the same samples
        self.holds_gradients: Callable[[], bool] = lambda: False  # from unreduced passes

    def enter_across(self, across: OwnGroup) -> None:
        """Begin a new world."""
        self._across = across

    def leave(self) -> None:
        """Release everything that belongs to the ended world."""
        super().leave()
        self._across = self._end = self._room = None
        self._uncertain.clear()
        self._ends.clear()

    def begin(self, weight: float) -> None:
        """Begin a step in which this rank has the fraction ``weight`` of the global batch."""
        super().begin(weight)
        self._fault = self._end = self._pass = self._room = None
        self._uncertain.clear()
        self._ends.clear()

    @property
    def holds_unweighted(self) -> bool:
        """False: each backward pass multiplies its gradients by this rank's share."""
        return False

    @property
    def has_new_gradients(self) -> bool:
        """Same interface as for DDP; FSDP itself keeps gradients that are not reduced."""
        return self.is_done or self.holds_gradients()

    def has_even_share(self, weight: float) -> bool:
        """Whether this fraction of the global batch is the same on all ranks."""
        parts = self._across.size * self._replica.mesh.data_size if self._across is not None else 1
        return abs(weight * parts - 1.0) <= NEARLY

    def weigh_local(self, gradients: torch.Tensor, scale: float = 1.0) -> None:
        """Multiply by the ratio of this rank's share to an even one, before the reduce-scatter."""
        if self._across is None:
            return
        factor = self.weight * self._across.size * self._replica.mesh.data_size * scale
        if factor == 0.0:
            gradients.zero_()  # × 0 would keep a NaN of the filler sample
        elif abs(factor - 1.0) > NEARLY:
            gradients.mul_(factor)

    def reduce(self, gradients: torch.Tensor, unit: Unit | None = None) -> None:
        """Gradients of this rank's shards of ``unit``, averaged over the replica. Called by FSDP's
        hook."""
        if self._across is None:
            return
        self._end_pass_later()
        if self._across.size == 1:
            self._write_flags()
        elif self._fault is None:
            gradients.div_(self._across.size)
            self._sum(gradients, unit)
        self.reduced()

    def watch(self, parameters: CurrentParameters, *, is_whole: bool) -> None:
        """Without FSDP: sum the gradients of these parameters after each backward pass.

        ``is_whole``: every rank of the replica holds all of them. Its own samples, or a copy of
        another rank's samples, contribute to their gradients.
        """
        self._current, self._is_whole = parameters, is_whole
        self._read_parameters()

    def _read_parameters(self) -> list[torch.nn.Parameter]:
        """The trained parameters of now: a script may freeze, unfreeze and replace some."""
        assert self._current is not None
        trained = [p for p in self._current.read() if p.requires_grad]
        if list(map(id, trained)) != list(map(id, self._parameters)):
            known = set(map(id, self._hooked))
            for parameter in trained:
                if id(parameter) not in known:
                    parameter.register_post_accumulate_grad_hook(self._accumulated)  # type: ignore[no-untyped-call]
                    self._hooked.append(parameter)
            self._parameters = trained
            self._note_split(trained)
        return trained

    def forward_begins(self) -> None:
        """As in the base class; from now on, watch parameters that were not trained before."""
        super().forward_begins()
        if self._current is not None:
            self._read_parameters()

    def _note_split(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Note the parameters of which ranks with the same samples hold different parts."""
        mesh = self._replica.mesh
        self._split = [p for p in parameters if mesh.same_part_dims & sharded_over(p, mesh)]

    def _accumulated(self, parameter: torch.Tensor) -> None:
        if self._across is not None:
            self._end_pass_later()

    def _sum_all(self) -> None:
        """Sum the gradients of a module without FSDP.

        Those of an earlier pass are included: they are the same in all replicas, and the factors of
        all ranks add up to 1.
        """
        mesh = self._replica.mesh
        copies = mesh.size // mesh.data_size if self._is_whole else 1  # ranks with the same samples
        factor = 0.0 if self.weight == 0.0 else self.weight / copies
        self._sum_in_buckets(self._read_parameters(), factor)

    def _sum_in_buckets(self, parameters: Sequence[torch.nn.Parameter], factor: float) -> None:
        """Multiply by ``factor``, then sum over the replicas, and before that within this one if
        its ranks hold the entire module: one bucket per dtype.

        A parameter without a gradient counts as zeros (an expert without tokens). Each bucket has
        the number of ranks with a gradient, by parameter.
        """
        assert self._across is not None
        by_dtype: dict[torch.dtype, list[torch.nn.Parameter]] = {}
        for parameter in parameters:
            place_like(parameter)
            by_dtype.setdefault(gradient_dtype(parameter), []).append(parameter)
        self.reduced()
        if self._across.size == 1:
            self._write_flags()
        unit = self._unit  # of the first bucket
        for same in by_dtype.values():
            gradients = [local_gradient(p) for p in same]
            is_used = [float(p.grad is not None and factor != 0.0) for p in same]
            counts = torch.tensor(is_used, device="cpu")
            if self._is_whole or self._across.size > 1:
                counts = self._sum_bucket(gradients, is_used, factor, unit)
            unit = None
            if not all(is_used):
                self._uncertain.append(UncertainGradients(same, gradients, counts))

    def _sum_bucket(
        self,
        gradients: Sequence[torch.Tensor],
        counted: Sequence[float],
        factor: float,
        unit: Unit | None,
    ) -> torch.Tensor:
        """Sum these gradients in place, and return the sums of ``counted``. On a stream, both are
        only queued."""
        assert self._across is not None
        flat = [gradient.reshape(-1) for gradient in gradients]
        counts = flat[0].new_tensor(counted)
        bucket = torch.cat([*flat, counts, flat[0].new_empty(COUNT)])[:-COUNT]
        values, counts = bucket[: -len(counted)], bucket[-len(counted) :]
        values.zero_() if factor == 0.0 else values.mul_(factor)
        if self._is_whole:
            self._replica.all_reduce(bucket)
        if self._fault is None and self._across.size > 1:
            self._sum(bucket, unit)
        parts = torch.split(values, [gradient.numel() for gradient in gradients])
        copy_each(gradients, [p.view_as(g) for p, g in zip(parts, gradients, strict=True)])
        return counts

    def _sum(self, gradients: torch.Tensor, unit: Unit | None = None) -> None:
        """Sum over the replicas, in place. On a stream the sum is only queued: :meth:`_finish`
        waits for it before the host depends on it. ``unit``: begins to be reduced."""
        assert self._across is not None
        room, end = self._room_with_flags(gradients, unit), None
        if room is None and unit is not None and (own := Room.behind(gradients)) is not None:
            write_present(end := own.end)
            gradients = own.both
        sent = gradients if room is None else room.both
        works = self._across.works
        try:
            if unit is not None and self.order is not None:
                is_marked = room is not None or end is not None
                self.order.before(unit, Sent.of(sent) if is_marked else None)
            work = self._across.all_reduce(sent)
            if self._across.is_on_stream:
                works.queue(work)
                _keep_until_summed(gradients)
            else:
                works.finish_one(work)
        except Exception as error:  # noqa: BLE001  raised at the end, on all ranks of the replica
            self._fault = error.with_traceback(None)
            return
        if room is not None:
            self._room = room
        if unit is not None and end is not None:
            self._ends.append((unit, end))

    def _finish_sums(self) -> None:
        """Wait for the sums of this backward pass, and read the flags summed with them."""
        if self._across is not None and self._across.is_on_stream and self._fault is None:
            try:
                self._across.works.synchronize()
            except Exception as error:  # noqa: BLE001  as above
                self._fault = error.with_traceback(None)
        room, self._room = self._room, None
        if room is not None and self._end is not None and self._fault is None:
            self._end.copy_(room.end)
        ends, self._ends = self._ends, []
        if self._fault is None:
            is_absent = absent([end for _, end in ends])
            names = [unit.name for (unit, _), lacks in zip(ends, is_absent, strict=True) if lacks]
            if names and self.order is not None:
                self._fault = others_without(names[0], self.order.step)

    def _room_with_flags(self, gradients: torch.Tensor, unit: Unit | None) -> Room | None:
        """A step's first bucket, followed by this rank's flags."""
        room = None if self._has_spoken or self.flags is None else Room.behind(gradients)
        if room is not None:
            room.end.copy_(self._write_flags(unit), non_blocking=True)
            assert self.flags is not None
            self.flags.write_digest(room.end)  # on the device
        return room

    def _write_flags(self, unit: Unit | None = None) -> torch.Tensor:
        """Write this rank's flags, once per step: to sum over its position in each replica, then
        over all ranks."""
        if self._end is None:
            self._end = torch.zeros(COUNT, dtype=torch.float64, device="cpu")
            if self.flags is not None and not self._has_spoken:
                self.flags.write(self._end, *([unit.name] if unit is not None else []))
            self._has_spoken = True
        return self._end

    def _end_pass_later(self) -> None:
        if backward.are_nested():  # of recomputed parts, in the middle of a pass
            backward.call_after_all(self._finish)
        elif self._pass != current_backward():
            self._pass = current_backward()
            call_after_backward(self._finish)  # after FSDP's own, which was queued before

    def _finish(self) -> None:
        """Called at the end of a backward pass."""
        backward.cancel(self._finish)
        if self._current is not None:
            self._sum_all()
        self.finish_all([self])

    def finish_all(self, reductions: Sequence[AcrossReduction]) -> None:
        """End the sums of these modules, of which only this one has sent flags: all ranks of the
        replica have them, or all raise."""
        for each in reductions:
            each._finish_sums()
        is_over = any(each._fault is not None or each._has_failed for each in reductions)
        end = in_replica(self._end.tolist()) if self._end is not None else [0.0] * COUNT
        used = [count for each in reductions for count in each._used()]
        try:
            begin, length = self._room_for(len(used))
            around = [0.0] * begin, [0.0] * (length - begin - len(used))
            values = [float(is_over), *end, *around[0], *used, *around[1]]
            faults, *summed = self._replica.sum_and_ask(values)
            if faults:
                own = [each._fault for each in reductions if each._fault is not None]
                raise own[0] if own else GroupAborted(_LEFT)
        except Exception as error:
            for each in reductions:
                each.failure = error.with_traceback(None)
            raise
        if self._end is not None:
            self._end.copy_(torch.tensor(summed[:COUNT], device="cpu"))
        counts = iter(summed[COUNT + begin :])
        for each in reductions:
            each._end = each._pass = None
            each._resolve_uncertain({id(parameter): next(counts) for parameter in each._split})
        phases.enter(SCRIPT)

    def _room_for(self, count: int) -> tuple[int, int]:
        """Where this rank's ``count`` values begin among those that the replica sums, and the
        number of all."""
        return 0, count

    def _used(self) -> list[float]:
        """For each parameter of which other ranks of the replica hold other parts, the number of
        replicas with a gradient of this one, or 1."""
        if self._fault is not None:
            return [0.0] * len(self._split)
        counts: dict[int, float] = {}
        for each in self._uncertain:
            counts |= zip(map(id, each.parameters), each.users, strict=True)
        return [counts.get(id(parameter), 1.0) for parameter in self._split]

    def _resolve_uncertain(self, in_replica: Mapping[int, float]) -> None:
        for each in self._uncertain:
            each.resolve(in_replica)
        self._uncertain.clear()

    @property
    def _has_failed(self) -> bool:
        """Whether a collective of this world has failed and the script has caught its error."""
        return self._across is not None and self._across.works.may_be_garbage


def _keep_until_summed(gradients: torch.Tensor) -> None:
    """Prevent the allocator from reusing these gradients' memory for FSDP's next reduce-scatter
    before the current stream has summed them: with ``reduce_dtype`` FSDP drops its reference right
    after the hook (``foreach_reduce``; for its own all-reduce it keeps one until an event)."""
    if gradients.is_cuda:
        gradients.record_stream(torch.cuda.current_stream(gradients.device))


# ----------------------------------------------------------------------------
# Checks that the gradients of every parameter are reduced over each dimension that splits the
# batch or its samples, and finds by how much FSDP's mean over its own ranks is too large.
#
# Ranks along such a dimension have gradients of different samples. Either FSDP averages over them,
# or the parameter is sharded over them by other means: these are experts, each on one rank to
# which the others send tokens, and whose gradient is thus already a sum over those ranks' samples.

_AS_EXPERTS = """\
{name} = nn.Parameter(DTensor.from_local(own, run.mesh["ep"], [Shard(0)]))   # own: this rank's \
experts
    or  nn.Parameter(distribute_tensor(whole, run.mesh["ep"], [Shard(0)]))   # before fully_shard
    and {name}.to_local() in forward (docs/how-to/pipeline.md, "Expert parallelism")"""


def check_coverage(module: nn.Module, parts: Sequence[Any], mesh: ReplicaMesh) -> None:
    """Raise ConfigError unless every parameter is on the replica's mesh, and its gradients are
    reduced over each dimension that splits the batch or its samples.

    ``parts``: those that ``fully_shard`` was applied to.
    """
    parameters = dict(module.named_parameters())
    managed = {id(parameter) for part in parts for parameter, _ in fsdp_originals(part)}
    is_split = bool(mesh.averaged_dims)
    if not parts and is_split and any(map(is_dtensor, parameters.values())):
        raise ConfigError(
            "run.wrap() of a module with DTensors and without fully_shard, under elastic.join(mesh="
            f"{mesh}): nothing reduces its gradients over the replica",
            hint='model = run.wrap(fully_shard(model, mesh=run.mesh["shard"])); tensor '
            "parallelism alone requires a mesh that splits no samples",
        )
    for name, parameter in parameters.items():
        if is_dtensor(parameter):
            _check_parameter(name, parameter, mesh)
            if parts and id(parameter) not in managed:
                raise _not_in_fsdp(name, parameter, mesh)
        elif parts:
            raise ConfigError(
                f"run.wrap() of a sharded module: its parameter {name!r} is not sharded, "
                "so nothing would reduce its gradients",
                hint="apply fully_shard to the outermost module, too, without ignored_params",
            )
    _check_experts(parameters, mesh)


def exchanged_dims(part: Any, mesh: ReplicaMesh) -> tuple[str, ...]:
    """The dimensions that split samples and that FSDP does not average over: the parameters of
    this part are experts, which get tokens from all ranks along them."""
    meshes = fsdp_meshes(part)
    if not meshes:  # all of its parameters are in parts of their own
        return ()
    along = [mesh.dims_along(ranks) for mesh_of in meshes for ranks in ranks_along(mesh_of)]
    spans = {dim for dims in along for dim in dims or ()}
    return tuple(dim for dim in mesh.averaged_dims if dim not in spans)


def _not_in_fsdp(name: str, parameter: Any, mesh: ReplicaMesh) -> ConfigError:
    dims = [dim for dim in mesh.averaged_dims if dim in sharded_over(parameter, mesh)]
    sizes = dict(mesh.dims)
    hint = "apply fully_shard to the outermost module, too, without ignored_params"
    if dims == list(mesh.averaged_dims) and len(dims) == 1:
        others = "".join(f', "{n}": {s}' for n, s in mesh.dims if n not in dims)
        hint = (
            "for experts over all ranks that split the batch, add a dimension of one rank: "
            f'elastic.join(mesh={{"dp_mod": 1, "dp_ep": {sizes[dims[0]]}{others}}}), '
            'fully_shard(experts, mesh=run.mesh["dp_mod"]), and for the rest of the model '
            'fully_shard(model, mesh=run.mesh["dp_mod", "dp_ep"]._flatten("dp_all"))'
        )
    return ConfigError(
        f"run.wrap() of a sharded module: {name!r} is on {parameter.device_mesh}, but fully_shard "
        "does not manage it, so nothing would reduce its gradients over the replicas",
        hint=hint,
    )


def _check_experts(parameters: Mapping[str, nn.Parameter], mesh: ReplicaMesh) -> None:
    """Raise ConfigError under a mesh with ``ep`` if no parameter is sharded over it."""
    if EXPERTS not in mesh.split_dims:
        return
    if any(EXPERTS in sharded_over(parameter, mesh) for parameter in parameters.values()):
        return
    raise ConfigError(
        f"run.wrap() under elastic.join(mesh=…) with the dimension {EXPERTS!r}, of a module "
        "without a parameter that is sharded over it: experts that each rank creates for itself, "
        "under the same names, would be averaged over the ranks, and saved once",
        hint=_AS_EXPERTS.format(name="self.up")
        + ". A module without experts is wrapped as a part of the one that has them, or in a job "
        f"without {EXPERTS!r}",
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
    _check_data_dims(name, parameter, mesh, spanned)
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


def _check_data_dims(
    name: str, parameter: Any, mesh: ReplicaMesh, spanned: Mapping[str, int]
) -> None:
    for dim in mesh.data_dims:
        if dim not in spanned:
            raise ConfigError(
                f"run.wrap() of a sharded module: {name!r} is on {parameter.device_mesh}, which "
                f"lacks the dimension {dim!r}: it splits the batch, and nothing would reduce over "
                "it",
                hint=f"fully_shard(model, mesh={_all_of(mesh.data_dims)})",
            )
        if parameter.placements[spanned[dim]].is_replicate():
            raise ConfigError(
                f"run.wrap() of a module with its own replicate dimension: {name!r} is "
                f"replicated over {dim!r}",
                hint="the replicas of a job come from elastic.join(mesh=…): pass only the sharded "
                'dimension: fully_shard(model, mesh=run.mesh["shard"])',
            )


def _all_of(dims: Collection[str]) -> str:
    names = ", ".join(f'"{dim}"' for dim in dims)
    return f"run.mesh[{names}]" + ('._flatten("dp_all")' if len(dims) > 1 else "")


# ----------------------------------------------------------------------------
# The parts of a module that ``fully_shard`` was applied to, their reductions and their settings.
#
# The harness depends on FSDP's mean over ranks. So settings that change that mean are refused,
# before and after ``run.wrap`` and ``run.build``.

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

    def gathered(self) -> list[torch.Tensor]:
        """The parameters for which backward passes compute gradients, as far as FSDP has gathered
        them."""
        return [p for part in self.parts for p in torch_fsdp.fsdp_gathered(part)]

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


# ----------------------------------------------------------------------------
# Gradients of pipeline stages: summed once per step, when the script calls for it.
#
# A schedule runs one backward pass per micro-batch, at other times on each stage, and some of its
# passes fill ``.grad`` without hooks. A collective of the replica at the end of a backward pass
# would also block the pass that the previous stage waits for. So with a dimension ``pp`` backward
# passes only accumulate, and the ranks of the replica synchronise in ``run.reduce_gradients()``.
#
# FSDP still reduces within the stage in its backward passes; of its gradients, the sum over the
# replicas is postponed.

_SCHEDULES = "torch.distributed.pipelining.schedules"


class StageReduction(AcrossReduction):
    """Sums the gradients of one module over the replicas, and over the ranks of this one that hold
    the same stage entirely. Never over stages."""

    hint_of_unreduced = (
        "call run.reduce_gradients() after the last backward pass, before clip_grad_norm_ and "
        "optimizer.step()"
    )

    def __init__(
        self,
        replica: ModelReplica,
        parameters: Callable[[], Iterable[nn.Parameter]],
        *,
        has_fsdp: bool,
    ) -> None:
        super().__init__(replica)
        self._all_parameters = parameters
        self._has_fsdp = has_fsdp
        has_peers = bool(replica.mesh.dims_of_stage)  # other ranks of the replica with this stage
        self._is_whole = has_peers and not any(map(is_dtensor, parameters()))

    @property
    def is_complete(self) -> bool:
        """As in the base class, and no forward pass has begun since."""
        return self.is_done and not self.is_local

    @property
    def has_new_gradients(self) -> bool:
        """As in the base class; passes that are not summed yet count."""
        return super().has_new_gradients or self._has_accumulated

    @property
    def holds_unweighted(self) -> bool:
        """Whether backward passes have left gradients that a later sum multiplies by this rank's
        share of the samples. FSDP multiplies in each pass."""
        return self.is_local and not self._has_fsdp

    def forward_begins(self) -> None:
        """As in the base class: the gradients of this pass are summed later."""
        super().forward_begins()
        if self._across is not None:
            self.accumulates()

    def reduce(self, gradients: torch.Tensor, unit: Unit | None = None) -> None:
        """Keep them: they are summed over the replicas when the script calls for it."""

    @property
    def fault(self) -> Exception | None:
        """The error of a sum over the replicas, until the ranks of this one have agreed on it."""
        return self._fault

    @property
    def has_accumulated(self) -> bool:
        """Whether backward passes have accumulated gradients, as far as is known before the sum."""
        return self.is_local or self.has_gradients

    def sum_accumulated(self, fault: Exception | None = None) -> None:
        """Sum what backward passes have accumulated: also if there is nothing, which other replicas
        do not know. After the ``fault`` of another module, only within the replica."""
        self._fault = self._fault or fault
        self.has_forward = True  # also if the script calls only parts of the module
        parameters = [p for p in self._all_parameters() if p.requires_grad]
        if self.holds_gradients():
            raise TrainingError(
                "run.reduce_gradients() while FSDP holds gradients of passes under "
                "set_requires_gradient_sync(False)",
                hint="call model.set_requires_gradient_sync(True) before the last backward pass; "
                "the schedules of torch.distributed.pipelining do",
            )
        self._note_split(parameters)
        assert self._across is not None
        if self._has_fsdp:
            self._sum_in_buckets(parameters, 1.0 / self._across.size)
            return
        mesh = self._replica.mesh
        copies = mesh.size // mesh.stages // mesh.data_size if self._is_whole else 1
        self._sum_in_buckets(parameters, 0.0 if self.weight == 0.0 else self.weight / copies)

    def _room_for(self, count: int) -> tuple[int, int]:
        """As in the base class: each stage has its own values."""
        mesh = self._replica.mesh
        stage = mesh.stage_of(self._replica.position)
        if stage is None or not mesh.same_part_dims:
            return 0, count
        own = [float(count) if n == stage.index else 0.0 for n in range(stage.count)]
        counts = [round(total) // len(stage.ranks) for total in self._replica.sum(own)]
        return sum(counts[: stage.index]), sum(counts)

    @property
    def has_gradients(self) -> bool:
        """Whether some parameter has a gradient."""
        return any(p.grad is not None for p in self._all_parameters())

    def send_flags(self) -> None:
        """Send this rank's control flags unless they were sent with gradients."""
        assert self._across is not None
        if self._across.size == 1:
            self._write_flags()
        elif self.flags is not None and not self._has_spoken:
            self._sum(torch.empty(0, dtype=torch.float64, device=self._replica.device))


def refuse_split_backward(name: str) -> None:
    """Raise ConfigError if the forward pass of a stage with several ``fully_shard`` is called by a
    schedule that computes the gradients of inputs and of weights in separate passes.

    FSDP takes the inner parts' gradients in the first of them, in which there are none: they stay
    None, or lack some micro-batches, without an error [measured, torch 2.13]. A stage with one
    ``fully_shard`` is reduced by the schedule (``perform_reduce_grad`` in
    torch/distributed/pipelining/stage.py).
    """
    frame = sys._getframe(1)
    while frame is not None and not frame.f_globals.get("__name__", "").startswith(_SCHEDULES):
        frame = frame.f_back  # type: ignore[assignment]
    schedule = frame.f_locals.get("self") if frame is not None else None
    order = getattr(schedule, "pipeline_order", None) or {}
    actions = (action for row in order.values() for action in row if action is not None)
    if any(action.computation_type.name == "BACKWARD_WEIGHT" for action in actions):
        raise ConfigError(
            f"{type(schedule).__name__} with several fully_shard in the stage {name}: it computes "
            "gradients of weights in passes of their own, and torch loses those of the inner parts",
            hint="apply fully_shard once to each stage: "
            'fully_shard(stage, mesh=run.mesh["shard"]), or use ScheduleInterleaved1F1B',
        )


def reduce_stages(reductions: Sequence[StageReduction]) -> None:
    """Sum the gradients of all modules of this rank. All ranks call it once per step.

    ``reductions``: the first one sends the control flags. Raises TrainingError if there are no
    gradients; the error of a collective, or GroupAborted, on all
    ranks of a replica together.
    """
    if not any(each.has_accumulated for each in reductions):
        raise _without_gradients()
    fault = None
    for each in reductions:
        each.sum_accumulated(fault)
        fault = each.fault
    if fault is None:
        reductions[0].send_flags()
    reductions[0].finish_all(reductions)
    if not any(each.has_gradients for each in reductions):
        raise _without_gradients()


def _without_gradients() -> TrainingError:
    return TrainingError(
        "run.reduce_gradients() without gradients: no backward pass has run since the last "
        "optimizer.zero_grad()",
        hint="call it after the backward passes of all micro-batches, before "
        "clip_grad_norm_ and optimizer.step()",
    )


# ----------------------------------------------------------------------------
# A module under ``elastic.join(mesh=…)`` as a part of the job: the counterpart of ElasticDDP.
#
# The script keeps its module object; this one represents it in the job's state. FSDP's
# collectives run within the replica; those across replicas are
# added by the reductions of this file, one of them for meshes with pipeline stages.


class ShardedModule:
    """A module sharded over the replica, or complete on each of its ranks: one per ``run.wrap``.

    Raises ConfigError for an unsupported module.
    """

    def __init__(self, module: nn.Module, group: ReplicaProcessGroup) -> None:
        mesh = group.replica.mesh
        self._parts = FSDPParts(module)
        self._fsdp = self._parts.parts
        self._filler = Filler()
        self.earlier = EarlierGradients(lambda: self.all_parameters, self._parts.gathered)
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
        parameters = tuple(self.module.parameters())
        if list(map(id, parameters)) == list(map(id, self._wrapped)):
            self._in_world_parameters = parameters

    def reshard(self) -> None:
        """Let the module have its sharded parameters, also after a forward pass of the script."""
        self._parts.reshard()

    def leave_world(self) -> None:
        """Release everything that belongs to the world, and FSDP's state of an interrupted step."""
        self.reduction.leave()
        self._filler.end()
        self._fingerprints.end()
        self._in_world_parameters = ()
        if self.in_world:
            self.in_world = False
            self._parts.reset()

    def begin_step(self, weight: float, *, has_samples: bool = True) -> None:
        """Begin a step in which this rank's gradients have ``weight``, the fraction of its samples
        in the global batch, or those of all ranks are equal. Without samples it reads a filler."""
        before = self.reduction.weight
        self._filler.end()
        if not self.holds_gradients:
            # An evaluation leaves the outermost part with its unsharded parameters, whose gradients
            # are None; after a recovery, the script would find its sharded ones.
            self.reshard()
        if not has_samples and self._fsdp:
            weight = 0.0  # FSDP's reduction multiplies the gradients of each pass
        elif not has_samples:
            weight = before if self.reduction.holds_unweighted else weight
            self._filler.begin(self.all_parameters)
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

    def end_step(self) -> None:
        """End a step: backward passes outside of steps add their gradients."""
        self._filler.end()

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
