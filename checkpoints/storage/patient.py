"""Repeats calls that fail transiently, so that a short failure of a disk or network is no error.

A server that fails over, a mount with a stale handle or a lost packet makes a call fail that would
succeed a second later. Without a repetition, a listing that fails at the wrong moment ends a job
or, worse, looks like an empty folder.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Protocol, TypeVar

from checkpoints.intervals import STORAGE_FIRST_BACKOFF_S, STORAGE_PATIENCE_S
from checkpoints.storage.failures import is_permanent
from checkpoints.storage.mapped_files import MappedFile
from checkpoints.storage.protocol import ReadableFile, Storage, VolatileStorage

T = TypeVar("T")


class SleepingClock(Protocol):
    """A clock that can wait."""

    def monotonic(self) -> float: ...

    def sleep(self, seconds: float) -> None: ...


class _SystemClock:
    def monotonic(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


SYSTEM_CLOCK: SleepingClock = _SystemClock()


def patient(storage: Storage) -> Storage:
    """The storage, with reads that are repeated while they fail transiently.

    The memory of a node is not repeated: if it cannot be read, its node is gone.
    """
    if isinstance(storage, (PatientStorage, VolatileStorage)):
        return storage
    return PatientStorage(storage)


def repeated(storage: Storage, call: Callable[[], T]) -> T:
    """The result of ``call``, which writes to ``storage`` and has the same effect if it is
    repeated. It is repeated as a read of that storage would be.

    A single write cannot be: after a failed fsync, the kernel may have dropped the data, and the
    next fsync succeeds. A file is therefore written again from its first byte.
    """
    return storage.repeated(call) if isinstance(storage, PatientStorage) else call()


class PatientStorage:
    """Repeats each read of ``inner`` for ``patience_s`` while it fails transiently, then raises the
    last failure. Writes are passed on: :func:`repeated` repeats them together."""

    def __init__(
        self,
        inner: Storage,
        *,
        patience_s: float = STORAGE_PATIENCE_S,
        clock: SleepingClock = SYSTEM_CLOCK,
    ) -> None:
        self.inner = inner
        self._patience_s = patience_s
        self._clock = clock
        self.make_folder = inner.make_folder
        self.create = inner.create
        self.rename = inner.rename
        self.sync_folder = inner.sync_folder
        self.remove = inner.remove
        self.remove_folder = inner.remove_folder

    @property
    def place(self) -> str:
        return self.inner.place

    def list(self, path: str) -> list[str]:
        return self.repeated(lambda: self.inner.list(path))

    def size(self, path: str) -> int:
        return self.repeated(lambda: self.inner.size(path))

    def modified_s(self, path: str) -> float:
        return self.repeated(lambda: self.inner.modified_s(path))

    def open(self, path: str) -> ReadableFile:
        return _PatientSource(self, path)

    def repeated(self, call: Callable[[], T]) -> T:
        """The result of ``call``, repeated with exponential backoff."""
        until_s: float | None = None  # counts from the first failure: a write may take minutes
        for pause_s in _backoff_s():
            try:
                return call()
            except OSError as error:
                now_s = self._clock.monotonic()
                until_s = now_s + self._patience_s if until_s is None else until_s
                left_s = until_s - now_s
                if is_permanent(error) or left_s <= 0:
                    raise
                self._clock.sleep(min(pause_s, left_s))
        raise AssertionError  # the pauses never end


class _PatientSource:
    """Opens the file again before a read is repeated: a stale handle stays stale."""

    def __init__(self, storage: PatientStorage, path: str) -> None:
        self._storage, self._path = storage, path
        self._source: ReadableFile | None = storage.repeated(lambda: storage.inner.open(path))

    def size(self) -> int:
        return self._repeated(lambda source: source.size())

    def read_at(self, offset: int, into: memoryview) -> int:
        return self._repeated(lambda source: source.read_at(offset, into))

    def mapped(self) -> MappedFile | None:
        return self._repeated(lambda source: source.mapped())

    def close(self) -> None:
        source, self._source = self._source, None
        if source is not None:
            source.close()

    def _repeated(self, call: Callable[[ReadableFile], T]) -> T:
        def once() -> T:
            if self._source is None:
                self._source = self._storage.inner.open(self._path)
            try:
                return call(self._source)
            except OSError:
                with contextlib.suppress(OSError):
                    self.close()
                raise

        return self._storage.repeated(once)


def _backoff_s() -> Iterator[float]:
    pause_s = STORAGE_FIRST_BACKOFF_S
    while True:
        yield pause_s
        pause_s *= 2
