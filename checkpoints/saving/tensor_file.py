"""Writes one rank's share as a safetensors file.

Each chunk is written directly from the tensor's memory if that is contiguous and on the CPU, and
hashed concurrently. Only the rank's own share is ever copied.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass

from checkpoints.format.checksummed_json import digest
from checkpoints.format.manifest import Chunk, WriterEntry
from checkpoints.format.names import writer_file
from checkpoints.storage.protocol import Storage, WritableFile
from checkpoints.tensors.dtypes import BY_NAME
from checkpoints.tensors.partition import TensorSpec, chunks_of
from checkpoints.tensors.regions import Extent, Span, full_region

_CONCURRENT_HASH_BYTES = 1 << 20  # from this size on, a second thread hashes

Pieces = Sequence[tuple[TensorSpec, Extent]]
Data = Callable[[TensorSpec, Extent], memoryview]
"""Reads the bytes of a chunk of a tensor."""


@dataclass(frozen=True)
class WrittenFile:
    """A tensor file on disk whose content is durable; its name is not yet."""

    writer: WriterEntry
    chunks: Mapping[str, tuple[Chunk, ...]]


def write_share(
    storage: Storage,
    folder: str,
    pieces: Pieces,
    data_of: Data,
    *,
    rank: int,
    world_size: int,
    wall_time_s: float,
) -> WrittenFile:
    """Write this rank's pieces and fsync them. Raises ``OSError``."""
    file = writer_file(rank, world_size)
    head = encode_header(pieces)
    found: dict[str, list[Chunk]] = {}
    end = len(head)
    sink = storage.create(f"{folder}/{file}")
    hasher = ThreadPoolExecutor(1, "checkpoint-hasher")  # inherits the priority of this thread
    try:
        sink.write(head)
        for spec, place in pieces:
            for piece in chunks_of(place, spec.element_bytes):
                data = data_of(spec, piece)
                hashed = _write_hashed(sink, data, hasher)
                begin, end = end, end + len(data)
                found.setdefault(spec.name, []).append(Chunk(file, begin, end, piece, hashed))
        sink.sync()
    finally:
        hasher.shutdown()
        sink.close()
    writer = WriterEntry(rank, file, end, len(head), digest(head), wall_time_s)
    return WrittenFile(writer, {name: tuple(items) for name, items in found.items()})


def _write_hashed(sink: WritableFile, data: memoryview, hasher: Executor) -> str:
    hashed = None
    if len(data) >= _CONCURRENT_HASH_BYTES:
        with contextlib.suppress(RuntimeError):  # no new threads at interpreter shutdown
            hashed = hasher.submit(digest, data)
    sink.write(data)
    return digest(data) if hashed is None else hashed.result()


def encode_header(pieces: Pieces) -> bytes:
    """The header of a safetensors file: 8 bytes of length, JSON, spaces up to a multiple of 64.

    A complete tensor has its own name and shape, so that a checkpoint of one writer is an ordinary
    safetensors file; a piece is named ``name[start:stop]``, with one range per dimension if it is a
    region.
    """
    entries: dict[str, object] = {}
    begin = 0
    for spec, place in pieces:
        element = BY_NAME[spec.dtype]
        name, shape = _label(spec, place)
        while name in entries:  # a tensor may have the name of another one's piece
            name += "~"
        end = begin + place.count * element.size_bytes
        entries[name] = {
            "dtype": element.file_name,
            "shape": [*shape, *element.file_shape],
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(entries, separators=(",", ":")).encode("ascii")
    text += b" " * (-(len(text) + 8) % 64)
    return len(text).to_bytes(8, "little") + text


def _label(spec: TensorSpec, place: Extent) -> tuple[str, tuple[int, ...]]:
    if place in (full_region(spec.shape), Span(0, spec.count)):
        return spec.name, spec.shape
    if isinstance(place, Span):
        return f"{spec.name}[{place.start}:{place.start + place.count}]", (place.count,)
    ranges = (f"{o}:{o + n}" for o, n in zip(place.offset, place.shape, strict=True))
    return f"{spec.name}[{','.join(ranges)}]", place.shape
