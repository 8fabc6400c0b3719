"""The one seam to the disk: a small protocol, and the local file system behind it.

Paths are relative to the storage's root, with ``/``; what they name is made by
:mod:`checkpoints.naming`, never taken from a manifest unchecked. Failures are ``OSError``;
callers turn them into errors for people (:func:`writing`, :func:`reading`).

:mod:`checkpoints.objects` is an object store behind the same protocol; :mod:`checkpoints.faulty`
wraps any storage and fails, tears or dies at a chosen call.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from checkpoints.errors import DiskFull, NotWritable, ReadFailed, WriteFailed
from checkpoints.mapped import MappedFile, in_memory
from checkpoints.naming import parse_attempt

# Small tensors are gathered into writes of this size; larger ones pass through unbuffered.
_BUFFER_BYTES = 1 << 20


class Sink(Protocol):
    """A file being written."""

    def write(self, data: bytes | memoryview) -> None:
        """Append all of ``data``."""
        ...

    def sync(self) -> None:
        """Flush, then make the content durable: after this a power cut keeps it."""
        ...

    def close(self) -> None: ...


class Source(Protocol):
    """A file being read."""

    def size(self) -> int: ...

    def read_at(self, offset: int, into: memoryview) -> int:
        """Fill ``into`` from ``offset``; the number of bytes, less only at the file's end."""
        ...

    def mapped(self) -> MappedFile | None:
        """The file where it lies in this machine's memory; None if it does not, or may not be."""
        ...

    def close(self) -> None: ...


class Storage(Protocol):
    """What this package needs of a place for checkpoints."""

    @property
    def place(self) -> str:
        """The root, for people."""
        ...

    def make_folder(self, path: str) -> None:
        """With its parents; one that exists is fine. The root is ``""``."""
        ...

    def list(self, path: str) -> list[str]:
        """Names in a folder."""
        ...

    def size(self, path: str) -> int:
        """Bytes of a file."""
        ...

    def modified_s(self, path: str) -> float:
        """When it last changed, in seconds since 1970."""
        ...

    def create(self, path: str) -> Sink:
        """A new file; an old one of that name is emptied."""
        ...

    def open(self, path: str) -> Source:
        """Open a file for reading."""
        ...

    def rename(self, old: str, new: str) -> None:
        """Atomic. A folder onto a folder that is not empty fails (EEXIST or ENOTEMPTY)."""
        ...

    def sync_folder(self, path: str) -> None:
        """Make the names in a folder durable."""
        ...

    def remove(self, path: str) -> None:
        """Remove a file."""
        ...

    def remove_folder(self, path: str) -> None:
        """With all that is in it; one that is gone is fine."""
        ...


Root = str | os.PathLike[str] | Storage
"""Where checkpoints live: a path on this machine, a URL of an object store, or a storage."""

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*)://")


def storage_for(root: Root) -> Storage:
    """The storage that ``root`` is or names.

    A text that begins with a scheme is a URL: ``s3://bucket/prefix``, ``memory://jobs``;
    ``file://`` ones are paths. Raises :class:`ArgumentError` if its driver is not installed.
    """
    if not isinstance(root, (str, os.PathLike)):
        return root
    scheme = _SCHEME.match(root) if isinstance(root, str) else None
    if scheme is None:
        return LocalStorage(root)
    if scheme[1].lower() in ("file", "local"):
        return LocalStorage(str(root)[scheme.end() :])
    from checkpoints.fsspec_objects import open_url
    from checkpoints.objects import ObjectStorage

    return ObjectStorage(open_url(str(root)))


class LocalStorage:
    """A folder on this machine, or on NFS (rename and fsync are synchronous there)."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self._root = Path(root)

    @property
    def place(self) -> str:
        return str(self._root)

    def make_folder(self, path: str) -> None:
        folder = self._root / path
        missing = [p for p in (folder, *folder.parents) if not p.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        if not path:
            for made in missing:
                _sync_folder(made.parent)

    def list(self, path: str) -> list[str]:
        return os.listdir(self._root / path)

    def size(self, path: str) -> int:
        return os.stat(self._root / path, follow_symlinks=False).st_size

    def modified_s(self, path: str) -> float:
        return os.stat(self._root / path, follow_symlinks=False).st_mtime

    def create(self, path: str) -> Sink:
        return _LocalSink(self._root / path)

    def open(self, path: str) -> Source:
        return _LocalSource(self._root / path)

    def rename(self, old: str, new: str) -> None:
        os.rename(self._root / old, self._root / new)

    def sync_folder(self, path: str) -> None:
        _sync_folder(self._root / path)

    def remove(self, path: str) -> None:
        os.unlink(self._root / path)

    def remove_folder(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self._root / self._out_of_reach(path))

    def _out_of_reach(self, path: str) -> str:
        """An attempt under another name: a committer that was stopped before its rename would
        make a checkpoint of what is half removed."""
        attempt = parse_attempt(path)
        if attempt is None:
            return path
        with contextlib.suppress(FileNotFoundError):  # what another one left
            shutil.rmtree(self._root / attempt.removed)
        os.rename(self._root / path, self._root / attempt.removed)
        return attempt.removed


class _LocalSink:
    def __init__(self, path: Path) -> None:
        # Never through a link: a planted one would have us overwrite its target.
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        self._file = io.BufferedWriter(
            io.FileIO(os.open(path, flags, 0o666), "w"), buffer_size=_BUFFER_BYTES
        )

    def write(self, data: bytes | memoryview) -> None:
        self._file.write(data)

    def sync(self) -> None:
        self._file.flush()  # before the fsync: what is still in our buffer is not on disk
        os.fsync(self._file.fileno())

    def close(self) -> None:
        try:
            self._file.close()
        finally:
            # A failed flush leaves the descriptor open; the bytes are lost either way.
            self._file.raw.close()


class _LocalSource:
    def __init__(self, path: Path) -> None:
        # O_NONBLOCK: a planted FIFO must not hang us; O_NOFOLLOW: nothing outside the folder.
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        status = os.fstat(self._fd)
        if not stat.S_ISREG(status.st_mode):
            os.close(self._fd)
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        self._size = status.st_size
        self._device = status.st_dev

    def size(self) -> int:
        return self._size

    def read_at(self, offset: int, into: memoryview) -> int:
        done = 0
        while done < len(into):
            count = os.preadv(self._fd, [into[done:]], offset + done)
            if count == 0:
                break
            done += count
        return done

    def mapped(self) -> MappedFile | None:
        if not in_memory(self._device):
            return None
        try:
            return MappedFile(self._fd)
        except (OSError, ValueError):
            return None

    def close(self) -> None:
        os.close(self._fd)


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_REFUSED = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ELOOP}


@contextlib.contextmanager
def writing(place: str) -> Iterator[None]:
    """Turn an ``OSError`` into the error that says what to do about it."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in _FULL:
            raise DiskFull(
                f"no room to save into {place}: {reason}",
                hint="Free space or keep fewer checkpoints; the older ones are untouched.",
            ) from error
        if error.errno in _REFUSED:
            raise NotWritable(
                f"cannot write into {place}: {reason}",
                hint="Give a folder that every writer may write.",
            ) from error
        raise WriteFailed(
            f"writing into {place} failed: {reason}",
            hint="The older checkpoints are untouched; the next save starts anew.",
        ) from error


@contextlib.contextmanager
def reading(place: str) -> Iterator[None]:
    """Turn an ``OSError`` into :class:`ReadFailed`."""
    try:
        yield
    except OSError as error:
        raise ReadFailed(
            f"reading {place} failed: {error.strerror or error}",
            hint="Check the disk or the mount; latest() finds the newest that can be read.",
        ) from error
