"""Staging: this rank's share of live tensors, copied into a host buffer that is used again.

The copy is the whole stall of a save. The buffer holds exactly the body of the writer's file; it
is pinned where tensors are on CUDA devices, and only grows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch

from checkpoints.dtypes import BY_NAME
from checkpoints.plan import Span, TensorSpec
from checkpoints.writer import Data, Pieces, elements


class Buffer:
    """Host memory for one staged share; one owner at a time."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def reserve(self, size_bytes: int, *, pinned: bool) -> None:
        """Have room, and have the pages there: the first save is no slower than the next."""
        if self._bytes.numel() < size_bytes or (pinned and not self._bytes.is_pinned()):
            self._bytes = torch.empty(0, dtype=torch.uint8)  # never both, the old and the new
            self._bytes = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=pinned)
            self._bytes.fill_(1)  # zeros would be pages that are not there yet

    def fill(self, pieces: Pieces, tensors: Mapping[str, torch.Tensor]) -> Data:
        """Copy ``pieces``; where their bytes are now. Returns when the tensors may change."""
        sizes = [span.count * spec.element_bytes for spec, span in pieces]
        begins = [0, *accumulate(sizes)]
        on_gpu = [t.device for t in tensors.values() if t.is_cuda]
        self.reserve(begins[-1], pinned=bool(on_gpu))
        for (spec, span), begin, size in zip(pieces, begins, sizes, strict=False):
            if size:
                room = self._bytes[begin : begin + size].view(BY_NAME[spec.dtype].torch)
                room.copy_(elements(tensors[spec.name], span), non_blocking=True)
        for device in set(on_gpu):
            torch.cuda.current_stream(device).synchronize()
        return _reader(self._bytes.numpy().data, pieces, begins)


def _reader(memory: memoryview, pieces: Pieces, begins: Sequence[int]) -> Data:
    starts = {
        spec.name: begin - span.start * spec.element_bytes
        for (spec, span), begin in zip(pieces, begins, strict=False)
    }

    def data(spec: TensorSpec, span: Span) -> memoryview:
        begin = starts[spec.name] + span.start * spec.element_bytes
        return memory[begin : begin + span.count * spec.element_bytes]

    return data
