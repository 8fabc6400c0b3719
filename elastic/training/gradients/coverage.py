"""Checks that the gradients of every parameter are reduced over each dimension that splits the
batch or its samples, and finds by how much FSDP's mean over its own ranks is too large.

Ranks along such a dimension have gradients of different samples. Either FSDP averages over them, or
the parameter is sharded over them by other means: these are experts, each on one rank to which the
others send tokens, and whose gradient is thus already a sum over those ranks' samples.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import nn

from checkpoints.tensors.dtensors import is_dtensor
from elastic.errors import ConfigError
from elastic.torch_fsdp import fsdp_meshes, fsdp_originals
from elastic.training.gradients.sharding import ranks_along, sharded_over
from elastic.world.mesh import EXPERTS, STAGES, ReplicaMesh

_AS_EXPERTS = """\
{name} = nn.Parameter(DTensor.from_local(own, run.mesh["ep"], [Shard(0)]))   # own: this rank's \
experts
    or  nn.Parameter(distribute_tensor(whole, run.mesh["ep"], [Shard(0)]))   # before fully_shard
    and {name}.to_local() in forward (docs/how-to/sharded.md, "Expert parallelism")"""


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
    along = [mesh.dims_along(ranks) for found in meshes for ranks in ranks_along(found)]
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
