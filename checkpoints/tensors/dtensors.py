"""DTensors, as created by FSDP2 (``fully_shard``) and tensor parallelism: layout and memory.

Reads public attributes only, without communication. torch.distributed is not imported, so programs
without sharded tensors do not pay for it.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from checkpoints.errors import StateError
from checkpoints.tensors.layout import Layout, Split, local_shape, local_shards
from checkpoints.tensors.regions import Region
from checkpoints.tensors.torch_private import storage_of

# Cached per mesh: a state has thousands of tensors but few distinct placements.
_LAYOUTS: weakref.WeakKeyDictionary[Any, dict[object, Layout]] = weakref.WeakKeyDictionary()


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Whether it is a DTensor."""
    return hasattr(tensor, "placements") and hasattr(tensor, "device_mesh")


def layout_of(tensor: Any, where: str = "a tensor") -> Layout:
    """The layout of a DTensor. Raises :class:`StateError` for a ``Partial`` placement."""
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
    """The local tensor of a DTensor: a view without autograd."""
    with torch.no_grad():
        local: torch.Tensor = tensor.to_local()
    return local.detach() if local.requires_grad else local


def local_regions(tensor: Any, where: str = "a tensor") -> tuple[tuple[Region, torch.Tensor], ...]:
    """The regions of a DTensor that this rank holds, each with a view of the local tensor.

    Raises :class:`StateError` if the local tensor's shape contradicts the placements.
    """
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return ()
    layout, shape, local = layout_of(tensor, where), tuple(tensor.shape), local_of(tensor)
    expected = local_shape(layout, shape, tuple(coordinate))
    if tuple(local.shape) != expected:
        raise StateError(
            f"{where} has a local shard of shape {list(local.shape)}, "
            f"but its placements imply {list(expected)}",
            hint="Unevenly split tensors may need DTensor.from_local(..., shape=, stride=).",
        )
    return tuple(
        (shard.region, block(local, Region(shard.local_offset, shard.region.shape)))
        for shard in local_shards(layout, shape, tuple(coordinate))
    )


def block(tensor: torch.Tensor, region: Region) -> torch.Tensor:
    """A region of a plain tensor, as a view."""
    for dim, (offset, length) in enumerate(zip(region.offset, region.shape, strict=True)):
        if length != tensor.shape[dim]:
            tensor = tensor.narrow(dim, offset, length)
    return tensor


def tensor_identity(tensor: Any) -> tuple[object, ...]:
    """A key that tied DTensors share on every rank, including ranks whose shard is empty.

    An empty shard has no address, so the key holds its storage; the caller keeps that alive.
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
            f"{where} is a DTensor with placement {placement}: no rank holds its values",
            hint="Reduce it first: tensor.redistribute(placements=[Replicate()]).",
        )
    dim = int(placement.dim)
    return Split(dim + dims if dim < 0 else dim, int(getattr(placement, "split_factor", 1)))
