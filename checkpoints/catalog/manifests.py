"""Reads a storage: the names of committed checkpoints, their manifests and their files."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from checkpoints.errors import CheckpointNotFound, CorruptCheckpoint
from checkpoints.format.checksummed_json import MAX_DOCUMENT_BYTES
from checkpoints.format.manifest import Manifest, WriterEntry
from checkpoints.format.manifest_parser import parse_manifest
from checkpoints.format.names import MANIFEST, CheckpointName, parse_committed
from checkpoints.storage.failures import reading
from checkpoints.storage.protocol import ReadableFile, Storage


def committed_names(storage: Storage) -> list[CheckpointName]:
    """Names of the committed checkpoints, newest first by (generation, step)."""
    try:
        folders = storage.list("")
    except FileNotFoundError:
        return []
    names = [name for name in map(parse_committed, folders) if name is not None]
    return sorted(names, key=lambda name: name.age_order, reverse=True)


def read_manifest(storage: Storage, name: str) -> Manifest:
    """The validated manifest of a committed checkpoint whose files exist with the right sizes."""
    parsed = parse_committed(name)
    if parsed is None:
        raise CheckpointNotFound(
            f"{name!r} is not the name of a checkpoint",
            hint="Names look like step-000001200.g7.3f9c; list_checkpoints() lists them.",
        )
    file = f"{name}/{MANIFEST}"
    with reading(f"{storage.place}/{name}"):
        try:
            source = storage.open(file)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise CheckpointNotFound(
                f"there is no checkpoint {name} in {storage.place}",
                hint="list_checkpoints() lists the existing ones.",
            ) from error
        with contextlib.closing(source):
            manifest = parse_manifest(read_document(source, file), file)
        if manifest.name != parsed:
            raise CorruptCheckpoint(
                f"it is the manifest of another checkpoint, {manifest.name}", file=file
            )
        for writer in manifest.writers:
            with open_verified_size(storage, parsed, writer):
                pass
    return manifest


@contextlib.contextmanager
def open_verified_size(
    storage: Storage, name: CheckpointName, writer: WriterEntry
) -> Iterator[ReadableFile]:
    file = f"{name}/{writer.file}"
    try:
        source = storage.open(file)
    except FileNotFoundError as error:
        raise CorruptCheckpoint("the file is missing", file=file) from error
    with contextlib.closing(source):
        if source.size() != writer.size_bytes:
            raise CorruptCheckpoint(
                f"it has {source.size()} bytes instead of {writer.size_bytes}", file=file
            )
        yield source


def check_document_size(size_bytes: int, file: str) -> None:
    """Raise :class:`CorruptCheckpoint` for a document that would not be read."""
    if size_bytes > MAX_DOCUMENT_BYTES:
        raise CorruptCheckpoint(
            f"{size_bytes} bytes are too many for a manifest, whose limit is {MAX_DOCUMENT_BYTES}",
            file=file,
        )


def read_document(source: ReadableFile, file: str) -> bytes:
    """All bytes of a checksummed document; an oversized one is rejected before allocating."""
    size = source.size()
    check_document_size(size, file)
    data = bytearray(size)
    if source.read_at(0, memoryview(data)) != size:
        raise CorruptCheckpoint("it was truncated while being read", file=file)
    return bytes(data)
