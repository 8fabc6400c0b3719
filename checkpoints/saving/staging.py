"""Staging: copies this rank's share of the live tensors into reusable host buffers.

The copy is the only stall of an asynchronous save. A buffer holds exactly the body of the writer's
file, is pinned if tensors are on CUDA devices, and never shrinks.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch

from checkpoints.saving.tensor_file import Data, Pieces
from checkpoints.tensors.allocation import empty
from checkpoints.tensors.elements import copy_to
from checkpoints.tensors.partition import TensorSpec, chunks_of
from checkpoints.tensors.regions import Extent


class StagingBuffer:
    """Host memory for one staged share; has one owner at a time."""

    def __init__(self) -> None:
        self.owner: object | None = None  # changed by the pool only
        self._bytes = torch.empty(0, dtype=torch.uint8, device="cpu")

    def reserve(self, size_bytes: int, *, pinned: bool) -> None:
        """Allocate the memory and fault its pages in, so that the first save is not slower."""
        if self._bytes.numel() < size_bytes or (pinned and not self._bytes.is_pinned()):
            # Free the old buffer before allocating the new one.
            self._bytes = torch.empty(0, dtype=torch.uint8, device="cpu")
            self._bytes = (
                torch.empty(size_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)
                if pinned
                else empty((size_bytes,), torch.uint8)
            )
            self._bytes.fill_(1)  # writing zeros might not fault the pages in

    def fill(self, pieces: Pieces, tensors: Mapping[str, torch.Tensor]) -> Data:
        """Copy ``pieces``; the tensors may change once this returns. Returns a reader of the
        bytes."""
        sizes = [place.count * spec.element_bytes for spec, place in pieces]
        begins = [0, *accumulate(sizes)]
        on_gpu = {t.device for t in tensors.values() if t.is_cuda}
        self.reserve(begins[-1], pinned=bool(on_gpu))
        for (spec, place), begin, size in zip(pieces, begins, sizes, strict=False):
            if size:
                copy_to(self._bytes[begin : begin + size], tensors[spec.name], place)
        for device in on_gpu:
            torch.cuda.current_stream(device).synchronize()
        return _reader(self._bytes.numpy().data, pieces, begins)


class StagingPool:
    """A fixed number of staging buffers, shared by the training thread and the writer thread.

    A buffer is free if it has no owner. Its owner is recorded in the same statement that takes it
    and never passed along, so an exception at any point of a save, such as KeyboardInterrupt,
    leaves no buffer that :meth:`release` would not find.
    """

    def __init__(self, count: int) -> None:
        self._buffers = [StagingBuffer() for _ in range(count)]
        self._released = threading.Condition()

    @property
    def has_free(self) -> bool:
        return any(buffer.owner is None for buffer in self._buffers)

    def acquire(self, owner: object, wait_s: float) -> StagingBuffer | None:
        """A buffer of ``owner``; None if none is free within ``wait_s``."""
        until_s = time.monotonic() + wait_s
        with self._released:
            while True:
                for buffer in self._buffers:
                    if buffer.owner is None:
                        buffer.owner = owner
                        return buffer
                left_s = until_s - time.monotonic()
                if left_s <= 0:
                    return None
                self._released.wait(min(left_s, threading.TIMEOUT_MAX))

    def release(self, owner: object) -> None:
        """Free the buffer of ``owner``, if it has one."""
        with self._released:
            for buffer in self._buffers:
                if buffer.owner is owner:
                    buffer.owner = None
            self._released.notify_all()

    def reserve(self, size_bytes: int, *, pinned: bool) -> None:
        """Grow the free buffers one at a time, so that a concurrent save finds the other one."""
        for buffer in self._buffers:
            owner = object()
            try:
                with self._released:
                    if buffer.owner is not None:
                        continue
                    buffer.owner = owner
                # A lack of memory is reported by the save that needs it.
                with contextlib.suppress(MemoryError, RuntimeError):
                    buffer.reserve(size_bytes, pinned=pinned)
            finally:
                self.release(owner)


def _reader(memory: memoryview, pieces: Pieces, begins: Sequence[int]) -> Data:
    starts: dict[tuple[str, Extent], int] = {}

    def data(spec: TensorSpec, place: Extent) -> memoryview:
        if not starts:  # computed by the writer thread, so that training does not wait for it
            starts.update(_starts(pieces, begins))
        begin = starts[spec.name, place]
        return memory[begin : begin + place.count * spec.element_bytes]

    return data


def _starts(pieces: Pieces, begins: Sequence[int]) -> dict[tuple[str, Extent], int]:
    """Where each chunk begins in the buffer."""
    starts = {}
    for (spec, place), begin in zip(pieces, begins, strict=False):
        for chunk in chunks_of(place, spec.element_bytes):
            starts[spec.name, chunk] = begin
            begin += chunk.count * spec.element_bytes
    return starts
