"""The few operations of an object store that :mod:`checkpoints.storage.object_storage` builds on.

An object appears atomically, and its name does not change.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol


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
