"""Storages that fail, for tests."""

from __future__ import annotations

import builtins
import errno
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, Protocol, TypeVar

from checkpoints.objects import ObjectInfo, Objects, Upload
from checkpoints.storage import MappedFile, ReadableFile, Storage, WritableFile

# ----------------------------------------------------------------------------
# Fault injection: a storage that crashes, tears a write, fails or delays at a chosen call.
#
# Run once without a fault to count the calls, then once for every call and every fault.
# :class:`FaultyObjects` does the same for the requests to an object store, of which one call of a
# storage makes several.


class _Placed(Protocol):
    @property
    def place(self) -> str: ...


_Inner = TypeVar("_Inner", bound=_Placed)


class SimulatedCrash(BaseException):
    """Simulates the death of the process. A BaseException, so that no handler continues after
    it."""


class StorageFault(Enum):
    """What goes wrong at the chosen call."""

    DIE_BEFORE = "die-before"  # the call never happens
    DIE_AFTER = "die-after"  # it happens, and nothing more does
    TEAR = "tear"  # half of a write happens; another call does not
    NO_SPACE = "no-space"  # ENOSPC from this call on, for writes
    IO_ERROR = "io-error"  # EIO, once
    REFUSED = "refused"  # EACCES, once


_ERRNO = {
    StorageFault.NO_SPACE: errno.ENOSPC,
    StorageFault.IO_ERROR: errno.EIO,
    StorageFault.REFUSED: errno.EACCES,
}


@dataclass
class _FaultSchedule:
    """The fault to inject; shared by a storage and its files, which count calls together."""

    at: int | None
    fault: StorageFault
    before: Callable[[str], None] | None
    calls: list[str]
    dead: bool = False
    full: bool = False

    def run(
        self, label: str, call: Callable[[], None], half: Callable[[], None] | None = None
    ) -> None:
        if self.dead:
            raise SimulatedCrash(label)
        if self.before is not None:
            self.before(label)
        self.calls.append(label)
        chosen = len(self.calls) - 1 == self.at
        if self.full and label.startswith("write "):
            raise OSError(errno.ENOSPC, "no space (injected)", label)
        if not chosen:
            call()
            return
        self._inject(label, call, half)

    def _inject(
        self, label: str, call: Callable[[], None], half: Callable[[], None] | None
    ) -> None:
        if self.fault in _ERRNO:
            self.full = self.fault is StorageFault.NO_SPACE
            raise OSError(_ERRNO[self.fault], f"{self.fault.value} (injected)", label)
        self.dead = True
        if self.fault is StorageFault.DIE_AFTER:
            call()
        elif self.fault is StorageFault.TEAR and half is not None:
            half()
        raise SimulatedCrash(label)


class _Faulty(Generic[_Inner]):
    """The wrapped object and the fault schedule for its calls."""

    def __init__(
        self,
        inner: _Inner,
        *,
        at: int | None = None,
        fault: StorageFault = StorageFault.DIE_BEFORE,
        before: Callable[[str], None] | None = None,
    ) -> None:
        self._inner = inner
        self._plan = _FaultSchedule(at, fault, before, [])
        if getattr(inner, "is_volatile", False):
            self.is_volatile = True

    @property
    def calls(self) -> list[str]:
        return self._plan.calls

    @property
    def place(self) -> str:
        return self._inner.place


class FaultyStorage(_Faulty[Storage]):
    """Wraps a storage. ``at`` is the number of the call that fails, from 0; None fails none.

    ``before`` is called with the label of every call, to delay it or to run another writer in
    between. ``calls`` are the labels so far. Calls raise what the wrapped storage raises, and
    :class:`SimulatedCrash` or OSError where ``fault`` says so.
    """

    def make_folder(self, path: str) -> None:
        self._plan.run(f"make_folder {path}", lambda: self._inner.make_folder(path))

    def list(self, path: str) -> list[str]:
        found: list[str] = []
        self._plan.run(f"list {path}", lambda: found.extend(self._inner.list(path)))
        return found

    def size(self, path: str) -> int:
        found: list[int] = []
        self._plan.run(f"size {path}", lambda: found.append(self._inner.size(path)))
        return found[0]

    def modified_s(self, path: str) -> float:
        found: list[float] = []
        self._plan.run(f"modified_s {path}", lambda: found.append(self._inner.modified_s(path)))
        return found[0]

    def create(self, path: str) -> WritableFile:
        made: list[WritableFile] = []
        self._plan.run(f"create {path}", lambda: made.append(self._inner.create(path)))
        return _FaultySink(made[0], self._plan, path)

    def open(self, path: str) -> ReadableFile:
        made: list[ReadableFile] = []
        self._plan.run(f"open {path}", lambda: made.append(self._inner.open(path)))
        return _FaultySource(made[0], self._plan, path)

    def rename(self, old: str, new: str) -> None:
        self._plan.run(f"rename {old} {new}", lambda: self._inner.rename(old, new))

    def sync_folder(self, path: str) -> None:
        self._plan.run(f"sync_folder {path}", lambda: self._inner.sync_folder(path))

    def remove(self, path: str) -> None:
        self._plan.run(f"remove {path}", lambda: self._inner.remove(path))

    def remove_folder(self, path: str) -> None:
        self._plan.run(
            f"remove_folder {path}",
            lambda: self._inner.remove_folder(path),
            lambda: self._remove_some(path),
        )

    def _remove_some(self, path: str) -> None:
        for file in self._inner.list(path)[::2]:
            self._inner.remove(f"{path}/{file}")


class _FaultySink:
    def __init__(self, inner: WritableFile, plan: _FaultSchedule, path: str) -> None:
        self._inner, self._plan, self._path = inner, plan, path

    def write(self, data: bytes | memoryview) -> None:
        self._plan.run(
            f"write {self._path}",
            lambda: self._inner.write(data),
            lambda: self._inner.write(data[: len(data) // 2]),
        )

    def sync(self) -> None:
        self._plan.run(f"sync {self._path}", self._inner.sync)

    def close(self) -> None:
        try:
            self._plan.run(f"close {self._path}", lambda: None)
        finally:
            self._inner.close()  # always release the descriptor


class _FaultySource:
    def __init__(self, inner: ReadableFile, plan: _FaultSchedule, path: str) -> None:
        self._inner, self._plan, self._path = inner, plan, path

    def size(self) -> int:
        found: list[int] = []
        self._plan.run(f"fstat {self._path}", lambda: found.append(self._inner.size()))
        return found[0]

    def read_at(self, offset: int, into: memoryview) -> int:
        found: list[int] = []
        self._plan.run(
            f"read {self._path}", lambda: found.append(self._inner.read_at(offset, into))
        )
        return found[0]

    def mapped(self) -> MappedFile | None:
        found: list[MappedFile | None] = []
        self._plan.run(f"map {self._path}", lambda: found.append(self._inner.mapped()))
        return found[0]

    def close(self) -> None:
        try:
            self._plan.run(f"close {self._path}", lambda: None)
        finally:
            self._inner.close()


class FaultyObjects(_Faulty[Objects]):
    """Wraps an object store, as :class:`FaultyStorage` wraps a storage.

    No torn writes: a put is atomic. Calls raise what the wrapped store raises, and
    :class:`SimulatedCrash` or OSError where ``fault`` says so.
    """

    def list(self, prefix: str) -> Mapping[str, ObjectInfo]:
        found: dict[str, ObjectInfo] = {}
        self._plan.run(f"list {prefix}", lambda: found.update(self._inner.list(prefix)))
        return found

    def stat(self, key: str) -> ObjectInfo:
        """Size and modification time of an object."""
        found: builtins.list[ObjectInfo] = []
        self._plan.run(f"stat {key}", lambda: found.append(self._inner.stat(key)))
        return found[0]

    def get(self, key: str, begin: int, end: int) -> bytes:
        """The bytes of an object from ``begin`` to ``end``."""
        found: builtins.list[bytes] = []
        self._plan.run(f"get {key}", lambda: found.append(self._inner.get(key, begin, end)))
        return found[0]

    def put(self, key: str, data: bytes, *, only_new: bool = False) -> None:
        """Put an object in one request."""
        self._plan.run(f"write {key}", lambda: self._inner.put(key, data, only_new=only_new))

    def upload(self, key: str) -> Upload:
        """Begin to put an object in several requests; each is a call."""
        return _FaultyUpload(self._inner.upload(key), self._plan, key)

    def delete(self, key: str) -> None:
        """Delete an object."""
        self._plan.run(f"delete {key}", lambda: self._inner.delete(key))

    def delete_prefix(self, prefix: str) -> None:
        """Delete an empty prefix. No fault is injected here."""
        self._inner.delete_prefix(prefix)


class _FaultyUpload:
    def __init__(self, inner: Upload, plan: _FaultSchedule, key: str) -> None:
        self._inner, self._plan, self._key = inner, plan, key

    def write(self, data: bytes | memoryview) -> None:
        self._plan.run(f"write {self._key}", lambda: self._inner.write(data))

    def finish(self) -> None:
        self._plan.run(f"write {self._key}", self._inner.finish)

    def abandon(self) -> None:
        self._inner.abandon()


# ----------------------------------------------------------------------------
# A storage in memory that simulates power failures.
#
# It tracks what programs see and what survives a power failure: the content of a file as of its
# last sync, the names in a folder as of the last sync_folder. Real file systems may write names
# back earlier, so both extremes are available.


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
        folder, name = self._parent(path)
        if name not in folder.names:
            raise FileNotFoundError(path)
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
