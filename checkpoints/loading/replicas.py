"""One file that lies in several places: what has the right hash is taken, wherever it is."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from checkpoints.format.checksummed_json import digest
from checkpoints.format.manifest import Manifest
from checkpoints.storage.protocol import ReadableFile


@dataclass(frozen=True)
class Replica:
    """One of them, and who is told when it cannot be read, or is damaged."""

    source: ReadableFile
    fail: Callable[[OSError], None]
    damaged: Callable[[str], None]


class ReplicatedFile:
    """One file in several places. The next is opened when the ones before do not serve.

    Used by several threads at once.
    """

    def __init__(
        self, found: Iterator[Replica], size: int | None, hashes: Mapping[tuple[int, int], str]
    ) -> None:
        self._found = found
        self._size = size
        self._hashes = hashes
        self._lock = threading.Lock()
        self._open: list[Replica] = []
        self._odd: Replica | None = None  # of the wrong size; for the error, if there is no other
        self._dead: set[int] = set()
        self._more()

    @property
    def is_empty(self) -> bool:
        return not self._open

    def size(self) -> int:
        return self._open[0].source.size()

    def read_at(self, offset: int, into: memoryview) -> int:
        expected = self._hashes.get((offset, offset + len(into)))
        trouble: OSError | None = None
        count, index = 0, 0
        while (copy := self._copy(index)) is not None:
            index += 1
            if index - 1 in self._dead:
                continue
            try:
                count = copy.source.read_at(offset, into)
            except OSError as error:
                trouble = error
                self._dead.add(index - 1)
                copy.fail(error)
                continue
            if count == len(into) and expected in (None, digest(into)):
                return count
            copy.damaged(f"bytes {offset} to {offset + len(into)} are damaged")
        if trouble is not None:
            raise trouble
        return count  # the reader tells what is wrong with it

    def mapped(self) -> None:
        return None

    def close(self) -> None:
        for copy in {*self._open, *([self._odd] if self._odd else [])}:
            copy.source.close()

    def _copy(self, index: int) -> Replica | None:
        with self._lock:
            if index == len(self._open):
                self._more()
            return self._open[index] if index < len(self._open) else None

    def _more(self) -> None:
        """Open one more of the right size, if there is one."""
        for copy in self._found:
            if self._size is None or copy.source.size() == self._size:
                self._open.append(copy)
                return
            if self._odd is None:
                self._odd = copy
            else:
                copy.source.close()
        if not self._open and self._odd is not None:
            self._open.append(self._odd)


def hashes_of(manifest: Manifest, file: str) -> dict[tuple[int, int], str]:
    """Of the pieces in which a reader reads a file."""
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
