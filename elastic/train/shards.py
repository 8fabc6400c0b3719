"""The state of sharded models on all ranks."""

from __future__ import annotations

import ctypes
import mmap
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias, TypeVar

import torch
from torch import optim

from checkpoints import CheckpointError
from checkpoints.manifest import Manifest
from checkpoints.tensors import BY_NAME, is_dtensor, local_of
from checkpoints.tree import Node, flatten, path_name, tensor_leaves, unflatten
from elastic.errors import ElasticError, TrainingError, WorldLost
from elastic.groups.collectives import all_gather_json
from elastic.groups.world import World
from elastic.torch_private import strided_shard
from elastic.train.sharding import local_value
from elastic.train.state import JobState
from elastic.train.values import plain_form, typed_form

# ----------------------------------------------------------------------------
# Performs actions that must fail on all ranks if they fail on one.

T = TypeVar("T")


def on_all_ranks(world: World, act: Callable[[], T], *, is_loss: bool = False) -> T:
    """Perform an action on every rank. If it fails on one, that rank raises its error, and the
    others raise a TrainingError that names the rank.

    ``is_loss``: the others raise WorldLost instead, and continue without the failed rank.
    """
    error: Exception | None = None
    try:
        result = act()
    except WorldLost:
        raise  # the other ranks notice, too: the group cannot tell them
    except (ElasticError, CheckpointError, ValueError, RuntimeError, OSError, KeyError) as failure:
        error = failure
    report = None if error is None else f"{type(error).__name__}: {error}"
    failures = [(rank, text) for rank, text in enumerate(all_gather_json(report)) if text]
    if error is not None:
        raise error
    if failures:
        rank, text = failures[0]
        # The rank itself shows the hint. A rule in elastic/membership/failures.py matches the
        # sentence.
        why = f"rank {rank} could not restore the state ({text.splitlines()[0]})"
        if is_loss:
            raise WorldLost(why)
        raise TrainingError(f"this rank ends because {why}")
    return result


# ----------------------------------------------------------------------------
# Memory for tensors that a rank receives: in huge pages, and touched before they arrive.
#
# A joining rank has its weights in memory, but no optimizer state yet, which is twice as large
# with Adam. The first touch of new memory costs more than hashing the received data, and on a
# virtual machine that gets the memory from its host, more than the transfer over the network
# (docs/benchmarks.md). So a rank touches it before it is ready to join, while the others train:
# later, all of them would wait.

# From this size on, two copies of a tensor cost more than an additional collective.
IN_PLACE_BYTES = 4 << 20
PAGE_BYTES, HUGE_PAGE_BYTES = 4 << 10, 2 << 20

Spec: TypeAlias = list[Any]
"""``[dtype, shape, device type]`` of a tensor."""


def spec_of(tensor: torch.Tensor) -> Spec:
    """The spec of a tensor."""
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), tensor.device.type]


def new_memory(spec: Spec, device: torch.device) -> torch.Tensor:
    """A new tensor, in huge pages; on ``device`` if the spec has its type, else on the CPU."""
    on = device if spec[2] == device.type else torch.device("cpu")
    tensor = torch.empty(spec[1], dtype=getattr(torch, spec[0]), device=on)
    if on.type == "cpu":
        _use_huge_pages(tensor)
    return tensor


def _use_huge_pages(tensor: torch.Tensor) -> None:
    """Let the kernel map and zero new memory 2 MiB at a time, if it can.

    4 KiB at a time takes longer than all other work of a receiver: for 195 MiB, 0.45 s instead of
    0.14 s with two receivers on two cores [measured].
    """
    first = -(-tensor.data_ptr() // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    end = tensor.data_ptr() + tensor.numel() * tensor.element_size()
    size = (end - first) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    if size > 0:  # without huge pages the call fails, without effect
        libc = ctypes.CDLL(None)
        libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), mmap.MADV_HUGEPAGE)


class Reserve:
    """Memory for the state of optimizers that have none yet. One per process."""

    def __init__(self) -> None:
        self._free: dict[str, list[torch.Tensor]] = defaultdict(list)  # by spec

    def fill(self, optimizers: Iterable[optim.Optimizer]) -> None:
        """Allocate and touch the state that torch's own optimizers will create in their first
        step. Others get none."""
        for optimizer in optimizers:
            for spec in expected_state(optimizer):
                tensor = new_memory(spec, torch.device("cpu"))
                tensor.view(-1).view(torch.uint8)[::PAGE_BYTES].zero_()
                self._free[str(spec)].append(tensor)

    def take(self, specs: Mapping[str, Spec]) -> dict[str, torch.Tensor]:
        """A reserved tensor for each of these names, if one has its spec."""
        return {
            name: free.pop() for name, spec in specs.items() if (free := self._free.get(str(spec)))
        }

    def clear(self) -> None:
        """Free the remaining tensors."""
        self._free.clear()


def expected_state(optimizer: optim.Optimizer) -> list[Spec]:
    """The specs of large tensors on the CPU that the optimizer will create in its first step."""
    if optimizer.state:
        return []
    return [
        spec_of(local)
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.requires_grad
        for local in [local_value(parameter.detach())] * _copies(optimizer, group)
        if local.device.type == "cpu" and local.nbytes >= IN_PLACE_BYTES
    ]


def _copies(optimizer: optim.Optimizer, group: Mapping[str, Any]) -> int:
    """How many tensors of a parameter's shape an optimizer keeps for it."""
    if isinstance(optimizer, optim.SGD):
        return int(bool(group["momentum"]))
    if isinstance(optimizer, optim.RMSprop):
        return 1 + bool(group["momentum"]) + bool(group["centered"])
    pairs = (
        *(optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax),
        *(optim.Adadelta, optim.Rprop),
    )
    if isinstance(optimizer, pairs):
        return 2 + bool(group.get("amsgrad"))
    return 0


# ----------------------------------------------------------------------------
# Packs a rank's state in a replica: DTensors are sent as local tensors and created again.
#
# Ranks at the same position in two replicas hold the same shards, so between them a DTensor
# consists of its local tensor, its placements, and the dimensions of its mesh, which each process
# creates.

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
    """The parameter to which a value in an optimizer's state (tracked/NAME/state/INDEX/…), or a
    gradient (gradients/NAME/INDEX), belongs."""
    parts = path.split("/")
    if parts[0] == "gradients" and len(parts) == 3 and parts[2].isdigit():
        module = job.modules.get(_plain(parts[1]))
        own = module.all_parameters if module is not None else ()
        return own[int(parts[2])] if int(parts[2]) < len(own) else None
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
    meshes: dict[str, Any] = {}
    for module in job.modules.values():
        for parameter in module.all_parameters:
            if is_dtensor(parameter):
                mesh: Any = parameter.device_mesh  # type: ignore[attr-defined]
                meshes.setdefault(_name_of(mesh), mesh)
    return meshes


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
