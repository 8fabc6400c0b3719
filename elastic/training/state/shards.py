"""Packs a rank's state in a replica: DTensors are sent as local tensors and created again.

Ranks at the same position in two replicas hold the same shards, so between them a DTensor consists
of its local tensor, its placements, and the dimensions of its mesh, which each process creates.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from checkpoints import CheckpointError
from checkpoints.format.manifest import Manifest
from checkpoints.format.state_tree import Node, flatten, path_name, tensor_leaves, unflatten
from checkpoints.tensors.dtensors import is_dtensor, local_of
from checkpoints.tensors.dtypes import BY_NAME
from elastic.errors import ElasticError, TrainingError
from elastic.torch_private import strided_shard
from elastic.training.state.job_state import JobState
from elastic.training.state.typed_values import plain_form, typed_form

Tensors = dict[str, torch.Tensor]


def pack(state: object) -> tuple[dict[str, Any], Tensors]:
    """JSON and plain tensors, from which :func:`unpack` creates the state on another rank."""
    plain, types = plain_form(state)
    node, tensors = flatten(plain)
    shards = {name: _description(t) for name, t in tensors.items() if is_dtensor(t)}
    local = {name: local_of(t) if name in shards else t for name, t in tensors.items()}
    return {"tree": node, "types": types, "shards": shards}, local


def unpack(packed: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], job: JobState) -> Any:
    """Create a packed state, with DTensors over the meshes of this job's parameters."""
    shards = packed["shards"]
    meshes = _meshes(job) if shards else {}
    restored = {
        name: _from_local(tensor, shards[name], meshes) if name in shards else tensor
        for name, tensor in tensors.items()
    }
    tree: Node = packed["tree"]
    return typed_form(unflatten(tree, lambda path, name: restored[name]), packed["types"])


def own_memory(packed: Mapping[str, Any], specs: Mapping[str, list[Any]], job: JobState) -> Tensors:
    """The memory of this job's weights, by name, into which a packed state can be received.

    Empty unless :meth:`JobState.check` accepts the state; only tensors that are distributed in the
    same way here, and whose memory torch recognises as the same in :func:`unpack`. ``specs``:
    dtype, shape and device type of the packed tensors, by name. Raises nothing, because the state
    is checked again later.
    """
    shards = packed["shards"]

    def outline(path: str, name: str) -> torch.Tensor:
        shape = shards[name]["shape"] if name in shards else specs[name][1]
        return torch.empty(shape, device="meta")

    try:
        job.check(unflatten(packed["tree"], outline), "a state")
        own, tensors = pack({"model": {n: m.module.state_dict() for n, m in job.modules.items()}})
    except (ElasticError, CheckpointError, ValueError, RuntimeError, KeyError):
        return {}
    return {
        name: tensor
        for name, tensor in tensors.items()
        if own["shards"].get(name) == shards.get(name)
        and (name not in shards or _has_plain_strides(tensor))
    }


def _has_plain_strides(tensor: torch.Tensor) -> bool:
    """Whether a view of the tensor in its own shape has the same strides. A shard of (1, 4) of
    (1, 8) elements has not, and torch refuses to copy such a view to it: they overlap."""
    return tensor.stride() == torch.empty(tensor.shape, device="meta").stride()


def identical_names(names: Iterable[str], job: JobState) -> list[str]:
    """Those names of a packed state's tensors that are identical on ranks with the same weights:
    parameters, and what optimizers keep for them. Buffers and other objects may differ."""
    parameters = {
        path_name(("model", name, key))
        for name, module in job.modules.items()
        for key, _ in module.module.named_parameters()
    }
    moments = tuple(
        path_name(("tracked", name, "state", ""))
        for name, tracked in job.tracked.items()
        if isinstance(tracked, torch.optim.Optimizer)
    )
    return [name for name in names if name in parameters or name.startswith(moments)]


def warm_up(job: JobState) -> None:
    """Load this job's sharded weights into themselves: that copies nothing, but the first time in a
    process it takes 8 ms, for what DTensor imports and caches [measured, torch 2.13]."""
    with torch.no_grad():
        for module in job.modules.values():
            for parameter in module.all_parameters:
                if is_dtensor(parameter):
                    parameter.detach().copy_(parameter.detach())


def room_for(manifest: Manifest, job: JobState, *, below: str = "") -> dict[str, Any]:
    """New DTensors, by path, for this job's sharded tensors in a checkpoint, so that each rank
    reads only its shards. ``below``: the top-level key of its state, if it has one."""
    like: dict[str, torch.Tensor] = {}
    for name, module in job.modules.items():
        for key, value in module.module.state_dict().items():
            if isinstance(value, torch.Tensor) and is_dtensor(value):
                like[f"model/{name}/{_escaped(key)}"] = value
    room: dict[str, Any] = {}
    prefix = f"{below}/" if below else ""
    for leaf, name in tensor_leaves(manifest.tree).items():
        if not leaf.startswith(prefix):
            continue
        path = leaf.removeprefix(prefix)
        spec = manifest.tensors[name].spec
        live = like.get(path)
        if live is None:
            live = _parameter_of(path, job)
        if live is None or not is_dtensor(live) or tuple(live.shape) != spec.shape:
            continue
        folder = room
        *parents, last = path.split("/")
        for part in parents:
            folder = folder.setdefault(_plain(part), {})
        with torch.no_grad():
            folder[_plain(last)] = torch.empty_like(live.detach(), dtype=BY_NAME[spec.dtype].torch)
    return room


def _parameter_of(path: str, job: JobState) -> torch.Tensor | None:
    """The parameter to which a value in an optimizer's state (tracked/NAME/state/INDEX/…)
    belongs."""
    parts = path.split("/")
    if len(parts) != 5 or parts[0] != "tracked" or parts[2] != "state" or not parts[3].isdigit():
        return None
    tracked: Any = job.tracked.get(_plain(parts[1]))
    tracked = getattr(tracked, "optimizer", tracked)
    groups: Iterable[dict[str, Any]] = getattr(tracked, "param_groups", ())
    parameters: list[torch.Tensor] = [p for group in groups for p in group["params"]]
    index = int(parts[3])
    return parameters[index] if index < len(parameters) else None


def _escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")


def _plain(part: str) -> str:
    return part.replace("~1", "/").replace("~0", "~")


def _meshes(job: JobState) -> dict[str, Any]:
    """The meshes of this job's parameters, by their dimensions."""
    found: dict[str, Any] = {}
    for module in job.modules.values():
        for parameter in module.all_parameters:
            if is_dtensor(parameter):
                mesh: Any = parameter.device_mesh  # type: ignore[attr-defined]
                found.setdefault(_name_of(mesh), mesh)
    return found


def _name_of(mesh: Any) -> str:
    return f"{mesh.mesh_dim_names} {tuple(mesh.shape)}"


def _description(tensor: Any) -> dict[str, Any]:
    return {
        "mesh": _name_of(tensor.device_mesh),
        "placements": [_placement(placement) for placement in tensor.placements],
        "shape": list(tensor.shape),
        "stride": list(tensor.stride()),
    }


def _placement(placement: Any) -> list[Any]:
    if placement.is_replicate():
        return ["replicate"]
    if placement.is_partial() or not hasattr(placement, "dim"):
        raise TrainingError(f"no rank has the values of a tensor with placement {placement}")
    split = getattr(placement, "split_factor", None)
    return ["shard", placement.dim] if split is None else ["strided", placement.dim, split]


def _from_local(
    local: torch.Tensor, description: Mapping[str, Any], meshes: Mapping[str, Any]
) -> Any:
    from torch.distributed.tensor import DTensor

    mesh = meshes.get(description["mesh"])
    if mesh is None:
        raise TrainingError(
            f"received a tensor on the mesh {description['mesh']}, but this rank has no parameter "
            "on it",
            hint="shard the model in the same way on every rank",
        )
    return DTensor.from_local(
        local,
        mesh,
        [_placement_of(kind) for kind in description["placements"]],
        run_check=False,
        shape=torch.Size(description["shape"]),
        stride=tuple(description["stride"]),
    )


def _placement_of(description: list[Any]) -> Any:
    from torch.distributed.tensor import Replicate, Shard

    if description[0] == "replicate":
        return Replicate()
    if description[0] == "shard":
        return Shard(description[1])
    return strided_shard(description[1], description[2])
