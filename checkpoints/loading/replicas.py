"""A file with several replicas: each read returns the first one whose hash matches."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from checkpoints.format.checksummed_json import digest
from checkpoints.format.manifest import Manifest
from checkpoints.storage.protocol import ReadableFile


@dataclass(frozen=True)
class Replica:
    """One replica, and the callbacks for a failed read and for damage."""

    source: ReadableFile
    fail: Callable[[OSError], None]
    damaged: Callable[[str], None]


class ReplicatedFile:
    """A file that falls back to the next replica if one fails. Replicas are opened on demand.

    Safe for concurrent use by several threads.
    """

    def __init__(
        self, found: Iterator[Replica], size: int | None, hashes: Mapping[tuple[int, int], str]
    ) -> None:
        self._found = found
        self._size = size
        self._hashes = hashes
        self._lock = threading.Lock()
        self._open: list[Replica] = []
        # Opened if there is no other replica, so that the reader reports its size as the error.
        self._wrong_size: Replica | None = None
        self._dead: set[int] = set()
        self._open_next()

    @property
    def is_empty(self) -> bool:
        return not self._open

    def size(self) -> int:
        return self._open[0].source.size()

    def read_at(self, offset: int, into: memoryview) -> int:
        expected = self._hashes.get((offset, offset + len(into)))
        failure: OSError | None = None
        count, index = 0, 0
        while (copy := self._copy(index)) is not None:
            index += 1
            if index - 1 in self._dead:
                continue
            try:
                count = copy.source.read_at(offset, into)
            except OSError as error:
                failure = error
                self._dead.add(index - 1)
                copy.fail(error)
                continue
            if count == len(into) and expected in (None, digest(into)):
                return count
            copy.damaged(f"bytes {offset} to {offset + len(into)} are damaged")
        if failure is not None:
            raise failure
        return count  # the reader reports what is wrong

    def mapped(self) -> None:
        return None

    def close(self) -> None:
        for copy in {*self._open, *([self._wrong_size] if self._wrong_size else [])}:
            copy.source.close()

    def _copy(self, index: int) -> Replica | None:
        with self._lock:
            if index == len(self._open):
                self._open_next()
            return self._open[index] if index < len(self._open) else None

    def _open_next(self) -> None:
        """Open the next replica of the right size, if any."""
        for copy in self._found:
            if self._size is None or copy.source.size() == self._size:
                self._open.append(copy)
                return
            if self._wrong_size is None:
                self._wrong_size = copy
            else:
                copy.source.close()
        if not self._open and self._wrong_size is not None:
            self._open.append(self._wrong_size)


def hashes_of(manifest: Manifest, file: str) -> dict[tuple[int, int], str]:
    """The hash of each byte range that a reader requests from a file."""
    hashes = {
        (chunk.begin, chunk.end): chunk.xxh3_128
        for tensor in manifest.tensors.values()
        for chunk in tensor.chunks
        if chunk.file == file
    }
    for writer in manifest.writers:
        if writer.file == file:
            hashes[0, writer.header_bytes] = writer.header_xxh3_128
    return hashes
