"""The storage protocol on a local file system."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import shutil
import stat
from pathlib import Path

from checkpoints.format.names import parse_attempt
from checkpoints.storage.failures import is_unsupported
from checkpoints.storage.mapped_files import MappedFile, is_memory_file_system
from checkpoints.storage.protocol import ReadableFile, WritableFile

# Small tensors are buffered into writes of this size; larger ones bypass the buffer.
_BUFFER_BYTES = 1 << 20
# The kernel may hold back a large part of the memory until the fsync: on a slow disk, that one call
# would take longer than a hung one is waited for.
_SYNC_BYTES = 1 << 30


class LocalStorage:
    """A local folder, or one on NFS (where rename and fsync are synchronous).

    A relative ``root`` is that of the current working directory now, also after ``os.chdir``.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self._place = str(Path(root))
        self._root = Path(os.path.abspath(root))

    @property
    def place(self) -> str:
        return self._place

    @property
    def folder(self) -> str:
        """The absolute path."""
        return str(self._root)

    def make_folder(self, path: str) -> None:
        folder = self._root / path
        missing = [p for p in (folder, *folder.parents) if not p.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        if not path:
            for made in missing:
                try:
                    _sync_folder(made.parent)
                except OSError as error:
                    if not is_unsupported(error):
                        raise

    def list(self, path: str) -> list[str]:
        return os.listdir(self._root / path)

    def size(self, path: str) -> int:
        return os.stat(self._root / path, follow_symlinks=False).st_size

    def modified_s(self, path: str) -> float:
        return os.stat(self._root / path, follow_symlinks=False).st_mtime

    def create(self, path: str) -> WritableFile:
        return _LocalSink(self._root / path)

    def open(self, path: str) -> ReadableFile:
        return _LocalSource(self._root / path)

    def rename(self, old: str, new: str) -> None:
        os.rename(self._root / old, self._root / new)

    def sync_folder(self, path: str) -> None:
        _sync_folder(self._root / path)

    def remove(self, path: str) -> None:
        os.unlink(self._root / path)

    def remove_folder(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            _remove_tree(self._root / self._renamed_for_removal(path))

    def _renamed_for_removal(self, path: str) -> str:
        """Rename an attempt before its removal: a committer that was paused before its rename
        would otherwise commit a partly removed attempt."""
        attempt = parse_attempt(path)
        if attempt is None:
            return path
        with contextlib.suppress(FileNotFoundError):  # left by an interrupted removal
            _remove_tree(self._root / attempt.removed)
        os.rename(self._root / path, self._root / attempt.removed)
        return attempt.removed


class _LocalSink:
    def __init__(self, path: Path) -> None:
        # Never follow a symbolic link: with a planted one, the write would go to its target.
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        self._file = io.BufferedWriter(
            io.FileIO(os.open(path, flags, 0o666), "w"), buffer_size=_BUFFER_BYTES
        )
        self._unsynced_bytes = 0

    def write(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self._unsynced_bytes += memoryview(data).nbytes
        if self._unsynced_bytes >= _SYNC_BYTES:
            self.sync()

    def sync(self) -> None:
        self._unsynced_bytes = 0
        self._file.flush()  # before the fsync, which does not cover our own buffer
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            if not is_unsupported(error):
                raise

    def close(self) -> None:
        try:
            self._file.close()
        finally:
            # A failed flush leaves the descriptor open.
            self._file.raw.close()


class _LocalSource:
    def __init__(self, path: Path) -> None:
        # O_NONBLOCK: a planted FIFO must not block the open; O_NOFOLLOW: stay inside the folder.
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        status = os.fstat(self._fd)
        if not stat.S_ISREG(status.st_mode):
            os.close(self._fd)
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        self._size = status.st_size
        self._device = status.st_dev

    def size(self) -> int:
        return self._size

    def read_at(self, offset: int, into: memoryview) -> int:
        done = 0
        while done < len(into):
            count = os.preadv(self._fd, [into[done:]], offset + done)
            if count == 0:
                break
            done += count
        return done

    def mapped(self) -> MappedFile | None:
        if not is_memory_file_system(self._device):
            return None
        try:
            return MappedFile(self._fd)
        except (OSError, ValueError):
            return None

    def close(self) -> None:
        os.close(self._fd)


def _remove_tree(path: Path) -> None:
    """Remove a folder, or what has its name: of a symbolic link (an archived checkpoint) the
    link only, and of a FIFO, for whose writer rmtree would wait, the name."""
    if stat.S_ISDIR(os.lstat(path).st_mode):
        shutil.rmtree(path)
    else:
        path.unlink()


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
