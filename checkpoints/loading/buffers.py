"""Load buffers: memory for tensors that are being read, separate until everything is verified.

A buffer holds a complete tensor or, when loading into a sharded tensor, the regions of this rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from checkpoints.tensors.allocation import empty
from checkpoints.tensors.dtensors import block
from checkpoints.tensors.dtypes import BY_NAME
from checkpoints.tensors.partition import TensorSpec
from checkpoints.tensors.regions import Extent, Region, Span, full_region, regions_of


class TensorBuffer:
    """Memory for one tensor: for all of it (``regions`` is None), or for some regions."""

    def __init__(self, spec: TensorSpec, regions: Sequence[Region] | None = None) -> None:
        dtype = BY_NAME[spec.dtype].torch
        self.spec = spec
        self.is_complete = regions is None
        wanted = (
            [full_region(spec.shape)]
            if regions is None
            else [region for region in regions if region.count]
        )
        self.blocks = tuple((region, empty(region.shape, dtype)) for region in wanted)

    @classmethod
    def over(cls, spec: TensorSpec, blocks: Sequence[tuple[Region, torch.Tensor]]) -> TensorBuffer:
        """A buffer over live memory, to be filled with bytes that were verified before."""
        buffer = cls(spec, ())
        # Tied tensors share memory: fill it once.
        distinct = {
            (region, m.data_ptr(), m.stride()): (region, m) for region, m in blocks if region.count
        }
        buffer.blocks = tuple(distinct.values())
        return buffer

    @property
    def tensor(self) -> torch.Tensor:
        """The complete tensor."""
        assert self.is_complete
        return self.blocks[0][1]

    def needs(self, place: Extent) -> bool:
        """Whether the buffer holds any element of ``place``."""
        return self.is_complete or any(True for _ in self._common(place))

    def contiguous_view(self, place: Extent) -> torch.Tensor | None:
        """The memory of ``place`` as a flat tensor, if it is contiguous and on the CPU; else
        None."""
        if isinstance(place, Span):
            return self._contiguous_span(place)
        overlapping = [(region, memory) for region, memory in self.blocks if region & place]
        if (
            len(overlapping) != 1
            or not overlapping[0][0].contains(place)
            or not _is_plain(overlapping[0][1])
        ):
            return None
        region, memory = overlapping[0]
        view = block(memory, place.relative_to(region))
        # For torch, a single element of a strided column is contiguous, too.
        is_contiguous = view.is_contiguous() and view.reshape(-1).stride(0) == 1
        return view.reshape(-1) if is_contiguous else None

    def _contiguous_span(self, span: Span) -> torch.Tensor | None:
        if len(self.blocks) != 1 or self.blocks[0][0] != full_region(self.spec.shape):
            return None
        memory = self.blocks[0][1]
        if not (_is_plain(memory) and memory.is_contiguous()) or memory.numel() == 1:
            return None
        return memory.view(-1)[span.start : span.start + span.count]

    def put(self, place: Extent, data: torch.Tensor) -> None:
        """Copy the elements that the buffer holds from ``data``, the flat elements of
        ``place``."""
        for common, region, memory, before, part in self._common(place):
            source = data[before : before + part.count].view(part.shape)
            block(memory, common.relative_to(region)).copy_(block(source, common.relative_to(part)))

    def get(self, place: Extent) -> torch.Tensor:
        """The flat elements of ``place``; the buffer must be complete."""
        if isinstance(place, Span):
            return self.tensor.reshape(-1)[place.start : place.start + place.count]
        return block(self.tensor, place).reshape(-1)

    def copy_out(self, region: Region, memory: torch.Tensor) -> None:
        """Copy a region into live memory, unless the buffer is that memory."""
        for outer, ours in self.blocks:
            if ours is not memory and outer.contains(region):
                if ours.data_ptr() != memory.data_ptr() or ours.device != memory.device:
                    memory.copy_(block(ours, region.relative_to(outer)))
                return

    def _common(self, place: Extent) -> Iterator[tuple[Region, Region, torch.Tensor, int, Region]]:
        """(intersection, own region, its memory, elements of ``place`` before the part, the
        part)."""
        parts = [(place, 0)] if isinstance(place, Region) else regions_of(place, self.spec.shape)
        for part, before in parts:
            for region, memory in self.blocks:
                common = region & part
                if common is not None:
                    yield common, region, memory, before, part


def _is_plain(memory: torch.Tensor) -> bool:
    return memory.device.type == "cpu" and not (memory.is_conj() or memory.is_neg())
