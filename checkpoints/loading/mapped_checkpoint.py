"""A checkpoint on a memory file system: verified in its mapping, copied once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

import numpy

from checkpoints.catalog.manifests import open_verified_size
from checkpoints.format.checksummed_json import digest
from checkpoints.format.manifest import Manifest
from checkpoints.loading.buffers import TensorBuffer
from checkpoints.loading.reader import (
    Batch,
    Item,
    check_chunk,
    check_header,
    in_batches,
    into_buffers,
)
from checkpoints.storage.mapped_files import MappedFile
from checkpoints.storage.protocol import Storage


@dataclass(frozen=True)
class MappedCheckpoint:
    """The mapped tensor files of a checkpoint. Close it when done."""

    storage: Storage
    manifest: Manifest
    files: Mapping[str, MappedFile]

    @classmethod
    def of(cls, storage: Storage, manifest: Manifest) -> MappedCheckpoint | None:
        """None if a file is not in memory or cannot be mapped: read it instead."""
        files: dict[str, MappedFile] = {}
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for writer in manifest.writers:
                with open_verified_size(storage, manifest.name, writer) as source:
                    mapped = source.mapped()
                if mapped is None:
                    return None
                files[writer.file] = stack.enter_context(contextlib.closing(mapped))
                if len(mapped) != writer.size_bytes:
                    return None
            stack.pop_all()
            return cls(storage, manifest, files)
        return None

    @property
    def identity(self) -> str:
        """Identifies the files and their state; equal in all processes that map them."""
        return digest(" ".join(file.identity for file in self.files.values()).encode())

    def verify(
        self,
        items: Iterable[Item],
        headers: Collection[int] | None,
        progress: Callable[[int], object] | None,
    ) -> None:
        """Verify these chunks, and the headers of these ranks (by default all).

        Raises the same errors as :func:`~checkpoints.loading.reader.read_chunks`.
        """

        def work(batch: Batch) -> None:
            if batch.with_header:
                with self._view(batch, 0, batch.writer.header_bytes) as data:
                    check_header(data, self.manifest.name, batch.writer)
            for tensor, chunk in batch.items:
                with self._view(batch, chunk.begin, chunk.end) as data:
                    check_chunk(len(data), digest(data), self.manifest.name, tensor, chunk)
                if progress is not None:
                    progress(chunk.end - chunk.begin)

        in_batches(self.storage, self.manifest, items, headers, work)

    def copy(self, items: Iterable[Item], into: Mapping[str, TensorBuffer]) -> None:
        """Copy verified chunks; check :meth:`have_changed` afterwards."""
        target, done = into_buffers(into)

        def work(batch: Batch) -> None:
            for tensor, chunk in batch.items:
                memory = target(tensor, chunk)
                with self._view(batch, chunk.begin, chunk.end) as data:
                    # Unlike memoryview assignment, numpy releases the GIL.
                    numpy.copyto(numpy.frombuffer(memory, "u1"), numpy.frombuffer(data, "u1"))
                done(tensor, chunk, memory)

        in_batches(self.storage, self.manifest, items, (), work)

    def have_changed(self) -> bool:
        """Whether any file was written to since it was mapped."""
        return any(file.has_changed() for file in self.files.values())

    def close(self) -> None:
        for file in self.files.values():
            file.close()

    def _view(
        self, batch: Batch, begin: int, end: int
    ) -> contextlib.AbstractContextManager[memoryview]:
        return self.files[batch.writer.file].view(begin, end)
