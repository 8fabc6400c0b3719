"""Reads and verifies the tensors of one checkpoint."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from checkpoints.commit import open_verified_size
from checkpoints.errors import CorruptCheckpoint
from checkpoints.manifest import Chunk, Hasher, Manifest, TensorEntry, WriterEntry, digest
from checkpoints.names import CheckpointName
from checkpoints.storage import MappedFile, ReadableFile, Storage, reading
from checkpoints.tensors import (
    BY_NAME,
    Extent,
    Region,
    Span,
    TensorSpec,
    block,
    empty,
    full_region,
    regions_of,
)

if TYPE_CHECKING:
    import torch

# ----------------------------------------------------------------------------
# Load buffers: memory for tensors that are being read, separate until everything is verified.
#
# A buffer holds a complete tensor or, when loading into a sharded tensor, the regions of this
# rank.


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


# ----------------------------------------------------------------------------
# A file with several replicas: a reader that finds damaged bytes reads them from the next one.


@dataclass(frozen=True)
class Replica:
    """One replica, and the callbacks for a failed read and for damage."""

    source: ReadableFile
    fail: Callable[[OSError], None]
    damaged: Callable[[str], None]


class ReplicatedFile:
    """A file that falls back to the next replica if one fails. Replicas are opened on demand.

    For one thread. Only the reader of a range knows its hash: it calls :meth:`reject` for damaged
    bytes, and reads again. ``unreadable`` returns the error of a replica that cannot be read now,
    and may be intact: without another one, it is raised.
    """

    def __init__(
        self,
        replicas: Iterator[Replica],
        size: int | None,
        unreadable: Callable[[], OSError | None],
    ) -> None:
        self._unopened = replicas
        self._size = size
        self._unreadable = unreadable
        self._open: list[Replica] = []
        # Opened if there is no other replica, so that the reader reports its size as the error.
        self._wrong_size: Replica | None = None
        self._dead: set[int] = set()
        self._rejected: tuple[tuple[int, int], set[int]] = ((0, 0), set())
        self._open_next()

    @property
    def is_empty(self) -> bool:
        return not self._open

    def size(self) -> int:
        return self._open[0].source.size()

    def read_at(self, offset: int, into: memoryview) -> int:
        (begin, end), rejected = self._rejected
        skipped = rejected if begin <= offset and offset + len(into) <= end else set()
        failure: OSError | None = None
        index = 0
        while (replica := self._replica(index)) is not None:
            if index not in self._dead and index not in skipped:
                try:
                    return replica.source.read_at(offset, into)
                except OSError as error:
                    failure = error
                    self._dead.add(index)
                    replica.fail(error)
            index += 1
        raise failure or OSError("no replica is left")

    def reject(self, begin: int, end: int) -> bool:
        """Read these bytes from another replica: those of the current one are damaged. Returns
        whether there is another one. Raises OSError if there is one that cannot be read."""
        if self._rejected[0] != (begin, end):
            self._rejected = ((begin, end), set())
        rejected = self._rejected[1]
        unusable = self._dead | rejected
        index = 0
        while (replica := self._replica(index)) is not None and index in unusable:
            index += 1
        if replica is None:
            return self._is_damaged()
        replica.damaged(f"bytes {begin} to {end} are damaged")
        rejected.add(index)
        while (replica := self._replica(index)) is not None:
            if index not in self._dead and index not in rejected:
                return True
            index += 1
        return self._is_damaged()

    def _is_damaged(self) -> bool:
        """False: no replica is left. Raises OSError if one may be intact."""
        if (error := self._unreadable()) is not None:
            raise error
        return False

    def mapped(self) -> None:
        return None

    def close(self) -> None:
        for replica in {*self._open, *([self._wrong_size] if self._wrong_size else [])}:
            replica.source.close()

    def _replica(self, index: int) -> Replica | None:
        if index == len(self._open):
            self._open_next()
        return self._open[index] if index < len(self._open) else None

    def _open_next(self) -> None:
        """Open the next replica of the right size, if any."""
        for replica in self._unopened:
            try:
                size = replica.source.size()
            except OSError as error:
                replica.fail(error)
                replica.source.close()
                continue
            if self._size is None or size == self._size:
                self._open.append(replica)
                return
            if self._wrong_size is None:
                self._wrong_size = replica
            else:
                replica.source.close()
        if not self._open and self._wrong_size is not None and self._unreadable() is None:
            self._open.append(self._wrong_size)


# ----------------------------------------------------------------------------
# Reads and verifies the chunks of a checkpoint, on several threads if there are many bytes.

_PARALLEL_BYTES = 64 << 20  # below this size, threads cost more than they save
_BATCH_BYTES = 32 << 20
STEP_BYTES = 1 << 20  # buffered at a time by a verification
THREAD_NAME = "checkpoint-reader"
_READERS = min(8, os.cpu_count() or 1)

Item = tuple[TensorEntry, Chunk]
Target = Callable[[TensorEntry, Chunk], memoryview]
"""Returns the memory to read a chunk into."""
Done = Callable[[TensorEntry, Chunk, memoryview], None]
"""Called with the bytes of a chunk once they are verified."""


def all_chunks(manifest: Manifest) -> list[Item]:
    """Every chunk of a checkpoint, in file order."""
    every = [(tensor, chunk) for tensor in manifest.tensors.values() for chunk in tensor.chunks]
    return sorted(every, key=lambda item: (item[1].file, item[1].begin))


def read_chunks(
    storage: Storage,
    manifest: Manifest,
    items: Iterable[Item],
    target: Target,
    *,
    headers: Collection[int] | None = None,
    done: Callable[[TensorEntry, Chunk, memoryview], object] | None = None,
) -> None:
    """Read each chunk into its target, verify its hash, then call ``done``.

    ``headers`` are the ranks whose file headers are also verified; by default all. Large reads use
    several threads, which also call ``target`` and ``done``; they are joined before this returns.
    Raises :class:`CorruptCheckpoint` naming file and tensor, :class:`ReadFailed` if the storage
    fails; of several failures, the first in the order of files and bytes.
    """

    def work(batch: Batch) -> None:
        with open_verified_size(storage, manifest.name, batch.writer) as source:
            if batch.with_header:
                _read_header(source, manifest.name, batch.writer)
            for tensor, chunk in batch.items:
                into = target(tensor, chunk)
                _read_verified(source, manifest.name, tensor, chunk, into)
                if done is not None:
                    done(tensor, chunk, into)

    in_batches(storage, manifest, items, headers, work)


def in_batches(
    storage: Storage,
    manifest: Manifest,
    items: Iterable[Item],
    headers: Collection[int] | None,
    work: Callable[[Batch], None],
) -> None:
    """Call ``work`` for batches of chunks and headers; threads and errors as in
    :func:`read_chunks`."""
    if headers is None:
        headers = range(len(manifest.writers))
    batches = list(_batches(manifest, items, set(headers)))
    size = sum(chunk.end - chunk.begin for batch in batches for _, chunk in batch.items)
    with reading(f"{storage.place}/{manifest.name}"):
        if size < _PARALLEL_BYTES:
            for batch in batches:
                work(batch)
        else:
            _in_parallel(work, batches)


@dataclass(frozen=True)
class Batch:
    """The chunks of one file that one thread reads at a time."""

    writer: WriterEntry
    with_header: bool
    items: Sequence[Item]


def _batches(manifest: Manifest, items: Iterable[Item], headers: set[int]) -> Iterator[Batch]:
    by_file: dict[str, list[Item]] = defaultdict(list)
    for item in items:
        by_file[item[1].file].append(item)
    for writer in manifest.writers:
        with_header, batch, size = writer.rank in headers, [], 0
        for item in sorted(by_file[writer.file], key=lambda item: item[1].begin):
            batch.append(item)
            size += item[1].end - item[1].begin
            if size >= _BATCH_BYTES:
                yield Batch(writer, with_header, batch)
                with_header, batch, size = False, [], 0
        if batch or with_header:
            yield Batch(writer, with_header, batch)


def _in_parallel(work: Callable[[Batch], None], batches: Sequence[Batch]) -> None:
    # Reading and hashing both release the GIL; the pool is joined before this returns.
    with ThreadPoolExecutor(_READERS, thread_name_prefix=THREAD_NAME) as pool:
        reads = [pool.submit(work, batch) for batch in batches]
        try:
            for read in reads:
                read.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def scratch(limit: int | None = None) -> Target:
    """A target for verification only: one reused buffer per thread, at most ``limit`` bytes long.
    After a longer chunk, it holds only the last bytes."""
    import torch

    own = threading.local()

    def target(_: TensorEntry, chunk: Chunk) -> memoryview:
        size = chunk.end - chunk.begin
        size = size if limit is None else min(size, limit)
        buffer: torch.Tensor | None = getattr(own, "buffer", None)
        if buffer is None or buffer.numel() < size:
            buffer = own.buffer = torch.empty(size, dtype=torch.uint8, device="cpu")
        return buffer[:size].numpy().data

    return target


def into_buffers(buffers: Mapping[str, TensorBuffer]) -> tuple[Target, Done]:
    """Targets in load buffers: directly where the memory is contiguous, else through a copy."""
    import torch

    temporary = scratch()

    def target(tensor: TensorEntry, chunk: Chunk) -> memoryview:
        memory = buffers[tensor.spec.name].contiguous_view(chunk.place)
        return temporary(tensor, chunk) if memory is None else bytes_view(memory)

    def done(tensor: TensorEntry, chunk: Chunk, data: memoryview) -> None:
        buffer = buffers[tensor.spec.name]
        if buffer.contiguous_view(chunk.place) is None:
            flat = torch.frombuffer(data, dtype=BY_NAME[tensor.spec.dtype].torch)
            buffer.put(chunk.place, flat)

    return target, done


def bytes_view(flat: torch.Tensor) -> memoryview:
    import torch

    return flat.view(torch.uint8).numpy().data


def check_header(
    data: bytes | bytearray | memoryview, name: CheckpointName, writer: WriterEntry
) -> None:
    if digest(data) != writer.header_xxh3_128:
        raise CorruptCheckpoint("checksum mismatch in its header", file=f"{name}/{writer.file}")


def check_chunk(
    count: int, xxh3_128: str, name: CheckpointName, tensor: TensorEntry, chunk: Chunk
) -> None:
    """Raise :class:`CorruptCheckpoint` unless size and hash match ``chunk``."""
    is_short = count != chunk.end - chunk.begin
    if is_short or xxh3_128 != chunk.xxh3_128:
        what = "are truncated" if is_short else "do not match their checksum"
        raise CorruptCheckpoint(
            f"bytes {chunk.begin} to {chunk.end} {what}",
            file=f"{name}/{chunk.file}",
            tensor=tensor.spec.name,
        )


def _read_header(source: ReadableFile, name: CheckpointName, writer: WriterEntry) -> None:
    # Bounded by the size of the file, which was checked.
    data = bytearray(writer.header_bytes)
    while True:
        source.read_at(0, memoryview(data))
        try:
            return check_header(data, name, writer)
        except CorruptCheckpoint:
            if not _has_another_replica(source, 0, writer.header_bytes):
                raise


def _read_verified(
    source: ReadableFile, name: CheckpointName, tensor: TensorEntry, chunk: Chunk, into: memoryview
) -> None:
    """Read a chunk from the first replica whose bytes match its hash."""
    while True:
        try:
            return check_chunk(*_read_hashed(source, chunk, into), name, tensor, chunk)
        except CorruptCheckpoint:
            if not _has_another_replica(source, chunk.begin, chunk.end):
                raise


def _has_another_replica(source: ReadableFile, begin: int, end: int) -> bool:
    return isinstance(source, ReplicatedFile) and source.reject(begin, end)


def _read_hashed(source: ReadableFile, chunk: Chunk, into: memoryview) -> tuple[int, str]:
    """Read and hash in steps that fit into the CPU cache."""
    hashed, size = Hasher(), chunk.end - chunk.begin
    for low in range(0, size, STEP_BYTES):
        length = min(STEP_BYTES, size - low)
        place = low if len(into) == size else 0
        step = into[place : place + length]
        count = source.read_at(chunk.begin + low, step)
        if count != length:
            return low + count, ""
        hashed.update(step)
    return size, hashed.hexdigest()


# ----------------------------------------------------------------------------
# A checkpoint on a memory file system: verified in its mapping, copied once.


@dataclass(frozen=True)
class MappedCheckpoint:
    """The mapped tensor files of a checkpoint. Close it when done."""

    storage: Storage
    manifest: Manifest
    files: Mapping[str, MappedFile]

    @classmethod
    def of(cls, storage: Storage, manifest: Manifest) -> MappedCheckpoint | None:
        """None if a file is not in memory or cannot be mapped: read it instead."""
        files: dict[str, MappedFile] = {}
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for writer in manifest.writers:
                with open_verified_size(storage, manifest.name, writer) as source:
                    mapped = source.mapped()
                if mapped is None:
                    return None
                files[writer.file] = stack.enter_context(contextlib.closing(mapped))
                if len(mapped) != writer.size_bytes:
                    return None
            stack.pop_all()
            return cls(storage, manifest, files)
        return None

    @property
    def identity(self) -> str:
        """Identifies the files and their state; equal in all processes that map them."""
        return digest(" ".join(file.identity for file in self.files.values()).encode())

    def verify(
        self,
        items: Iterable[Item],
        headers: Collection[int] | None,
        progress: Callable[[int], object] | None,
    ) -> None:
        """Verify these chunks, and the headers of these ranks (by default all).

        Raises the same errors as :func:`~checkpoints.reader.read_chunks`.
        """

        def work(batch: Batch) -> None:
            if batch.with_header:
                with self._view(batch, 0, batch.writer.header_bytes) as data:
                    check_header(data, self.manifest.name, batch.writer)
            for tensor, chunk in batch.items:
                with self._view(batch, chunk.begin, chunk.end) as data:
                    check_chunk(len(data), digest(data), self.manifest.name, tensor, chunk)
                if progress is not None:
                    progress(chunk.end - chunk.begin)

        in_batches(self.storage, self.manifest, items, headers, work)

    def copy(self, items: Iterable[Item], into: Mapping[str, TensorBuffer]) -> None:
        """Copy verified chunks; check :meth:`have_changed` afterwards."""
        import numpy

        target, done = into_buffers(into)

        def work(batch: Batch) -> None:
            for tensor, chunk in batch.items:
                memory = target(tensor, chunk)
                with self._view(batch, chunk.begin, chunk.end) as data:
                    # Unlike memoryview assignment, numpy releases the GIL.
                    numpy.copyto(numpy.frombuffer(memory, "u1"), numpy.frombuffer(data, "u1"))
                done(tensor, chunk, memory)

        in_batches(self.storage, self.manifest, items, (), work)

    def have_changed(self) -> bool:
        """Whether any file was written to since it was mapped."""
        return any(file.has_changed() for file in self.files.values())

    def close(self) -> None:
        for file in self.files.values():
            file.close()

    def _view(
        self, batch: Batch, begin: int, end: int
    ) -> contextlib.AbstractContextManager[memoryview]:
        return self.files[batch.writer.file].view(begin, end)
