"""DTensors, as FSDP2 (``fully_shard``) and tensor parallelism make them: layout and memory.

Only public attributes are read, nothing is communicated, and torch.distributed is not imported:
a program without sharded tensors does not pay for it.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from checkpoints.errors import StateError
from checkpoints.tensors.layout import Layout, Split, local_shape, local_shards
from checkpoints.tensors.regions import Region
from checkpoints.tensors.torch_private import storage_of

# Of each mesh, while it lives: a state has thousands of tensors, placed in a few ways.
_LAYOUTS: weakref.WeakKeyDictionary[Any, dict[object, Layout]] = weakref.WeakKeyDictionary()


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Whether it is a DTensor."""
    return hasattr(tensor, "placements") and hasattr(tensor, "device_mesh")


def layout_of(tensor: Any, where: str = "a tensor") -> Layout:
    """The layout of a DTensor. Raises :class:`StateError` for one whose parts must be summed."""
    mesh, placements, dims = tensor.device_mesh, tensor.placements, tensor.dim()
    known = _LAYOUTS.setdefault(mesh, {})
    layout = known.get((placements, dims))
    if layout is None:
        layout = known[placements, dims] = Layout(
            mesh_shape=tuple(int(n) for n in mesh.shape),
            ranks=tuple(mesh.mesh.flatten().tolist()),
            splits=tuple(_split(placement, where, dims) for placement in placements),
        )
    return layout


def local_of(tensor: Any) -> torch.Tensor:
    """The part of a DTensor in this rank's memory: a view of it, without autograd."""
    with torch.no_grad():
        local: torch.Tensor = tensor.to_local()
    return local.detach() if local.requires_grad else local


def local_regions(tensor: Any, where: str = "a tensor") -> tuple[tuple[Region, torch.Tensor], ...]:
    """What this rank holds of a DTensor: blocks of the whole, each with a view of its memory.

    Raises :class:`StateError` if its memory has another shape than its placements say.
    """
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return ()
    layout, shape, local = layout_of(tensor, where), tuple(tensor.shape), local_of(tensor)
    expected = local_shape(layout, shape, tuple(coordinate))
    if tuple(local.shape) != expected:
        raise StateError(
            f"{where} has a shard of shape {list(local.shape)} here, "
            f"its placements say {list(expected)}",
            hint="Unevenly split tensors may need DTensor.from_local(..., shape=, stride=).",
        )
    return tuple(
        (shard.region, block(local, Region(shard.local_offset, shard.region.shape)))
        for shard in local_shards(layout, shape, tuple(coordinate))
    )


def block(tensor: torch.Tensor, region: Region) -> torch.Tensor:
    """A block of a plain tensor, as a view."""
    for dim, (offset, length) in enumerate(zip(region.offset, region.shape, strict=True)):
        if length != tensor.shape[dim]:
            tensor = tensor.narrow(dim, offset, length)
    return tensor


def tensor_identity(tensor: Any) -> tuple[object, ...]:
    """The same for tied DTensors on every rank, also on those whose shard is empty.

    An empty shard has no address, so the storage tells them apart; the caller keeps it alive.
    """
    local = local_of(tensor)
    return (
        storage_of(local),
        local.storage_offset(),
        local.stride(),
        tuple(tensor.shape),
        tensor.dtype,
        tuple(tensor.placements),
    )


def _split(placement: Any, where: str, dims: int) -> Split | None:
    if placement.is_replicate():
        return None
    if placement.is_partial() or not hasattr(placement, "dim"):
        raise StateError(
            f"{where} is a DTensor placed as {placement}: no rank has its values",
            hint="Reduce it first: tensor.redistribute(placements=[Replicate()]).",
        )
    dim = int(placement.dim)
    return Split(dim + dims if dim < 0 else dim, int(getattr(placement, "split_factor", 1)))
