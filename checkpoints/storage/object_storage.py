"""Checkpoints in an object store, which has no rename: putting the manifest last is the commit.

An attempt and the checkpoint it becomes are one prefix::

    step-000001200.g7.3f9c/
      00000-of-00004.safetensors     written under the final name
      part-00000-of-00004.json
      .manifest-pending.json         an attempt's manifest.json, before the commit
      manifest.json                  present with all files: committed. One put; the first wins.
      .removed                       present, and not committed: being removed

So the three folders of :mod:`checkpoints.format.names` (attempt, committed, removed) are three
states of a prefix, distinguished by the last two objects. Renaming between them puts and deletes
these objects and never moves data. An object store has no folders: an empty one is missing.

A committer may be paused between checking the parts and putting the manifest, while another process
removes those parts. Three rules keep its manifest from listing missing files:

- a remover puts the mark first and then checks for a manifest; a committer puts the manifest first
  and then checks for the mark and the files. At least one of them sees the other: a committer that
  finds a mark or misses a file deletes its manifest and fails;
- a remover lists again after deleting, and deletes what was added meanwhile;
- if the committer dies before its check, every reader treats a manifest without its files as a
  checkpoint being removed, and garbage collection deletes it.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
from collections.abc import Iterator, Mapping
from enum import Enum

from checkpoints.format.names import (
    MANIFEST,
    REMOVED_PREFIX,
    CheckpointName,
    parse_attempt,
    parse_committed,
    parse_part_file,
    parse_writer_file,
)
from checkpoints.storage.object_store import ObjectInfo, Objects, Upload
from checkpoints.storage.protocol import ReadableFile, WritableFile

_PENDING = ".manifest-pending.json"
_REMOVED = ".removed"


class _State(Enum):
    MISSING = "missing"
    ATTEMPT = "attempt"
    COMMITTED = "committed"
    REMOVED = "removed"


class ObjectStorage:
    """A storage over an object store."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects

    @property
    def place(self) -> str:
        return self._objects.place

    def make_folder(self, path: str) -> None:
        """Does nothing: the first object creates its prefix."""

    def list(self, path: str) -> builtins.list[str]:
        if not path:
            return self._roots()
        name, state = _parse_path(path)
        entries = self._objects.list(_key(path))
        if not entries or (name is not None and _state(entries) is not state):
            raise _missing(path)
        if name is None:
            return [*entries]
        hidden = {_REMOVED} if state is _State.ATTEMPT else {_REMOVED, _PENDING}
        names = [entry for entry in entries if entry not in hidden]
        return [MANIFEST if entry == _PENDING else entry for entry in names]

    def size(self, path: str) -> int:
        name, state = _parse_path(path)
        if name is not None and state is _State.COMMITTED and path == f"{name}/{MANIFEST}":
            entries = self._objects.list(str(name))
            if _state(entries) is not state:  # a manifest without its files is not a commit
                raise _missing(path)
            return entries[MANIFEST].size
        return self._objects.stat(_key(path)).size

    def modified_s(self, path: str) -> float:
        """Time of the last change, in seconds since 1970; for a folder, that of its newest
        object."""
        if "/" in path or _parse_path(path)[0] is None:
            return self._objects.stat(_key(path)).modified_s
        files = [entry.modified_s for entry in self._objects.list(_key(path)).values()]
        if not files:
            raise _missing(path)
        return max(files)

    def create(self, path: str) -> WritableFile:
        name, state = _parse_path(path)
        if name is not None and state is _State.ATTEMPT and self._exists(name, MANIFEST):
            raise _missing(path)  # it is committed: read-only from now on
        return _ObjectSink(self._objects.upload(_key(path)))

    def open(self, path: str) -> ReadableFile:
        return _ObjectSource(self._objects, _key(path))

    def rename(self, old: str, new: str) -> None:
        """Rename a file, or move a checkpoint from attempt to committed, or to removed."""
        name, before = _parse_path(old)
        same, after = _parse_path(new)
        if "/" in old or name is None:
            self._move(_key(old), _key(new))
        elif name == same and (before, after) == (_State.ATTEMPT, _State.COMMITTED):
            self._commit(name)
        elif name == same and (before, after) == (_State.COMMITTED, _State.REMOVED):
            self._uncommit(name)
        else:
            raise OSError(errno.EOPNOTSUPP, "an object store cannot rename folders", old)

    def sync_folder(self, path: str) -> None:
        """Does nothing: a put is durable when it returns."""

    def remove(self, path: str) -> None:
        self._objects.stat(_key(path))
        self._objects.delete(_key(path))

    def remove_folder(self, path: str) -> None:
        """Remove all objects. An interruption leaves nothing that looks committed."""
        name, state = _parse_path(path)
        entries = self._objects.list(_key(path))
        if name is not None and state is _State.ATTEMPT and _state(entries) is state:
            entries, state = self._mark(name), _State.REMOVED
        # Repeat, for the manifest of a committer that was paused before its put.
        while entries and (name is None or _state(entries) is state):
            self._delete_all(path, entries)
            entries = self._objects.list(_key(path))

    def _mark(self, name: CheckpointName) -> Mapping[str, ObjectInfo]:
        """Mark an attempt as being removed, unless it was committed first; returns its objects."""
        with contextlib.suppress(OSError):  # the store may be full even for this
            self._objects.put(f"{name}/{_REMOVED}", b"")
        entries = self._objects.list(str(name))
        if _state(entries) is _State.COMMITTED:
            self._objects.delete(f"{name}/{_REMOVED}")
            return {}
        # The mark counts even if it could not be put.
        return {**entries, _REMOVED: ObjectInfo(0, 0.0)} if entries else {}

    def _delete_all(self, path: str, entries: Mapping[str, ObjectInfo]) -> None:
        for entry in sorted(entries, key=_removal_order):
            if entries[entry].is_folder:
                self.remove_folder(f"{_key(path)}/{entry}")
            else:
                self._objects.delete(f"{_key(path)}/{entry}")
        self._objects.delete_prefix(_key(path))

    def _roots(self) -> builtins.list[str]:
        found = []
        for entry, info in self._objects.list("").items():
            name = parse_committed(entry)
            if name is None or not info.is_folder:
                found.append(entry)
                continue
            match _state(self._objects.list(str(name))):
                case _State.COMMITTED:
                    found.append(str(name))
                case _State.REMOVED:
                    found.append(name.removed)
                case _:
                    found.append(name.attempt)
        return found

    def _exists(self, name: CheckpointName, file: str) -> bool:
        try:
            self._objects.stat(f"{name}/{file}")
        except FileNotFoundError:
            return False
        return True

    def _move(self, old: str, new: str) -> None:
        size = self._objects.stat(old).size
        self._objects.put(new, self._objects.get(old, 0, size) if size else b"")
        self._objects.delete(old)

    def _commit(self, name: CheckpointName) -> None:
        pending = f"{name}/{_PENDING}"
        size = self._objects.stat(pending).size
        data = self._objects.get(pending, 0, size)
        self._objects.put(f"{name}/{MANIFEST}", data, only_new=True)
        entries = self._objects.list(str(name))
        if _REMOVED in entries or not _has_all_files(entries):
            self._objects.delete(f"{name}/{MANIFEST}")
            raise _missing(name.attempt)  # removed before this put
        self._objects.delete(pending)

    def _uncommit(self, name: CheckpointName) -> None:
        self._objects.stat(f"{name}/{MANIFEST}")
        self._objects.put(f"{name}/{_REMOVED}", b"")
        self._objects.delete(f"{name}/{MANIFEST}")


class _ObjectSink:
    """Visible from sync() or close() on; never visible if a write fails."""

    def __init__(self, upload: Upload) -> None:
        self._upload = upload
        self._is_open = True

    def write(self, data: bytes | memoryview) -> None:
        with self._abandoned_on_failure():
            self._upload.write(data)

    def sync(self) -> None:
        if self._is_open:
            with self._abandoned_on_failure():
                self._upload.finish()
            self._is_open = False

    def close(self) -> None:
        self.sync()

    @contextlib.contextmanager
    def _abandoned_on_failure(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._is_open = False
            with contextlib.suppress(OSError):  # report the first failure
                self._upload.abandon()
            raise


class _ObjectSource:
    def __init__(self, objects: Objects, key: str) -> None:
        self._objects, self._key = objects, key
        self._size = objects.stat(key).size

    def size(self) -> int:
        return self._size

    def read_at(self, offset: int, into: memoryview) -> int:
        end = min(offset + len(into), self._size)
        if end <= offset:
            return 0
        data = self._objects.get(self._key, offset, end)
        into[: len(data)] = data
        return len(data)

    def mapped(self) -> None:
        return None

    def close(self) -> None:
        pass


def _parse_path(path: str) -> tuple[CheckpointName | None, _State]:
    """The checkpoint of a path, and the state that the path implies."""
    folder = path.partition("/")[0]
    if folder.startswith(REMOVED_PREFIX):
        return parse_committed(folder.removeprefix(REMOVED_PREFIX)), _State.REMOVED
    if (attempt := parse_attempt(folder)) is not None:
        return attempt, _State.ATTEMPT
    return parse_committed(folder), _State.COMMITTED


def _key(path: str) -> str:
    """The object name of a path."""
    name, state = _parse_path(path)
    _, slash, file = path.partition("/")
    if name is None:
        return path
    if state is _State.ATTEMPT and file == MANIFEST:
        file = _PENDING
    return f"{name}{slash}{file}"


def _state(entries: Mapping[str, ObjectInfo]) -> _State:
    if MANIFEST in entries:
        return _State.COMMITTED if _has_all_files(entries) else _State.REMOVED
    if _REMOVED in entries:
        return _State.REMOVED
    return _State.ATTEMPT if entries else _State.MISSING


def _has_all_files(entries: Mapping[str, ObjectInfo]) -> bool:
    """Whether no file of a checkpoint is missing; each file name holds the number of files."""
    files = [ranks for ranks in map(parse_writer_file, entries) if ranks is not None]
    if files:
        return len(files) == max(world_size for _, world_size in files)
    return any(not entry.startswith(".") and entry != MANIFEST for entry in entries)


def _removal_order(entry: str) -> tuple[int, str]:
    """The manifest first, so that it is not listed; then parts, so that it cannot be committed; the
    removal mark last."""
    if entry == MANIFEST:
        return 0, entry
    if parse_part_file(entry) is not None:
        return 1, entry
    return (3 if entry == _REMOVED else 2), entry


def _missing(path: str) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, "no such folder", path)
