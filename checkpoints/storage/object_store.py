"""The few operations of an object store that :mod:`checkpoints.storage.object_storage` builds on.

An object appears atomically, and its name does not change.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class ObjectInfo:
    """An object, or a prefix that objects have in common."""

    size: int
    modified_s: float  # since 1970, by the store's clock
    is_folder: bool = False


class Upload(Protocol):
    """An object on its way: nobody sees it before :meth:`finish` returns."""

    def write(self, data: bytes | memoryview) -> None: ...

    def finish(self) -> None: ...

    def abandon(self) -> None: ...


class Objects(Protocol):
    """An object store. Failures are ``OSError``, what is missing ``FileNotFoundError``."""

    @property
    def place(self) -> str: ...

    def list(self, prefix: str) -> Mapping[str, ObjectInfo]:
        """What stands directly under a prefix, by its last word. Empty if there is nothing."""
        ...

    def stat(self, key: str) -> ObjectInfo: ...

    def get(self, key: str, begin: int, end: int) -> bytes: ...

    def put(self, key: str, data: bytes, *, only_new: bool = False) -> None:
        """At once; with ``only_new``, FileExistsError if there is one."""
        ...

    def upload(self, key: str) -> Upload: ...

    def delete(self, key: str) -> None:
        """One that is gone is fine."""
        ...

    def delete_prefix(self, prefix: str) -> None:
        """One without objects, where prefixes are folders that stay when they are empty."""
        ...
