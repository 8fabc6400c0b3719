"""Spare memory: what a load needs of each tensor, kept apart until all of it is verified.

A tensor is needed whole, or, to be loaded into a sharded one, only the blocks of this rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from checkpoints.tensors.allocation import empty
from checkpoints.tensors.dtensors import block
from checkpoints.tensors.dtypes import BY_NAME
from checkpoints.tensors.partition import TensorSpec
from checkpoints.tensors.regions import Box, Place, Span, boxes_of, whole


class Spare:
    """Memory for one tensor: all of it (``boxes`` is None), or some blocks."""

    def __init__(self, spec: TensorSpec, boxes: Sequence[Box] | None = None) -> None:
        dtype = BY_NAME[spec.dtype].torch
        self.spec = spec
        self.is_whole = boxes is None
        wanted = [whole(spec.shape)] if boxes is None else [box for box in boxes if box.count]
        self.blocks = tuple((box, empty(box.shape, dtype)) for box in wanted)

    @classmethod
    def over(cls, spec: TensorSpec, blocks: Sequence[tuple[Box, torch.Tensor]]) -> Spare:
        """Not spare: live memory, to be filled with what was verified before."""
        made = cls(spec, ())
        # Tied tensors are one memory: filled once.
        distinct = {(box, m.data_ptr(), m.stride()): (box, m) for box, m in blocks if box.count}
        made.blocks = tuple(distinct.values())
        return made

    @property
    def tensor(self) -> torch.Tensor:
        """All of it."""
        assert self.is_whole
        return self.blocks[0][1]

    def needs(self, place: Place) -> bool:
        """Whether any element of ``place`` is in it."""
        return self.is_whole or any(True for _ in self._common(place))

    def room(self, place: Place) -> torch.Tensor | None:
        """The memory of ``place`` as flat elements, if it lies in one piece here, on the CPU."""
        if isinstance(place, Span):
            return self._run(place)
        near = [(box, memory) for box, memory in self.blocks if box & place]
        if len(near) != 1 or not near[0][0].holds(place) or not _is_plain(near[0][1]):
            return None
        box, memory = near[0]
        view = block(memory, place.within(box))
        # One element of a column counts as contiguous, too, and is not.
        one_piece = view.is_contiguous() and view.reshape(-1).stride(0) == 1
        return view.reshape(-1) if one_piece else None

    def _run(self, span: Span) -> torch.Tensor | None:
        if len(self.blocks) != 1 or self.blocks[0][0] != whole(self.spec.shape):
            return None
        memory = self.blocks[0][1]
        if not (_is_plain(memory) and memory.is_contiguous()) or memory.numel() == 1:
            return None
        return memory.view(-1)[span.start : span.start + span.count]

    def put(self, place: Place, data: torch.Tensor) -> None:
        """Copy what is needed of the flat elements of ``place``."""
        for common, box, memory, before, part in self._common(place):
            source = data[before : before + part.count].view(part.shape)
            block(memory, common.within(box)).copy_(block(source, common.within(part)))

    def get(self, place: Place) -> torch.Tensor:
        """The flat elements of ``place``, of a tensor that is here as a whole."""
        if isinstance(place, Span):
            return self.tensor.reshape(-1)[place.start : place.start + place.count]
        return block(self.tensor, place).reshape(-1)

    def give(self, box: Box, memory: torch.Tensor) -> None:
        """Copy a block into live memory, unless this is that memory."""
        for outer, ours in self.blocks:
            if ours is not memory and outer.holds(box):
                if ours.data_ptr() != memory.data_ptr() or ours.device != memory.device:
                    memory.copy_(block(ours, box.within(outer)))
                return

    def _common(self, place: Place) -> Iterator[tuple[Box, Box, torch.Tensor, int, Box]]:
        """(common block, ours, its memory, elements before the part of ``place``, that part)."""
        parts = [(place, 0)] if isinstance(place, Box) else boxes_of(place, self.spec.shape)
        for part, before in parts:
            for box, memory in self.blocks:
                common = box & part
                if common is not None:
                    yield common, box, memory, before, part


def _is_plain(memory: torch.Tensor) -> bool:
    return memory.device.type == "cpu" and not (memory.is_conj() or memory.is_neg())
