"""The storage protocol: every operation that this package uses to store checkpoints.

Paths are relative to the storage's root, with ``/``; they are built by
:mod:`checkpoints.format.names`, never taken from a manifest unchecked. Failures are ``OSError``, of
the three kinds of :mod:`checkpoints.storage.failures`: FileNotFoundError and NotADirectoryError say
that a file or folder does not exist, every other one that this call cannot tell. Callers turn them
into the errors that users see.
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
        """Flush and make the content durable, so that it survives a power failure."""
        ...

    def close(self) -> None: ...


class ReadableFile(Protocol):
    """A file being read."""

    def size(self) -> int: ...

    def read_at(self, offset: int, into: memoryview) -> int:
        """Fill ``into`` from ``offset``. Returns the number of bytes, fewer only at end of file."""
        ...

    def mapped(self) -> MappedFile | None:
        """The file mapped into memory, if it is on a memory file system; else None."""
        ...

    def close(self) -> None: ...


class Storage(Protocol):
    """A place for checkpoints."""

    @property
    def place(self) -> str:
        """The root, for messages."""
        ...

    def make_folder(self, path: str) -> None:
        """Create a folder and its parents; an existing one is not an error. The root is ``""``."""
        ...

    def list(self, path: str) -> list[str]:
        """The names in a folder."""
        ...

    def size(self, path: str) -> int:
        """The size of a file in bytes."""
        ...

    def modified_s(self, path: str) -> float:
        """Time of the last change, in seconds since 1970."""
        ...

    def create(self, path: str) -> WritableFile:
        """Create a file, truncating an existing one."""
        ...

    def open(self, path: str) -> ReadableFile:
        """Open a file for reading. Raises OSError; FileNotFoundError if there is none."""
        ...

    def rename(self, old: str, new: str) -> None:
        """Rename atomically. A folder never replaces a non-empty one (EEXIST or ENOTEMPTY)."""
        ...

    def sync_folder(self, path: str) -> None:
        """Make the names in a folder durable."""
        ...

    def remove(self, path: str) -> None:
        """Remove a file."""
        ...

    def remove_folder(self, path: str) -> None:
        """Remove a folder and its content; a missing folder is not an error."""
        ...


@runtime_checkable
class ClosableStorage(Protocol):
    """A storage that holds connections; its owner closes it."""

    def close(self) -> None: ...


@runtime_checkable
class VolatileStorage(Protocol):
    """A storage whose content ends with a process or a node: the memory of a node.

    A reader treats one that cannot be reached as gone, and uses the other tiers. Any other storage
    that cannot be read may still hold the newest checkpoint: reading from it raises.
    """

    is_volatile: bool
