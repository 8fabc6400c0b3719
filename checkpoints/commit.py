"""The commit of a checkpoint, and the manifests of a folder."""

from __future__ import annotations

import contextlib
import errno
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from checkpoints.errors import CheckpointNotFound, CorruptCheckpoint, LoadError
from checkpoints.manifest import (
    MAX_DOCUMENT_BYTES,
    Chunk,
    ChunkTable,
    Manifest,
    Part,
    SharedMetadata,
    SpecTable,
    TensorTable,
    WriterEntry,
    check_content,
    parse_manifest,
    parse_part,
)
from checkpoints.names import (
    MANIFEST,
    CheckpointName,
    parse_committed,
    parse_failure_file,
    parse_part_file,
    part_file,
)
from checkpoints.storage import (
    ReadableFile,
    Storage,
    reading,
    removed_on_failure,
    sync_folder,
    write_durably,
)
from checkpoints.tensors import Region
from checkpoints.tree import Node

# ----------------------------------------------------------------------------
# Reads a storage: the names of committed checkpoints, their manifests and their files.


def committed_names(storage: Storage) -> list[CheckpointName]:
    """Names of the committed checkpoints, newest first by (generation, step)."""
    try:
        return committed_in(storage.list(""))
    except FileNotFoundError:
        return []


def committed_in(entries: Iterable[str]) -> list[CheckpointName]:
    """The committed checkpoints among the entries of a root, newest first."""
    names = [name for name in map(parse_committed, entries) if name is not None]
    return sorted(names, key=lambda name: name.age_order, reverse=True)


def read_manifest(
    storage: Storage, name: str, parse: Callable[[bytes, str], Manifest] = parse_manifest
) -> Manifest:
    """The validated manifest of a committed checkpoint whose files exist with the right sizes."""
    parsed = parse_committed(name)
    if parsed is None:
        raise CheckpointNotFound(
            f"{name!r} is not the name of a checkpoint",
            hint="Names look like step-000001200.g7.3f9c; list_checkpoints(), or "
            f"`elastic checkpoints ls {storage.place}`, lists them.",
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
            manifest = parse(read_document(source, file), file)
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


# ----------------------------------------------------------------------------
# Commits a complete attempt: merges its W parts into the manifest. Any writer may do so.
#
# Durability order: every file, every part, the merged manifest, the names in the attempt folder,
# the rename of the folder, the names in the root. The rename is the commit. Committers may race:
# they produce identical bytes under private names, and "already exists" counts as success.


_PRIVATE_PREFIX = ".manifest-"


class IncompleteAttempt(Exception):
    """An attempt cannot be committed; the message has the reason."""


class MissingParts(IncompleteAttempt):
    """Other writers may still complete the attempt."""


class WriterFailed(IncompleteAttempt):
    """Another writer has recorded that it could not write its part."""


def is_committed(storage: Storage, name: CheckpointName) -> bool:
    try:
        storage.size(f"{name}/{MANIFEST}")
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def commit(
    storage: Storage, name: CheckpointName, world_size: int, own: Part | None = None
) -> Manifest | None:
    """Commit an attempt of ``world_size`` writers. Returns its manifest once the commit is durable;
    None if another committer was faster. ``own``: the part that this writer has just written, which
    need not be read.

    Raises :class:`IncompleteAttempt` if parts are missing or inconsistent, ``OSError`` if the
    storage fails.
    """
    manifest = None
    try:
        manifest = merge_parts(read_parts(storage, name, world_size, own))
        data = manifest.to_bytes()
        try:
            check_document_size(len(data), MANIFEST)
            check_content(manifest, MANIFEST)  # never commit what a loader would reject
        except LoadError as error:
            raise IncompleteAttempt(
                f"the parts do not form a valid checkpoint: {error.message}"
            ) from error
        _check_sizes(storage, manifest)
        _put_manifest(storage, name, data)
        _publish(storage, name)
    except FileNotFoundError:
        # Another committer has renamed the folder in the meantime.
        if not is_committed(storage, name):
            raise
        manifest = None
    sync_folder(storage, "")
    _remove_leftovers(storage, name)
    return manifest


def read_parts(
    storage: Storage, name: CheckpointName, world_size: int, own: Part | None = None
) -> list[Part]:
    """All parts of an attempt, by rank. Raises :class:`IncompleteAttempt` if one is missing."""
    files = storage.list(name.attempt)
    check_no_writer_failed(files)
    check_all_parts(files, world_size)
    return [
        own
        if own is not None and own.writer.rank == rank
        else read_part(storage, name, rank, world_size)
        for rank in range(world_size)
    ]


def is_waiting(files: Collection[str], world_size: int) -> bool:
    """Whether writers may still complete an attempt that holds these files."""
    try:
        check_no_writer_failed(files)
        check_all_parts(files, world_size)
    except MissingParts:
        return True
    except WriterFailed:
        pass
    return False


def check_all_parts(files: Collection[str], world_size: int) -> None:
    """Raise :class:`MissingParts` if the files of an attempt lack a part."""
    if missing := missing_writers(files, world_size):
        ranks = ", ".join(map(str, missing[:8])) + (" …" if len(missing) > 8 else "")
        raise MissingParts(f"waiting for {len(missing)} of {world_size} writers: {ranks}")


def missing_writers(files: Collection[str], world_size: int) -> list[int]:
    """The writers whose parts are not among the files of an attempt."""
    present = set(files)
    return [rank for rank in range(world_size) if part_file(rank, world_size) not in present]


def world_size_of(files: Collection[str]) -> int:
    """The number of writers, all of which have finished. Raises :class:`IncompleteAttempt`."""
    ranks = [rank for rank in map(parse_part_file, files) if rank is not None]
    sizes = {world_size for _, world_size in ranks}
    if len(sizes) != 1:
        raise IncompleteAttempt(
            "no writer finished" if not sizes else "its parts have different world sizes"
        )
    world_size = sizes.pop()
    check_all_parts(files, world_size)
    return world_size


def check_no_writer_failed(files: Collection[str]) -> None:
    """Raise :class:`WriterFailed` if the files of an attempt include a failure record."""
    failed = sorted(ranks[0] for ranks in map(parse_failure_file, files) if ranks is not None)
    if failed:
        raise WriterFailed(f"writer {failed[0]} could not write its part")


def read_part(storage: Storage, name: CheckpointName, rank: int, world_size: int) -> Part:
    """Read one part. Raises :class:`IncompleteAttempt` unless it belongs to this attempt."""
    path = f"{name.attempt}/{part_file(rank, world_size)}"
    source = storage.open(path)
    try:
        part = parse_part(read_document(source, path), path)
    except LoadError as error:
        raise IncompleteAttempt(error.message) from error
    finally:
        source.close()
    if part.name != name:
        raise IncompleteAttempt(f"part {rank} belongs to another world: {part.name}")
    if (part.writer.rank, part.world_size) != (rank, world_size):
        raise IncompleteAttempt(f"part {rank} belongs to another writer")
    return part


def merge_parts(parts: Sequence[Part]) -> Manifest:
    """Merge all parts into one manifest. Deterministic.

    Raises :class:`IncompleteAttempt` if the writers of a section did not save the same tensors, or
    if two sections saved the same key.
    """
    first = parts[0]
    sections = _sections(parts)
    shared = [_shared_of(section) for section in sections]
    specs = SpecTable()
    chunks = ChunkTable()
    for metadata, section in zip(shared, sections, strict=True):
        _check_new(specs, metadata.specs)
        specs.update(metadata.specs)
        for part in section:
            if unknown := sorted(part.chunks.keys() - metadata.specs.keys()):
                raise IncompleteAttempt(
                    f"writer {part.writer.rank} saved an unknown tensor {unknown[0]!r}"
                )
            repeated = [name for name in part.chunks if name in chunks]
            chunks.update(part.chunks)
            for name in repeated:
                chunks.replace(name, _deduplicate(name, chunks[name]))
    return Manifest(
        name=first.name,
        lineage=shared[0].lineage,
        world_size=first.world_size,
        data_position=shared[0].data_position,
        wall_time_s=max(part.writer.wall_time_s for part in parts),
        versions=shared[0].versions,
        writers=tuple(part.writer for part in parts),
        tensors=TensorTable(specs, chunks),
        tree=_merged_tree([metadata.tree for metadata in shared]),
        types=[entry for metadata in shared for entry in metadata.types],
    )


def _sections(parts: Sequence[Part]) -> list[list[Part]]:
    """The parts of each section, in the order of their first writers."""
    sections: dict[tuple[int, ...], list[Part]] = {}
    every = tuple(range(parts[0].world_size))
    for part in parts:
        sections.setdefault(every if part.section is None else part.section, []).append(part)
    for ranks, section in sections.items():
        if ranks != tuple(part.writer.rank for part in section):
            raise IncompleteAttempt(
                f"writer {section[0].writer.rank} saved with the ranks {list(ranks)}, not all of "
                "which did the same"
            )
    return list(sections.values())


def _shared_of(section: Sequence[Part]) -> SharedMetadata:
    first = section[0]
    if first.shared is None:
        raise IncompleteAttempt(f"part {first.writer.rank} lacks the shared metadata")
    differing = [p.writer.rank for p in section if p.specs_xxh3_128 != first.specs_xxh3_128]
    if differing:
        raise IncompleteAttempt(
            f"writer {differing[0]} saved different tensors than writer {first.writer.rank}"
        )
    return first.shared


def _merged_tree(trees: Sequence[Node]) -> Node:
    """One tree with the keys of all sections."""
    if len(trees) == 1:
        return trees[0]
    merged: dict[str, Node] = {}
    for tree in trees:
        keys = tree.get("dict")
        if not isinstance(keys, dict):
            raise IncompleteAttempt("the state of a section is not a dict with string keys")
        _check_new(merged, keys)
        merged |= keys
    return {"dict": merged}


def _check_new(known: Iterable[str], more: Iterable[str]) -> None:
    if both := sorted(set(known) & set(more)):
        raise IncompleteAttempt(f"two sections saved {both[0]!r}")


def _deduplicate(tensor: str, chunks: Sequence[Chunk]) -> tuple[Chunk, ...]:
    """Keep one chunk per region of a tensor: that of the lowest writer.

    A DTensor knows only the ranks of its own mesh. Where several meshes hold the same tensor (FSDP
    over the data dimension combined with tensor parallelism, or tensor parallelism within each of
    several replicas), each mesh writes every region. Raises :class:`IncompleteAttempt` if the
    values differ: then they are not copies, and neither is the right one.
    """
    kept: dict[Region, Chunk] = {}
    spans: list[Chunk] = []
    for chunk in chunks:
        if not isinstance(chunk.place, Region):
            spans.append(chunk)
            continue
        first = kept.setdefault(chunk.place, chunk)
        if first.xxh3_128 != chunk.xxh3_128:
            raise IncompleteAttempt(
                f"tensor {tensor!r} has different values in {chunk.file} and {first.file} for the "
                "same region: a DTensor must be equal in all meshes that hold it"
            )
    return (*spans, *kept.values())


def _check_sizes(storage: Storage, manifest: Manifest) -> None:
    for writer in manifest.writers:
        size = storage.size(f"{manifest.name.attempt}/{writer.file}")
        if size != writer.size_bytes:
            raise IncompleteAttempt(f"{writer.file} has {size} bytes, not {writer.size_bytes}")


def _put_manifest(storage: Storage, name: CheckpointName, data: bytes) -> None:
    private = f"{name.attempt}/{_PRIVATE_PREFIX}{secrets.token_hex(4)}.json"
    with removed_on_failure(storage, private):
        write_durably(storage, private, data)
        storage.rename(private, f"{name.attempt}/{MANIFEST}")
    sync_folder(storage, name.attempt)


def _publish(storage: Storage, name: CheckpointName) -> None:
    try:
        storage.rename(name.attempt, str(name))
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY) or not is_committed(storage, name):
            raise
        storage.remove_folder(name.attempt)


def _remove_leftovers(storage: Storage, name: CheckpointName) -> None:
    """Remove the parts, which are no longer needed, and manifests that lost a race to commit."""
    with contextlib.suppress(OSError):  # harmless: no reader opens them
        for file in storage.list(str(name)):
            if parse_part_file(file) is not None or file.startswith(_PRIVATE_PREFIX):
                storage.remove(f"{name}/{file}")


def remove_private_manifests(storage: Storage, name: CheckpointName) -> None:
    """Remove what committers of an attempt have left that were killed. They have ended: a live one
    would fail."""
    with contextlib.suppress(OSError):
        for file in storage.list(name.attempt):
            if file.startswith(_PRIVATE_PREFIX):
                storage.remove(f"{name.attempt}/{file}")
