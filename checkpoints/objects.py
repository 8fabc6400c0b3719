"""Storage in object stores, by URL."""

from __future__ import annotations

import builtins
import contextlib
import errno
import math
import os
import re
import secrets
import stat
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote

from checkpoints.errors import ArgumentError
from checkpoints.names import (
    LATEST_PREFIX,
    MANIFEST,
    REMOVED_PREFIX,
    CheckpointName,
    parse_attempt,
    parse_committed,
    parse_part_file,
    parse_writer_file,
)
from checkpoints.storage import (
    ABSENT,
    LocalStorage,
    ReadableFile,
    Storage,
    WritableFile,
    is_unsupported,
    sync_folder,
    write_durably,
)

# ----------------------------------------------------------------------------
# The few operations of an object store that storages in one build on.
#
# An object appears atomically, and its name does not change.


@dataclass(frozen=True)
class ObjectInfo:
    """An object, or a common prefix of objects."""

    size: int
    modified_s: float  # since 1970, by the store's clock
    is_folder: bool = False


class Upload(Protocol):
    """An upload in progress: the object is visible once :meth:`finish` returns."""

    def write(self, data: bytes | memoryview) -> None: ...

    def finish(self) -> None: ...

    def abandon(self) -> None: ...


class Objects(Protocol):
    """An object store. Failures raise ``OSError``, missing objects ``FileNotFoundError``."""

    @property
    def place(self) -> str: ...

    def list(self, prefix: str) -> Mapping[str, ObjectInfo]:
        """The direct children of a prefix, by the last component of their names."""
        ...

    def stat(self, key: str) -> ObjectInfo:
        """Size and modification time of an object."""
        ...

    def get(self, key: str, begin: int, end: int) -> bytes:
        """The bytes of an object from ``begin`` to ``end``."""
        ...

    def put(self, key: str, data: bytes, *, only_new: bool = False) -> None:
        """Put an object in one request. With ``only_new``, raises FileExistsError if it exists."""
        ...

    def upload(self, key: str) -> Upload:
        """Begin to put an object in several requests."""
        ...

    def delete(self, key: str) -> None:
        """Delete an object; a missing one is not an error."""
        ...

    def delete_prefix(self, prefix: str) -> None:
        """Delete an empty prefix, for stores in which a prefix is a folder."""
        ...


# ----------------------------------------------------------------------------
# Object stores, accessed through fsspec's drivers.
#
# fsspec has a maintained driver for every store (S3, GCS, Azure, …), each with its own
# credentials, retries and multipart uploads. It is imported when the first URL is used.
#
# An object appears atomically, and its name does not change:
# the storage below relies on these two properties only, not on folders or
# renames.
#
# A writer that is killed during a multipart upload leaves invisible parts that are billed: give
# the bucket a lifecycle rule that aborts incomplete uploads.

# Smaller objects are sent in one request, larger ones in parts of this size (S3 allows 10,000).
PART_BYTES = 64 << 20
_CONFLICTS = 5  # attempts: S3 responds 409 during another conditional put of the same object


def open_url(url: str, **options: Any) -> FsspecObjects:
    """The store of a URL. ``options`` are passed to the fsspec driver.

    Raises :class:`ArgumentError` if there is no driver for its scheme.
    """
    scheme = url.partition("://")[0]
    try:
        import fsspec

        # A listings cache would hide the changes of other writers.
        fs, path = fsspec.core.url_to_fs(url, use_listings_cache=False, **options)
    except ImportError as error:
        extra = "s3" if scheme in ("s3", "s3a") else "objects"
        raise ArgumentError(
            f"{url}: {error}", hint=f"pip install 'torch-elastic-harness[{extra}]'"
        ) from error
    except ValueError as error:
        raise ArgumentError(
            f"{url}: {error}", hint="Use a folder, or a URL such as s3://bucket/prefix."
        ) from error
    return FsspecObjects(fs, path, place=url)


class FsspecObjects:
    """Objects under a path of an fsspec file system."""

    def __init__(self, fs: Any, path: str, *, place: str | None = None) -> None:
        self._fs = fs
        self._path = path.rstrip("/")
        self.place = place if place is not None else f"{fs.protocol}:{path}"
        # Synchronous drivers share one file position among all readers.
        self._serialized = (
            contextlib.nullcontext() if getattr(fs, "async_impl", False) else threading.Lock()
        )

    def list(self, prefix: str) -> dict[str, ObjectInfo]:
        try:
            with self._request():
                listed = self._fs.ls(self._key(prefix), detail=True)
        except FileNotFoundError:
            return {}
        entries = {}
        for info in listed:
            name = info["name"].rstrip("/").rpartition("/")[2]
            # Some drivers list a prefix inside itself.
            if info["name"].rstrip("/") != self._key(prefix):
                entries[name] = _entry(info)
        return entries

    def stat(self, key: str) -> ObjectInfo:
        with self._request():
            entry = _entry(self._fs.info(self._key(key)))
        if entry.is_folder:
            raise FileNotFoundError(errno.ENOENT, "no such object", key)
        return entry

    def get(self, key: str, begin: int, end: int) -> bytes:
        with self._request():
            return bytes(self._fs.cat_file(self._key(key), start=begin, end=end))

    def put(self, key: str, data: bytes, *, only_new: bool = False) -> None:
        path = self._key(key)
        with self._request():
            if not only_new:
                self._put(path, data)
            elif self._puts_in_one_request:
                self._put_new(path, data)
            elif self._fs.exists(path):
                raise FileExistsError(path)
            else:
                self._put(path, data)

    def _put(self, path: str, data: bytes) -> None:
        if self._puts_in_one_request:
            self._fs.pipe_file(path, data)
            return
        upload = self._fs.open(path, "wb", autocommit=False)
        upload.write(data)
        upload.close()
        upload.commit()

    def _put_new(self, path: str, data: bytes) -> None:
        """Conditional put; check-then-put for stores without it.

        Racing committers put identical bytes, so the fallback is safe: at worst, it reports
        success to both.
        """
        for _ in range(_CONFLICTS):
            try:
                self._fs.pipe_file(path, data, mode="create")
                return
            except Exception as error:
                self._fs.invalidate_cache()
                if self._fs.exists(path):
                    raise FileExistsError(path) from error
                if _lacks_conditional_put(error):
                    self._put(path, data)
                    return
                if "ConditionalRequestConflict" not in str(error):
                    raise
        raise OSError(
            errno.EAGAIN, "concurrent conditional puts of this object kept conflicting", path
        )

    def upload(self, key: str) -> Upload:
        return _Upload(self, key)

    def delete(self, key: str) -> None:
        with contextlib.suppress(FileNotFoundError), self._request():
            self._fs.rm_file(self._key(key))

    def delete_prefix(self, prefix: str) -> None:
        if not getattr(self._fs, "async_impl", False):
            # Another writer may have put an object there.
            with contextlib.suppress(OSError), self._request():
                self._fs.rmdir(self._key(prefix))

    @property
    def _puts_in_one_request(self) -> bool:
        """Whether a put is a single request, unlike a file that is opened and written."""
        return getattr(self._fs, "async_impl", False) or _is_memory(self._fs)

    @property
    def supports_multipart(self) -> bool:
        """Whether an upload stays invisible until it finishes; not so in the memory driver."""
        return not _is_memory(self._fs)

    def begin_multipart(self, key: str) -> Any:
        with self._request():
            return self._fs.open(self._key(key), "wb", block_size=PART_BYTES, autocommit=False)

    def request(self) -> contextlib.AbstractContextManager[None]:
        return self._request()

    def _key(self, key: str) -> str:
        return f"{self._path}/{key}" if key else self._path

    @contextlib.contextmanager
    def _request(self) -> Iterator[None]:
        """Translate any exception of a driver into an ``OSError`` with an errno."""
        with self._serialized:
            try:
                yield
            except Exception as error:
                raise _as_os_error(error) from error


class _Upload:
    """Buffers small objects; sends larger ones in parts of :data:`PART_BYTES` while they are
    written."""

    def __init__(self, objects: FsspecObjects, key: str) -> None:
        self._objects = objects
        self._key = key
        self._small = bytearray()
        self._parts: Any = None

    def write(self, data: bytes | memoryview) -> None:
        if self._parts is None:
            self._small += data
            if len(self._small) < PART_BYTES or not self._objects.supports_multipart:
                return
            self._parts = self._objects.begin_multipart(self._key)
            data, self._small = bytes(self._small), bytearray()
        with self._objects.request():
            self._parts.write(data)

    def finish(self) -> None:
        if self._parts is None:
            self._objects.put(self._key, bytes(self._small))
            return
        with self._objects.request():
            self._parts.close()
            self._parts.commit()

    def abandon(self) -> None:
        if self._parts is not None:
            with self._objects.request():
                self._parts.discard()
                with contextlib.suppress(AttributeError):
                    self._parts.closed = True  # else its destructor would send the remainder


def _lacks_conditional_put(error: Exception) -> bool:
    """Whether the error means that the driver or the store lacks conditional puts."""
    return isinstance(error, (TypeError, NotImplementedError)) or "NotImplemented" in str(error)


def _is_memory(fs: Any) -> bool:
    protocol = fs.protocol
    return "memory" in ((protocol,) if isinstance(protocol, str) else protocol)


def _entry(info: Mapping[str, Any]) -> ObjectInfo:
    return ObjectInfo(
        size=int(info.get("size") or 0),
        modified_s=_modified_s(info),
        is_folder=info.get("type") == "directory",
    )


def _modified_s(info: Mapping[str, Any]) -> float:
    """Drivers differ in key and type. An unknown time counts as new."""
    for name in ("LastModified", "last_modified", "mtime", "updated", "modified", "created"):
        value = info.get(name)
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, (int, float)):
            return float(value)
        if isinstance(value, str):
            with contextlib.suppress(ValueError):
                return datetime.fromisoformat(value.replace("Z", "+00:00")).timestamp()
    return math.inf


def _as_os_error(error: Exception) -> OSError:
    text = f"{error}" or type(error).__name__
    if isinstance(error, FileExistsError):
        return FileExistsError(errno.EEXIST, text)
    if isinstance(error, FileNotFoundError):
        return FileNotFoundError(errno.ENOENT, text)
    if "Credential" in type(error).__name__:
        return PermissionError(errno.EACCES, f"no usable credentials: {text}")
    if isinstance(error, PermissionError):
        return PermissionError(errno.EACCES, text)
    if isinstance(error, OSError) and error.errno is not None:
        return error
    return OSError(errno.EIO, f"{type(error).__name__}: {text}")


# ----------------------------------------------------------------------------
# A folder as an object store, for file systems that cannot rename folders.
#
# Mounted buckets (gcsfuse, Mountpoint for S3) refuse to rename a folder, or copy all of its files;
# some refuse to rename files, too. There, a file appears once it is closed.

_BUFFER_BYTES = 1 << 20  # smaller objects appear atomically, also on other file systems


class FolderObjects:
    """Objects as files below a folder."""

    def __init__(self, root: str | os.PathLike[str], *, place: str | None = None) -> None:
        self._root = Path(root)
        self.place = place if place is not None else str(root)
        self._renames_files = True

    def list(self, prefix: str) -> dict[str, ObjectInfo]:
        listed = {}
        try:
            with os.scandir(self._root / prefix) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):  # removed in the meantime
                        listed[entry.name] = _file_info(entry.stat(follow_symlinks=False))
        except ABSENT:
            return {}
        return listed

    def stat(self, key: str) -> ObjectInfo:
        info = _file_info(os.stat(self._root / key, follow_symlinks=False))
        if info.is_folder:
            raise FileNotFoundError(errno.ENOENT, "no such object", key)
        return info

    def get(self, key: str, begin: int, end: int) -> bytes:
        with contextlib.closing(LocalStorage(self._root).open(key)) as source:
            data = bytearray(end - begin)
            return bytes(data[: source.read_at(begin, memoryview(data))])

    def put(self, key: str, data: bytes, *, only_new: bool = False) -> None:
        if only_new and os.path.lexists(self._root / key):
            # Another writer may put it before the rename below, but only the same bytes.
            raise FileExistsError(errno.EEXIST, "the object exists", key)
        if not self._renames_files:
            self._write(key, data)
            self.sync_names(key)
            return
        temporary = f"{LATEST_PREFIX}{secrets.token_hex(4)}"  # garbage collection removes it
        folder, slash, _ = key.rpartition("/")
        temporary = f"{folder}{slash}{temporary}"
        try:
            self._write(temporary, data)
            os.rename(self._root / temporary, self._root / key)
            self.sync_names(key)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(self._root / temporary)
            # Where nothing can be written, the next write fails for the same reason.
            if not _is_rename_refused(error):
                raise
            self._renames_files = False
            self._write(key, data)
            self.sync_names(key)

    def upload(self, key: str) -> Upload:
        return _FileUpload(self, key)

    def delete(self, key: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._root / key)

    def delete_prefix(self, prefix: str) -> None:
        with contextlib.suppress(OSError):  # another writer may have put an object there
            os.rmdir(self._root / prefix)

    def create(self, key: str) -> WritableFile:
        path = self._root / key
        try:
            return LocalStorage(self._root).create(key)
        except FileNotFoundError:
            path.parent.mkdir(parents=True, exist_ok=True)
            return LocalStorage(self._root).create(key)

    def _write(self, key: str, data: bytes) -> None:
        sink = self.create(key)
        try:
            sink.write(data)
            sink.sync()
        finally:
            sink.close()

    def sync_names(self, key: str) -> None:
        """Make the names of an object and its prefix durable. Raises ``OSError``."""
        folder, slash, _ = key.rpartition("/")
        for path in (folder, "") if slash else ("",):
            sync_folder(LocalStorage(self._root), path)


class _FileUpload:
    """Small objects are written at the end, larger ones in place: nothing refers to an attempt's
    file before it is complete."""

    def __init__(self, objects: FolderObjects, key: str) -> None:
        self._objects = objects
        self._key = key
        self._small = bytearray()
        self._file: WritableFile | None = None

    def write(self, data: bytes | memoryview) -> None:
        if self._file is None:
            self._small += data
            if len(self._small) < _BUFFER_BYTES:
                return
            self._file = self._objects.create(self._key)
            data, self._small = bytes(self._small), bytearray()
        self._file.write(data)

    def finish(self) -> None:
        if self._file is None:
            self._objects.put(self._key, bytes(self._small))
            return
        try:
            self._file.sync()
        finally:
            self._file.close()
        self._objects.sync_names(self._key)

    def abandon(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._objects.delete(self._key)


def _file_info(status: os.stat_result) -> ObjectInfo:
    return ObjectInfo(status.st_size, status.st_mtime, is_folder=stat.S_ISDIR(status.st_mode))


# ----------------------------------------------------------------------------
# Checkpoints in an object store, which has no rename: putting the manifest last is the commit.
#
# An attempt and the checkpoint it becomes are one prefix::
#
#     step-000001200.g7.3f9c/
#       00000-of-00004.safetensors     written under the final name
#       part-00000-of-00004.json
#       .manifest-pending.json         an attempt's manifest.json, before the commit
#       manifest.json                  present with all files: committed. One put; the first wins.
#       .removed                       present, and not committed: being removed
#     .committed-step-000001200.g7.3f9c  empty: this prefix need not be listed to know its state
#
# So the three folders of :mod:`checkpoints.names` (attempt, committed, removed) are three
# states of a prefix, distinguished by the last two objects. Renaming between them puts and deletes
# these objects and never moves data. An object store has no folders: an empty one is missing.
#
# One listing of the root shows what is committed, by the marks beside the prefixes; otherwise each
# save would list each checkpoint. A mark is put after the commit and deleted before a removal, and
# only speeds up listings: a checkpoint without one is listed itself, and a mark without its prefix,
# of a committer that was paused until the removal had ended, is a removal to complete.
#
# A committer may be paused between checking the parts and putting the manifest, while another
# process removes those parts. Three rules keep its manifest from listing missing files:
#
# - a remover puts the mark first and then checks for a manifest; a committer puts the manifest
#   first and then checks for the mark and the files. At least one of them sees the other: a
#   committer that finds a mark or misses a file deletes its manifest and fails;
# - a remover lists again after deleting, and deletes what was added meanwhile;
# - if the committer dies before its check, every reader treats a manifest without its files as a
#   checkpoint being removed, and garbage collection deletes it.

_PENDING = ".manifest-pending.json"
_REMOVED = ".removed"
_COMMITTED_PREFIX = ".committed-"


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
        if name is not None and state is _State.COMMITTED:
            self._objects.delete(_mark_of(name))
        entries = self._objects.list(_key(path))
        if name is not None and state is _State.ATTEMPT and _state(entries) is state:
            entries, state = self._mark(name), _State.REMOVED
        # Repeat, for the manifest of a committer that was paused before its put.
        while entries and (name is None or _state(entries) is state):
            self._delete_all(path, entries)
            entries = self._objects.list(_key(path))
        if name is not None and not entries:
            self._objects.delete(_mark_of(name))

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
        roots: builtins.list[str] = []
        entries = self._objects.list("")
        for entry, info in entries.items():
            name = parse_committed(entry.removeprefix(_COMMITTED_PREFIX))
            if name is None or (entry == str(name) and not info.is_folder):
                roots.append(entry)
            elif entry == _mark_of(name):
                if str(name) not in entries:
                    roots.append(name.removed)
            elif _mark_of(name) in entries:
                roots.append(entry)
            else:
                match _state(self._objects.list(entry)):
                    case _State.COMMITTED:
                        roots.append(entry)
                    case _State.REMOVED:
                        roots.append(name.removed)
                    case _:
                        roots.append(name.attempt)
        return roots

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
        with contextlib.suppress(OSError):  # it is committed without a mark, too
            self._objects.put(_mark_of(name), b"")

    def _uncommit(self, name: CheckpointName) -> None:
        self._objects.delete(_mark_of(name))
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


def _mark_of(name: CheckpointName) -> str:
    return f"{_COMMITTED_PREFIX}{name}"


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


# ----------------------------------------------------------------------------
# A local folder, on any file system.
#
# Where folders can be renamed, a rename is the commit. Where they cannot, checkpoints are stored as
# in an object store, and the manifest is the commit. The first writer finds out by a rename, and
# leaves a mark for readers: on a mount of the same folder that can rename, an attempt would look
# like a damaged checkpoint.

_MARK = ".commits-by-manifest"
# Refusals of a rename. gcsfuse: EMFILE, too many files to copy; overlayfs: EXDEV; mounted buckets:
# EPERM or EACCES, although new files and folders can be written.
_NO_RENAME = {errno.EMFILE, errno.EXDEV, errno.EPERM, errno.EACCES}


def _is_rename_refused(error: OSError) -> bool:
    return is_unsupported(error) or error.errno in _NO_RENAME


class FolderStorage(LocalStorage):
    """A local folder, whose file system may be unable to rename folders."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        super().__init__(root)
        self._renaming = LocalStorage(root)
        self._putting = ObjectStorage(FolderObjects(self.folder, place=self.place))
        self._chosen: Storage | None = None  # None: not written to yet, and without a mark

    @classmethod
    def of(cls, storage: LocalStorage) -> FolderStorage:
        """The same folder, also if its path was relative, and the process has changed its own."""
        made = cls(storage.folder)
        made._place = storage.place
        return made

    def make_folder(self, path: str) -> None:
        self._renaming.make_folder("")
        self._to_write().make_folder(path)

    def list(self, path: str) -> builtins.list[str]:
        return [entry for entry in self._to_read().list(path) if path or entry != _MARK]

    def size(self, path: str) -> int:
        return self._to_read().size(path)

    def modified_s(self, path: str) -> float:
        return self._to_read().modified_s(path)

    def create(self, path: str) -> WritableFile:
        return self._to_write().create(path)

    def open(self, path: str) -> ReadableFile:
        return self._to_read().open(path)

    def rename(self, old: str, new: str) -> None:
        self._to_write().rename(old, new)

    def sync_folder(self, path: str) -> None:
        self._to_write().sync_folder(path)

    def remove(self, path: str) -> None:
        self._to_read().remove(path)

    def remove_folder(self, path: str) -> None:
        self._to_read().remove_folder(path)

    def try_a_save(self) -> None:
        """Perform the operations of a save on a folder that is removed again. Raises OSError if the
        file system refuses one of them."""
        storage = self._to_write()
        if storage is self._putting:
            return  # a file that is created and removed has shown all that a save needs
        before, after = _probe_folders()
        try:
            storage.make_folder(before)
            write_durably(storage, f"{before}/file", b"x")
            sync_folder(storage, before)
            storage.rename(before, after)
            sync_folder(storage, "")
        finally:
            self._remove_probes(before, after)

    def _to_read(self) -> Storage:
        if self._chosen is None and self._is_marked():
            self._chosen = self._putting
        return self._chosen if self._chosen is not None else self._renaming

    def _to_write(self) -> Storage:
        if self._chosen is None:
            can_rename = False if self._is_marked() else self._can_rename()
            if can_rename is None:
                return self._renaming
            self._chosen = self._renaming if can_rename else self._putting
        return self._chosen

    def _is_marked(self) -> bool:
        try:
            self._renaming.size(_MARK)
        except ABSENT:
            return False
        return True

    def _can_rename(self) -> bool | None:
        """Whether the file system renames folders. If not, marks the root. None: not known, and the
        caller's write will fail for the same reason."""
        before, after = _probe_folders()
        is_refused = is_unsupported
        try:
            self._renaming.make_folder(before)
            self._renaming.create(f"{before}/file").close()
            is_refused = _is_rename_refused
            self._renaming.rename(before, after)
        except OSError as error:
            if not is_refused(error):
                return None
            with contextlib.suppress(FileExistsError):
                self._renaming.create(_MARK).close()
            return False
        finally:
            self._remove_probes(before, after)
        return True

    def _remove_probes(self, *folders: str) -> None:
        for folder in folders:
            with contextlib.suppress(OSError):  # garbage collection removes it
                self._renaming.remove_folder(folder)


def _probe_folders() -> tuple[str, str]:
    """The names of a folder before and after it is renamed."""
    before, after = (f"{REMOVED_PREFIX}probe-{secrets.token_hex(4)}" for _ in range(2))
    return before, after


# ----------------------------------------------------------------------------
# Resolves a checkpoint root (a path, a URL or a storage) to a storage.

Root = str | os.PathLike[str] | Storage
"""A checkpoint root: a local path, the URL of an object store, or a storage."""


_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*):(/+)")


def storage_for(root: Root) -> Storage:
    """The storage of a root.

    A string that begins with a scheme is a URL: ``s3://bucket/prefix``, ``memory://jobs``;
    a ``file:`` URL is a path. In a path, ``~`` is expanded. Raises :class:`ArgumentError` if the
    driver of a URL is not installed, for a URL that was turned into a path, and for the ``~`` of an
    unknown user.
    """
    if type(root) is LocalStorage:  # given by the user
        return FolderStorage.of(root)
    if not isinstance(root, (str, os.PathLike)):
        return root
    text = os.fspath(root)
    scheme = _SCHEME.match(text)
    if scheme is None:
        return FolderStorage(_expanded(text))
    if scheme[1].lower() in ("file", "local"):
        return FolderStorage(_path_of(text))
    if not isinstance(root, str) or len(scheme[2]) < 2:
        raise ArgumentError(
            f"{root!r} is a path, but looks like a URL",
            hint=f"Pass the URL as a str: {scheme[1]}://… (pathlib.Path removes a slash); for a "
            f"folder of this name, ./{text}.",
        )
    return ObjectStorage(open_url(text))


def _expanded(path: str) -> str:
    """The path with its ``~`` expanded. Raises :class:`ArgumentError` for an unknown user."""
    expanded = os.path.expanduser(path)
    if path.startswith("~") and expanded == path:
        raise ArgumentError(
            f"{path}: there is no user {path.partition('/')[0][1:]!r}",
            hint=f"For a folder of this name, ./{path}.",
        )
    return expanded


def _path_of(url: str) -> str:
    """The path of a ``file://`` URL, or of ``file:/path``, which is the same for RFC 8089 and is
    what :class:`pathlib.Path` makes of one. Raises :class:`ArgumentError` for another host."""
    scheme, slashes, rest = url.partition("://")
    if not slashes:
        return unquote(url.partition(":")[2])
    if scheme.lower() == "local":
        return rest
    host, slash, path = rest.partition("/")
    if slash and host.lower() not in ("", "localhost"):
        raise ArgumentError(
            f"{url} names a folder on the host {host!r}",
            hint=f"Mount it, and pass its path; for a relative path, {rest!r}.",
        )
    return unquote(slash + path if slash else rest)
