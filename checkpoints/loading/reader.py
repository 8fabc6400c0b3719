"""Reads and verifies the chunks of a checkpoint, on several threads if there are many bytes."""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from checkpoints.catalog.manifests import open_verified_size
from checkpoints.errors import CorruptCheckpoint
from checkpoints.format.checksummed_json import Hasher, digest
from checkpoints.format.manifest import Chunk, Manifest, TensorEntry, WriterEntry
from checkpoints.format.names import CheckpointName
from checkpoints.loading.buffers import TensorBuffer
from checkpoints.loading.replicas import ReplicatedFile
from checkpoints.storage.failures import reading
from checkpoints.storage.protocol import ReadableFile, Storage
from checkpoints.tensors.dtypes import BY_NAME

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
