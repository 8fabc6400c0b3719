"""A file with several replicas: a reader that finds damaged bytes reads them from the next one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from checkpoints.storage.protocol import ReadableFile


@dataclass(frozen=True)
class Replica:
    """One replica, and the callbacks for a failed read and for damage."""

    source: ReadableFile
    fail: Callable[[OSError], None]
    damaged: Callable[[str], None]


class ReplicatedFile:
    """A file that falls back to the next replica if one fails. Replicas are opened on demand.

    For one thread. Only the reader of a range knows its hash: it calls :meth:`reject` for damaged
    bytes, and reads again.
    """

    def __init__(self, replicas: Iterator[Replica], size: int | None) -> None:
        self._unopened = replicas
        self._size = size
        self._open: list[Replica] = []
        # Opened if there is no other replica, so that the reader reports its size as the error.
        self._wrong_size: Replica | None = None
        self._dead: set[int] = set()
        self._rejected: tuple[tuple[int, int], set[int]] = ((0, 0), set())
        self._open_next()

    @property
    def is_empty(self) -> bool:
        return not self._open

    def size(self) -> int:
        return self._open[0].source.size()

    def read_at(self, offset: int, into: memoryview) -> int:
        (begin, end), rejected = self._rejected
        skipped = rejected if begin <= offset and offset + len(into) <= end else set()
        failure: OSError | None = None
        index = 0
        while (replica := self._replica(index)) is not None:
            if index not in self._dead and index not in skipped:
                try:
                    return replica.source.read_at(offset, into)
                except OSError as error:
                    failure = error
                    self._dead.add(index)
                    replica.fail(error)
            index += 1
        raise failure or OSError("no replica is left")

    def reject(self, begin: int, end: int) -> bool:
        """Read these bytes from another replica: those of the current one are damaged. Returns
        whether there is another one."""
        if self._rejected[0] != (begin, end):
            self._rejected = ((begin, end), set())
        rejected = self._rejected[1]
        unusable = self._dead | rejected
        index = 0
        while (replica := self._replica(index)) is not None and index in unusable:
            index += 1
        if replica is None:
            return False
        replica.damaged(f"bytes {begin} to {end} are damaged")
        rejected.add(index)
        while (replica := self._replica(index)) is not None:
            if index not in self._dead and index not in rejected:
                return True
            index += 1
        return False

    def mapped(self) -> None:
        return None

    def close(self) -> None:
        for replica in {*self._open, *([self._wrong_size] if self._wrong_size else [])}:
            replica.source.close()

    def _replica(self, index: int) -> Replica | None:
        if index == len(self._open):
            self._open_next()
        return self._open[index] if index < len(self._open) else None

    def _open_next(self) -> None:
        """Open the next replica of the right size, if any."""
        for replica in self._unopened:
            try:
                size = replica.source.size()
            except OSError as error:
                replica.fail(error)
                replica.source.close()
                continue
            if self._size is None or size == self._size:
                self._open.append(replica)
                return
            if self._wrong_size is None:
                self._wrong_size = replica
            else:
                replica.source.close()
        if not self._open and self._wrong_size is not None:
            self._open.append(self._wrong_size)
