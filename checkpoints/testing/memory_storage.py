"""A storage in memory that simulates power failures.

It tracks what programs see and what survives a power failure: the content of a file as of its last
sync, the names in a folder as of the last sync_folder. Real file systems may write names back
earlier, so both extremes are available.
"""

from __future__ import annotations

import builtins
import errno
from dataclasses import dataclass, field

from checkpoints.storage.protocol import ReadableFile, WritableFile


@dataclass
class _MemoryFile:
    content: bytearray = field(default_factory=bytearray)
    durable: bytes = b""


@dataclass
class _MemoryFolder:
    names: dict[str, _MemoryFolder | _MemoryFile] = field(default_factory=dict)
    durable: dict[str, _MemoryFolder | _MemoryFile] = field(default_factory=dict)


class MemoryStorage:
    """A storage in this process's memory; :meth:`after_power_cut` returns what a disk would keep.

    Raises FileNotFoundError and OSError as a file system would.
    """

    place = "memory"

    def __init__(self, top: _MemoryFolder | None = None) -> None:
        self._top = top or _MemoryFolder()

    def after_power_cut(self, *, names_survive: bool) -> MemoryStorage:
        """A copy without unsynced content; names are lost too, unless ``names_survive``."""

        def survived(node: _MemoryFolder | _MemoryFile) -> _MemoryFolder | _MemoryFile:
            if isinstance(node, _MemoryFile):
                return _MemoryFile(bytearray(node.durable), node.durable)
            names = node.names if names_survive else node.durable
            kept = {name: survived(child) for name, child in names.items()}
            return _MemoryFolder(dict(kept), dict(kept))

        top = survived(self._top)
        assert isinstance(top, _MemoryFolder)
        return MemoryStorage(top)

    def make_folder(self, path: str) -> None:
        if path:
            self._top.names.setdefault(path, _MemoryFolder())

    def list(self, path: str) -> builtins.list[str]:
        return builtins.list(self._folder(path).names)

    def size(self, path: str) -> int:
        return len(self._file(path).content)

    def modified_s(self, path: str) -> float:
        return 0.0

    def create(self, path: str) -> WritableFile:
        folder, name = self._parent(path)
        node = folder.names.setdefault(name, _MemoryFile())
        assert isinstance(node, _MemoryFile)
        node.content = bytearray()
        return _OpenFile(node)

    def open(self, path: str) -> ReadableFile:
        return _OpenFile(self._file(path))

    def rename(self, old: str, new: str) -> None:
        source, old_name = self._parent(old)
        target, new_name = self._parent(new)
        if old_name not in source.names:
            raise FileNotFoundError(old)
        taken = target.names.get(new_name)
        if isinstance(taken, _MemoryFolder) and taken.names:
            raise OSError(errno.ENOTEMPTY, "not empty", new)
        target.names[new_name] = source.names.pop(old_name)

    def sync_folder(self, path: str) -> None:
        folder = self._folder(path)
        folder.durable = dict(folder.names)

    def remove(self, path: str) -> None:
        folder, name = self._parent(path)
        if name not in folder.names:
            raise FileNotFoundError(path)
        del folder.names[name]

    def remove_folder(self, path: str) -> None:
        self._top.names.pop(path, None)

    def _folder(self, path: str) -> _MemoryFolder:
        node = self._top.names.get(path) if path else self._top
        if not isinstance(node, _MemoryFolder):
            raise FileNotFoundError(path)
        return node

    def _parent(self, path: str) -> tuple[_MemoryFolder, str]:
        folder, _, name = path.rpartition("/")
        return self._folder(folder), name

    def contents(self, path: str) -> bytearray:
        """The bytes of a file themselves, for a test to damage."""
        return self._file(path).content

    def _file(self, path: str) -> _MemoryFile:
        folder, name = self._parent(path)
        node = folder.names.get(name)
        if not isinstance(node, _MemoryFile):
            raise FileNotFoundError(path)
        return node


class _OpenFile:
    def __init__(self, file: _MemoryFile) -> None:
        self._file = file

    def write(self, data: bytes | memoryview) -> None:
        self._file.content += data

    def sync(self) -> None:
        self._file.durable = bytes(self._file.content)

    def close(self) -> None:
        pass

    def size(self) -> int:
        return len(self._file.content)

    def read_at(self, offset: int, into: memoryview) -> int:
        data = self._file.content[offset : offset + len(into)]
        into[: len(data)] = data
        return len(data)

    def mapped(self) -> None:
        return None
