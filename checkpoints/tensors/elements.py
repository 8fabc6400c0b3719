"""Access to the elements of a live tensor, plain or sharded: as views and as bytes."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from checkpoints.errors import StateError
from checkpoints.tensors.dtensors import block, is_dtensor, local_regions
from checkpoints.tensors.regions import Extent, Region, regions_of


def views_of(tensor: torch.Tensor, place: Extent) -> Iterator[tuple[torch.Tensor, int]]:
    """Views that make up ``place`` in row-major order, each with the number of elements before
    it."""
    if isinstance(place, Region):
        yield _block(tensor, place), 0
    elif tensor.is_contiguous():
        yield tensor.reshape(-1)[place.start : place.start + place.count], 0
    else:
        for region, before in regions_of(place, tuple(tensor.shape)):
            yield block(tensor, region), before


def check_held(tensor: torch.Tensor, place: Extent) -> None:
    """Raise :class:`StateError` if this rank lacks elements of ``place``. Reads none."""
    if isinstance(place, Region):
        _block(tensor, place)


def copy_to(target_bytes: torch.Tensor, tensor: torch.Tensor, place: Extent) -> None:
    """Copy ``place`` into ``target_bytes``, contiguous. Does not wait for copies from a GPU."""
    typed = target_bytes.view(tensor.dtype)
    with torch.no_grad():
        for view, before in views_of(tensor, place):
            target = typed[before : before + view.numel()]
            target.view(view.shape).copy_(view, non_blocking=True)


def bytes_of(tensor: torch.Tensor, place: Extent) -> memoryview:
    """The bytes of ``place``: a view of the tensor's memory if possible, else a copy."""
    first = next(views_of(tensor, place))[0]
    if _is_plain_memory(first) and first.numel() == place.count:
        flat = first.reshape(-1)
        if flat.stride(0) == 1:  # for torch, one element of a strided row is contiguous, too
            return flat.view(torch.uint8).numpy().data
    copied = torch.empty(place.count * tensor.element_size(), dtype=torch.uint8, device="cpu")
    copy_to(copied, tensor, place)
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()
    return copied.numpy().data


def _is_plain_memory(view: torch.Tensor) -> bool:
    return not (view.is_cuda or view.is_conj() or view.is_neg()) and view.is_contiguous()


def _block(tensor: torch.Tensor, region: Region) -> torch.Tensor:
    if not is_dtensor(tensor):
        return block(tensor, region)
    for outer, memory in local_regions(tensor):
        if outer.contains(region):
            return block(memory, region.relative_to(outer))
    raise StateError(
        f"this rank does not hold the region at {list(region.offset)} of a sharded tensor",
        hint="Save with the rank and world size of torch.distributed.",
    )
