"""The storage protocol: everything this package needs of a place for checkpoints.

Paths are relative to the storage's root, with ``/``; they are built by
:mod:`checkpoints.format.names`, never taken from a manifest unchecked. Failures are ``OSError``;
callers turn them into the errors that users see (:mod:`checkpoints.storage.failures`).
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from checkpoints.storage.mapped_files import MappedFile


class WritableFile(Protocol):
    """A file being written."""

    def write(self, data: bytes | memoryview) -> None:
        """Append all of ``data``."""
        ...

    def sync(self) -> None:
        """Flush, then make the content durable: after this a power cut keeps it."""
        ...

    def close(self) -> None: ...


class ReadableFile(Protocol):
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

    def size(self, path: str) -> int: ...

    def modified_s(self, path: str) -> float:
        """When it last changed, in seconds since 1970."""
        ...

    def create(self, path: str) -> WritableFile:
        """A new file; an old one of that name is emptied."""
        ...

    def open(self, path: str) -> ReadableFile: ...

    def rename(self, old: str, new: str) -> None:
        """Atomic. A folder onto a folder that is not empty fails (EEXIST or ENOTEMPTY)."""
        ...

    def sync_folder(self, path: str) -> None:
        """Make the names in a folder durable."""
        ...

    def remove(self, path: str) -> None: ...

    def remove_folder(self, path: str) -> None:
        """With all that is in it; one that is gone is fine."""
        ...


@runtime_checkable
class ClosableStorage(Protocol):
    """A storage that holds connections; its owner closes it."""

    def close(self) -> None: ...
