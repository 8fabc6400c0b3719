"""A read-only storage that merges several tiers: this node's memory, peers' memory, disk.

A checkpoint exists if it is committed in a reachable tier, or if the reachable tiers together hold
the parts of all its writers. The memory of a node holds the parts of its own ranks and replicas of
another node's parts, never all of them, so the reader merges the parts into the manifest that a
committer would have written.

:class:`TieredStorage` is a storage for reading, so :func:`~checkpoints.latest`,
:func:`~checkpoints.load`, :func:`~checkpoints.verify` and :func:`~checkpoints.list_checkpoints`
accept one as their root. Each chunk is read from the first tier whose bytes match its hash.

A tier that cannot be read is not an empty tier. The memory of a node may be gone for good, so the
other tiers replace it, and it is not used again. The content of any other tier outlives its
failure: a root that cannot be listed raises, and a file that cannot be read is read from another
tier, or raises. :attr:`TieredStorage.failures` has the reasons. To retry, create a new instance.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from checkpoints.commit import IncompleteAttempt, merge_parts, read_document, read_part
from checkpoints.errors import CorruptCheckpoint, LoadError
from checkpoints.manifest import Manifest, Part, parse_manifest
from checkpoints.names import (
    MANIFEST,
    CheckpointName,
    parse_attempt,
    parse_committed,
    parse_part_file,
    parse_writer_file,
    part_file,
)
from checkpoints.objects import Root, storage_for
from checkpoints.reader import Replica, ReplicatedFile
from checkpoints.storage import (
    ABSENT,
    ClosableStorage,
    ReadableFile,
    Storage,
    VolatileStorage,
    WritableFile,
    patient,
    reason_of,
)

T = TypeVar("T")


def readable(root: Root) -> Storage:
    """The storage of a root, for reading: reads that fail transiently are repeated."""
    storage = storage_for(root)
    return storage if isinstance(storage, TieredStorage) else patient(storage)


@dataclass(frozen=True)
class TierFailure:
    """A tier that could not be read, or that holds a damaged file."""

    place: str
    reason: str


class TieredStorage:
    """A read-only view of several roots, fastest first.

    Raises :class:`ArgumentError` for a root that names no storage, and :class:`CorruptCheckpoint`
    if the tiers hold different checkpoints under one name.
    """

    def __init__(self, roots: Sequence[Root]) -> None:
        self._roots = [storage_for(root) for root in roots]
        self._all = [patient(storage) for storage in self._roots]
        self._gone: dict[int, TierFailure] = {}
        self._damaged: builtins.list[TierFailure] = []
        # By checkpoint and file; without a file, all of them.
        self._unreadable: dict[tuple[CheckpointName, str], OSError] = {}
        self._known: dict[CheckpointName, builtins.list[_TierFolder]] = {}
        self._manifests: dict[CheckpointName, tuple[bytes, Manifest]] = {}

    @property
    def failures(self) -> tuple[TierFailure, ...]:
        """The tiers that are gone, then files that another tier replaced."""
        return (*self._gone.values(), *self._damaged)

    @property
    def place(self) -> str:
        return " + ".join(storage.place for storage in self._all)

    def list(self, path: str) -> builtins.list[str]:
        """List a folder; the root contains the names of all complete checkpoints."""
        if path:
            return self._files(path)
        names: builtins.set[str] = set()
        attempts: builtins.set[CheckpointName] = set()
        for storage in self._reachable():
            for entry in self._try(storage, lambda s: s.list("")) or []:
                if parse_committed(entry) is not None:
                    names.add(entry)
                elif (attempt := parse_attempt(entry)) is not None:
                    attempts.add(attempt)
        names.update(str(name) for name in attempts if self._world_size(name) is not None)
        return sorted(names)

    def open(self, path: str) -> ReadableFile:
        name, file = _split(path)
        if file == MANIFEST:
            return _Bytes(self._manifest(name)[0])
        if parse_writer_file(file) is None:
            raise _missing(path)
        return self._copies(name, file)

    def size(self, path: str) -> int:
        with contextlib.closing(self.open(path)) as source:
            return source.size()

    def modified_s(self, path: str) -> float:
        """When the most recently changed replica was modified."""
        name, file = _split(path)
        times: builtins.list[float] = []
        for folder in self._folders(name):
            if file in folder.files:
                path = f"{folder.path}/{file}"
                changed = self._try_file(name, folder, file, lambda s, p: s.modified_s(p))
                times += [] if changed is None else [changed]
        if not times:
            raise self._nothing(name, file)
        return max(times)

    def close(self) -> None:
        """Close the connections to peers."""
        for storage in self._roots:
            if isinstance(storage, ClosableStorage):
                storage.close()

    # --- which tiers hold what

    def _reachable(self) -> Iterator[Storage]:
        for index, storage in enumerate(self._all):
            if index not in self._gone:
                yield storage

    def _try(self, storage: Storage, operation: Callable[[Storage], T]) -> T | None:
        """The result of an operation; None if the file does not exist, or its memory is gone."""
        try:
            return operation(storage)
        except ABSENT:
            return None
        except OSError as error:
            if not isinstance(storage, VolatileStorage):
                raise
            self._lose(storage, error)
            return None

    def _try_file(
        self,
        name: CheckpointName,
        folder: _TierFolder,
        file: str,
        operation: Callable[[Storage, str], T],
    ) -> T | None:
        """As :meth:`_try`, for a file of a checkpoint; None, too, if it cannot be read here:
        another tier may have it."""
        path = f"{folder.path}/{file}"
        try:
            return self._try(folder.storage, lambda storage: operation(storage, path))
        except OSError as error:
            self._note_unreadable(name, folder.storage, path, error)
            return None

    def _lose(self, storage: Storage, error: OSError) -> None:
        self._gone[self._all.index(storage)] = TierFailure(storage.place, reason_of(error))

    def _note_unreadable(
        self, name: CheckpointName, storage: Storage, path: str, error: OSError
    ) -> None:
        if isinstance(storage, VolatileStorage):
            self._lose(storage, error)
            return
        self._unreadable[name, path.partition("/")[2]] = error
        self._note_damage(storage, path, reason_of(error))

    def _error_of(self, name: CheckpointName, file: str) -> OSError | None:
        """The error of a tier that may have an intact file, but cannot be read."""
        return self._unreadable.get((name, file)) or self._unreadable.get((name, ""))

    def _nothing(self, name: CheckpointName, file: str) -> OSError:
        """The error for a file that no tier has: that of a tier that cannot tell, if any."""
        return self._error_of(name, file) or _missing(f"{name}/{file}")

    def _note_damage(self, storage: Storage, path: str, what: str) -> None:
        self._damaged.append(TierFailure(storage.place, f"{path}: {what}"))

    def _files(self, path: str) -> builtins.list[str]:
        name, _ = _split(f"{path}/")
        _, manifest = self._manifest(name)
        return [MANIFEST, *(writer.file for writer in manifest.writers)]

    def _folders(self, name: CheckpointName) -> builtins.list[_TierFolder]:
        """All folders of a checkpoint, fastest tier first. Each tier is listed once."""
        if name not in self._known:
            self._known[name] = [
                _TierFolder(storage, folder, frozenset(files))
                for storage in self._reachable()
                for folder in (str(name), name.attempt)
                if (files := self._list_folder(name, storage, folder))
            ]
        return [f for f in self._known[name] if self._all.index(f.storage) not in self._gone]

    def _list_folder(
        self, name: CheckpointName, storage: Storage, folder: str
    ) -> builtins.list[str]:
        try:
            return self._try(storage, lambda s: s.list(folder)) or []
        except OSError as error:
            self._note_unreadable(name, storage, folder, error)
            return []

    def _world_size(self, name: CheckpointName) -> int | None:
        """The number of writers, if the parts of all exist (judged by their names); else None."""
        parts: dict[int, builtins.set[int]] = {}
        for folder in self._folders(name):
            for ranks in map(parse_part_file, folder.files):
                if ranks is not None:
                    parts.setdefault(ranks[1], set()).add(ranks[0])
        complete = [size for size, ranks in parts.items() if len(ranks) == size]
        return complete[0] if len(complete) == 1 else None

    # --- the manifest: a committed one, else merged from parts

    def _manifest(self, name: CheckpointName) -> tuple[bytes, Manifest]:
        if name not in self._manifests:
            self._manifests[name] = self._committed(name) or self._merged(name)
        return self._manifests[name]

    def _committed(self, name: CheckpointName) -> tuple[bytes, Manifest] | None:
        """The first valid committed manifest; raises if all of them are damaged."""
        damaged = None
        file = f"{name}/{MANIFEST}"
        for folder in self._folders(name):
            if folder.path != str(name) or MANIFEST not in folder.files:
                continue
            try:
                data = self._try_file(name, folder, MANIFEST, _read)
                if data is not None:
                    return data, parse_manifest(data, file)
            except LoadError as error:
                damaged = error
        if damaged is not None and self._world_size(name) is None:
            raise self._error_of(name, MANIFEST) or damaged
        return None

    def _merged(self, name: CheckpointName) -> tuple[bytes, Manifest]:
        world_size = self._world_size(name)
        file = f"{name}/{MANIFEST}"
        if world_size is None:
            raise self._nothing(name, MANIFEST)
        try:
            parts = [self._part(name, rank, world_size) for rank in range(world_size)]
            data = merge_parts(parts).to_bytes()
        except IncompleteAttempt as why:
            raise CorruptCheckpoint(
                f"its parts do not form a complete checkpoint: {why}", file=file
            ) from why
        return data, parse_manifest(data, file)

    def _part(self, name: CheckpointName, rank: int, world_size: int) -> Part:
        why: Exception | None = None
        file = part_file(rank, world_size)
        for folder in self._folders(name):
            if folder.path != name.attempt or file not in folder.files:
                continue
            try:
                part = self._try_file(
                    name, folder, file, lambda s, _: read_part(s, name, rank, world_size)
                )
            except IncompleteAttempt as problem:
                why = problem
                continue
            if part is not None:
                return part
        if (error := self._error_of(name, file)) is not None:
            raise error
        raise IncompleteAttempt(str(why or f"{file} was removed")) from why

    # --- tensors

    def _copies(self, name: CheckpointName, file: str) -> ReadableFile:
        """A writer's file, from all tiers that hold it."""
        _, manifest = self._manifest(name)
        sizes = {writer.file: writer.size_bytes for writer in manifest.writers}
        copies = ReplicatedFile(
            self._opened(name, file), sizes.get(file), lambda: self._error_of(name, file)
        )
        if copies.is_empty:
            copies.close()
            raise self._nothing(name, file)
        return copies

    def _opened(self, name: CheckpointName, file: str) -> Iterator[Replica]:
        for folder in self._folders(name):
            if file not in folder.files:
                continue
            source = self._try_file(name, folder, file, lambda s, path: s.open(path))
            if source is not None:
                path = f"{folder.path}/{file}"
                yield Replica(
                    source,
                    fail=partial(self._note_unreadable, name, folder.storage, path),
                    damaged=partial(self._note_damage, folder.storage, path),
                )

    # --- read-only: the other operations of a storage

    def make_folder(self, path: str) -> None:
        raise _read_only(path)

    def create(self, path: str) -> WritableFile:
        raise _read_only(path)

    def rename(self, old: str, new: str) -> None:
        raise _read_only(old)

    def sync_folder(self, path: str) -> None:
        raise _read_only(path)

    def remove(self, path: str) -> None:
        raise _read_only(path)

    def remove_folder(self, path: str) -> None:
        raise _read_only(path)


@dataclass(frozen=True)
class _TierFolder:
    """The files of one checkpoint in one tier."""

    storage: Storage
    path: str
    files: frozenset[str]


class _Bytes:
    def __init__(self, data: bytes) -> None:
        self._data = data

    def size(self) -> int:
        return len(self._data)

    def read_at(self, offset: int, into: memoryview) -> int:
        piece = self._data[offset : offset + len(into)]
        into[: len(piece)] = piece
        return len(piece)

    def mapped(self) -> None:
        return None

    def close(self) -> None:
        pass


def _read(storage: Storage, path: str) -> bytes:
    with contextlib.closing(storage.open(path)) as source:
        return read_document(source, path)


def _split(path: str) -> tuple[CheckpointName, str]:
    folder, _, file = path.partition("/")
    name = parse_committed(folder)
    if name is None:
        raise _missing(path)
    return name, file


def _missing(path: str) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, "no such file in any tier", path)


def _read_only(path: str) -> OSError:
    return OSError(errno.EROFS, "a tiered storage is read-only", path)
