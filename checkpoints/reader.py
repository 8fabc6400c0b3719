"""Reading a checkpoint's bytes: nothing is handed out that was not verified first."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch

from checkpoints.dtypes import BY_NAME
from checkpoints.errors import Corrupt, NoCheckpoint
from checkpoints.manifest import Box, Chunk, Manifest, Tensor, Writer
from checkpoints.naming import MANIFEST, CheckpointName, parse_committed
from checkpoints.plan import Span
from checkpoints.sealed import digest, read_sealed
from checkpoints.storage import Source, Storage, reading
from checkpoints.strict import parse_manifest

_SIDE_BY_SIDE_BYTES = 64 << 20  # below, threads cost more than they save
_READERS = min(4, os.cpu_count() or 1)

Target = Callable[[Tensor, Chunk], memoryview]
"""Where a chunk's bytes go."""


def read_manifest(storage: Storage, name: str) -> Manifest:
    """The manifest of a committed checkpoint, checked, its files there with the right sizes."""
    parsed = parse_committed(name)
    if parsed is None:
        raise NoCheckpoint(
            f"{name!r} is not a checkpoint's name",
            hint="Names look like step-000001200.g7.3f9c; list_checkpoints() lists them.",
        )
    file = f"{name}/{MANIFEST}"
    with reading(f"{storage.place}/{name}"):
        try:
            source = storage.open(file)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise NoCheckpoint(
                f"there is no checkpoint {name} in {storage.place}",
                hint="list_checkpoints() lists those that are there.",
            ) from error
        with contextlib.closing(source):
            manifest = parse_manifest(read_sealed(source, file), file)
        if manifest.name != parsed:
            raise Corrupt(f"it is the manifest of {manifest.name}", file=file)
        for writer in manifest.writers:
            with _opened(storage, parsed, writer):
                pass
    return manifest


def read_chunks(storage: Storage, manifest: Manifest, target: Target) -> None:
    """Read every byte of a checkpoint, each chunk into its target, and verify every hash.

    Raises :class:`Corrupt` naming file and tensor, :class:`ReadFailed` if the storage fails.
    """
    by_file: dict[str, list[tuple[Tensor, Chunk]]] = defaultdict(list)
    for tensor in manifest.tensors.values():
        for chunk in tensor.chunks:
            by_file[chunk.file].append((tensor, chunk))
    with reading(f"{storage.place}/{manifest.name}"):
        for writer in manifest.writers:
            with _opened(storage, manifest.name, writer) as source:
                _verify_header(source, manifest.name, writer)
                in_order = sorted(by_file[writer.file], key=lambda item: item[1].begin)
                _read_all(source, manifest.name, in_order, target)


def _read_all(
    source: Source, name: CheckpointName, in_order: list[tuple[Tensor, Chunk]], target: Target
) -> None:
    """Read chunks side by side where there are many bytes; the first bad one in order is told."""
    if sum(chunk.end - chunk.begin for _, chunk in in_order) < _SIDE_BY_SIDE_BYTES:
        for tensor, chunk in in_order:
            _read_chunk(source, name, tensor, chunk, target)
        return
    # Reading and hashing both release the GIL; the pool is joined before this returns.
    with ThreadPoolExecutor(_READERS, thread_name_prefix="checkpoint-reader") as pool:
        reads = [
            pool.submit(_read_chunk, source, name, tensor, chunk, target)
            for tensor, chunk in in_order
        ]
        try:
            for read in reads:
                read.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def scratch() -> Target:
    """A target for reading without keeping: one buffer for each thread."""
    own = threading.local()

    def target(_: Tensor, chunk: Chunk) -> memoryview:
        buffer: bytearray | None = getattr(own, "buffer", None)
        if buffer is None:
            buffer = own.buffer = bytearray()
        if len(buffer) < chunk.end - chunk.begin:
            # A new one: a bytearray that is looked at cannot be resized.
            buffer = own.buffer = bytearray(chunk.end - chunk.begin)
        return memoryview(buffer)[: chunk.end - chunk.begin]

    return target


def read_tensors(storage: Storage, manifest: Manifest) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, on the CPU, in memory of their own, verified."""
    spare = {
        name: torch.empty(tensor.spec.shape, dtype=BY_NAME[tensor.spec.dtype].torch)
        for name, tensor in manifest.tensors.items()
    }
    views = {name: _bytes_of(tensor) for name, tensor in spare.items() if tensor.numel()}
    boxed: list[tuple[str, Box, torch.Tensor]] = []

    def target(tensor: Tensor, chunk: Chunk) -> memoryview:
        name, size = tensor.spec.name, tensor.spec.element_bytes
        if isinstance(chunk.place, Span):
            begin = chunk.place.start * size
            return views[name][begin : begin + chunk.end - chunk.begin]
        box = torch.empty(chunk.place.shape, dtype=spare[name].dtype)
        boxed.append((name, chunk.place, box))
        return _bytes_of(box)

    read_chunks(storage, manifest, target)
    for name, place, box in boxed:
        block = tuple(slice(o, o + n) for o, n in zip(place.offset, place.shape, strict=True))
        spare[name][block] = box
    return spare


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


@contextlib.contextmanager
def _opened(storage: Storage, name: CheckpointName, writer: Writer) -> Iterator[Source]:
    file = f"{name}/{writer.file}"
    try:
        source = storage.open(file)
    except FileNotFoundError as error:
        raise Corrupt("the file is missing", file=file) from error
    with contextlib.closing(source):
        if source.size() != writer.size_bytes:
            raise Corrupt(f"it has {source.size()} bytes, not {writer.size_bytes}", file=file)
        yield source


def _verify_header(source: Source, name: CheckpointName, writer: Writer) -> None:
    # At most the size of the file, which was compared with the file itself.
    data = bytearray(writer.header_bytes)
    source.read_at(0, memoryview(data))
    if digest(data) != writer.header_xxh3_128:
        raise Corrupt(
            "its header does not have the hash it was saved with", file=f"{name}/{writer.file}"
        )


def _read_chunk(
    source: Source, name: CheckpointName, tensor: Tensor, chunk: Chunk, target: Target
) -> None:
    into = target(tensor, chunk)
    count = source.read_at(chunk.begin, into)
    if count != len(into) or digest(into) != chunk.xxh3_128:
        what = (
            "became shorter" if count != len(into) else "do not have the hash they were saved with"
        )
        raise Corrupt(
            f"bytes {chunk.begin} to {chunk.end} {what}",
            file=f"{name}/{chunk.file}",
            tensor=tensor.spec.name,
        )
