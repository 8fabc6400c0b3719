"""The storage protocol, its failures, and local folders."""

from __future__ import annotations

import contextlib
import errno
import io
import mmap
import os
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol, TypeVar, runtime_checkable

from checkpoints.errors import DiskFull, NotWritable, ReadFailed, WriteFailed
from checkpoints.intervals import STORAGE_FIRST_BACKOFF_S, STORAGE_PATIENCE_S
from checkpoints.names import parse_attempt

# ----------------------------------------------------------------------------
# Classifies the failures of a storage, and translates them into errors with a remedy.
#
# :class:`Storage` defines the three kinds: absent, permanent and transient. Only the first one says
# that something does not exist. A transient failure of a read is repeated by
# :class:`PatientStorage`.

ABSENT = (FileNotFoundError, NotADirectoryError)

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_REFUSED = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ELOOP}
# File systems over object stores respond with these to operations that they do not have; some
# network file systems with EBADF to the fsync of a folder, opened for reading as it must be.
_UNSUPPORTED = {
    *(errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOTTY),
    errno.EBADF,
}
_PERMANENT = _FULL | _REFUSED | _UNSUPPORTED | {errno.EISDIR, errno.ENAMETOOLONG}


def is_permanent(error: OSError) -> bool:
    """Whether repeating the call has the same result, until someone intervenes."""
    return isinstance(error, ABSENT) or error.errno in _PERMANENT


def is_transient(error: Exception | None) -> bool:
    """Whether an error of this package is of a storage that may work again a moment later."""
    cause = error.__cause__ if error is not None else None
    return isinstance(cause, OSError) and not is_permanent(cause)


def is_full(error: OSError) -> bool:
    """Whether there is no space."""
    return error.errno in _FULL


def is_unsupported(error: OSError) -> bool:
    """Whether the file system lacks the operation."""
    return error.errno in _UNSUPPORTED


def reason_of(error: OSError) -> str:
    """The failure in words."""
    return error.strerror or str(error) or type(error).__name__


@contextlib.contextmanager
def writing(place: str) -> Iterator[None]:
    """Translate an ``OSError`` into a :class:`SaveError` with a remedy."""
    try:
        yield
    except OSError as error:
        reason = reason_of(error)
        if error.errno in _FULL:
            raise DiskFull(
                f"no space to save into {place}: {reason}",
                hint="Free space or keep fewer checkpoints; older checkpoints are unchanged.",
            ) from error
        if error.errno in _REFUSED:
            raise NotWritable(
                f"cannot write into {place}: {reason}",
                hint="Use a folder that every writer has permission to write.",
            ) from error
        raise WriteFailed(
            f"writing into {place} failed: {reason}",
            hint="Older checkpoints are unchanged; the next save starts over.",
        ) from error


@contextlib.contextmanager
def reading(place: str) -> Iterator[None]:
    """Translate an ``OSError`` into :class:`ReadFailed`."""
    try:
        yield
    except OSError as error:
        raise ReadFailed(
            f"reading {place} failed: {reason_of(error)}",
            hint="Check the disk or the mount; latest() finds the newest readable checkpoint.",
        ) from error


# ----------------------------------------------------------------------------
# Memory-mapped access to files on a memory file system (tmpfs).
#
# A mapped file is verified without a copy and loaded with one. With read(), each byte passes
# through the kernel twice: 1 GiB takes 0.15 s to verify and 0.23 s to copy with reads, 0.09 s and
# 0.16 s mapped (one thread, including the mapping; measured).
#
# A file that is truncated while mapped ends the process (SIGBUS), as with any mapping. This
# package never truncates a committed file; a removed one stays accessible to the processes that
# map it.

_POPULATE_READ = 22  # MADV_POPULATE_READ, since Linux 5.14
_IN_MEMORY = {"tmpfs", "ramfs"}
_MOUNTS = Path("/proc/self/mountinfo")


class MappedFile:
    """A read-only mapping of a file. Safe for concurrent use by several threads."""

    def __init__(self, descriptor: int) -> None:
        """Raises ``OSError``; ``ValueError`` if the file is empty."""
        self._descriptor = os.dup(descriptor)
        try:
            self.identity = self._identity_now()
            self._memory = mmap.mmap(descriptor, 0, mmap.MAP_SHARED, mmap.PROT_READ)
        except BaseException:
            os.close(self._descriptor)
            raise

    def __len__(self) -> int:
        return len(self._memory)

    def view(self, begin: int, end: int) -> memoryview:
        """A view of these bytes, pre-faulted: faults page by page take several times as long.

        Raises ``OSError`` if the pages are no longer available.
        """
        page = begin - begin % mmap.PAGESIZE
        try:
            if page < end:
                self._memory.madvise(_POPULATE_READ, page, end - page)
        except OSError as error:
            if error.errno != errno.EINVAL:  # an older kernel: pages fault in on access
                raise
        return memoryview(self._memory)[begin:end]

    def has_changed(self) -> bool:
        """Whether the file was written to since it was mapped."""
        return self._identity_now() != self.identity

    def close(self) -> None:
        """Unmap the file, or leave that to the last view in use."""
        os.close(self._descriptor)
        with contextlib.suppress(BufferError):
            self._memory.close()

    def _identity_now(self) -> str:
        """Identifies the file and its state; equal in all processes that map it."""
        status = os.fstat(self._descriptor)
        return f"{status.st_dev} {status.st_ino} {status.st_size} {status.st_mtime_ns}"


def is_memory_file_system(device: int) -> bool:
    """Whether a device (``st_dev``) is a tmpfs; False if that cannot be determined."""
    try:
        lines = _MOUNTS.read_text().splitlines()
    except OSError:
        return False
    wanted = f"{os.major(device)}:{os.minor(device)}"
    # proc_pid_mountinfo(5): the third field is the device, the type follows a lone hyphen.
    return any(
        line.split()[2] == wanted and line.partition(" - ")[2].split()[0] in _IN_MEMORY
        for line in lines
    )


# ----------------------------------------------------------------------------
# The storage protocol: every operation that this package uses to store checkpoints.
#
# Paths are relative to the storage's root, with ``/``; they are built by
# :mod:`checkpoints.names`, never taken from a manifest unchecked. Callers turn failures into the
# errors that users see.


class WritableFile(Protocol):
    """A file being written."""

    def write(self, data: bytes | memoryview) -> None:
        """Append all of ``data``."""
        ...

    def sync(self) -> None:
        """Flush and make the content durable, so that it survives a power failure."""
        ...

    def close(self) -> None: ...


class ReadableFile(Protocol):
    """A file being read."""

    def size(self) -> int: ...

    def read_at(self, offset: int, into: memoryview) -> int:
        """Fill ``into`` from ``offset``. Returns the number of bytes, fewer only at end of file."""
        ...

    def mapped(self) -> MappedFile | None:
        """The file mapped into memory, if it is on a memory file system; else None."""
        ...

    def close(self) -> None: ...


class Storage(Protocol):
    """A place for checkpoints.

    A call that fails raises an ``OSError`` of one of three kinds. *Absent* (FileNotFoundError,
    NotADirectoryError): the storage was reached, and what is asked for does not exist; each call
    says what that is. *Permanent*: it fails until someone intervenes, e.g. no permission, no space.
    *Transient*, any other, e.g. EIO, ESTALE or a timeout: it says nothing about what exists.
    :class:`TieredStorage` reads what is absent in one tier from another one, and raises the error
    of a tier that could not answer if no other has the file.
    """

    @property
    def place(self) -> str:
        """The root, for messages."""
        ...

    def make_folder(self, path: str) -> None:
        """Create a folder and its parents; an existing one is not an error. The root is ``""``."""
        ...

    def list(self, path: str) -> list[str]:
        """The names in a folder. Absent: the folder; the root, too, before the first save."""
        ...

    def size(self, path: str) -> int:
        """The size of a file in bytes. Absent: the file."""
        ...

    def modified_s(self, path: str) -> float:
        """Time of the last change, in seconds since 1970. Absent: the file or folder."""
        ...

    def create(self, path: str) -> WritableFile:
        """Create a file, truncating an existing one. Absent: its folder, or an attempt that was
        committed or removed meanwhile."""
        ...

    def open(self, path: str) -> ReadableFile:
        """Open a file for reading. Absent: the file."""
        ...

    def rename(self, old: str, new: str) -> None:
        """Rename atomically. Absent: ``old``, for example an attempt that another committer has
        renamed. A folder never replaces a non-empty one (EEXIST or ENOTEMPTY)."""
        ...

    def sync_folder(self, path: str) -> None:
        """Make the names in a folder durable. Absent: the folder. Permanent where the file system
        has no such operation (:func:`is_unsupported`)."""
        ...

    def remove(self, path: str) -> None:
        """Remove a file. Absent: the file."""
        ...

    def remove_folder(self, path: str) -> None:
        """Remove a folder and its content. An absent folder is not an error."""
        ...


@runtime_checkable
class ClosableStorage(Protocol):
    """A storage that holds connections; its owner closes it."""

    def close(self) -> None: ...


@runtime_checkable
class VolatileStorage(Protocol):
    """A storage whose content ends with a process or a node: the memory of a node.

    A reader treats one that cannot be reached as gone, and uses the other tiers. Any other storage
    that cannot be read may still hold the newest checkpoint: reading from it raises.
    """

    is_volatile: bool


# ----------------------------------------------------------------------------
# The storage protocol on a local file system.

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


# ----------------------------------------------------------------------------
# Repeats calls that fail transiently, so that a short failure of a disk or network is no error.
#
# A server that fails over, a mount with a stale handle or a lost packet makes a call fail that
# would succeed a second later. Without a repetition, a listing that fails at the wrong moment ends
# a job or, worse, looks like an empty folder.

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
        return self.read(lambda: self.inner.list(path))

    def size(self, path: str) -> int:
        return self.read(lambda: self.inner.size(path))

    def modified_s(self, path: str) -> float:
        return self.read(lambda: self.inner.modified_s(path))

    def open(self, path: str) -> ReadableFile:
        return _PatientSource(self, path)

    def read(self, call: Callable[[], T]) -> T:
        """As :meth:`repeated`, for a read. It needs no space: if it fails for a lack of it, as in
        the cache of a mounted bucket, there may be some a moment later."""
        return self._repeated(call, lambda error: is_permanent(error) and not is_full(error))

    def repeated(self, call: Callable[[], T]) -> T:
        """The result of ``call``, repeated with exponential backoff."""
        return self._repeated(call, is_permanent)

    def _repeated(self, call: Callable[[], T], is_final: Callable[[OSError], bool]) -> T:
        until_s: float | None = None  # counts from the first failure: a write may take minutes
        for pause_s in _backoff_s():
            try:
                return call()
            except OSError as error:
                now_s = self._clock.monotonic()
                until_s = now_s + self._patience_s if until_s is None else until_s
                left_s = until_s - now_s
                if is_final(error) or left_s <= 0:
                    raise
                self._clock.sleep(min(pause_s, left_s))
        raise AssertionError  # the pauses never end


class _PatientSource:
    """Opens the file again before a read is repeated: a stale handle stays stale."""

    def __init__(self, storage: PatientStorage, path: str) -> None:
        self._storage, self._path = storage, path
        self._source: ReadableFile | None = storage.read(lambda: storage.inner.open(path))

    def size(self) -> int:
        return self._repeated(lambda source: source.size())

    def read_at(self, offset: int, into: memoryview) -> int:
        return self._repeated(lambda source: source.read_at(offset, into))

    def mapped(self) -> MappedFile | None:
        return self._repeated(lambda source: source.mapped())

    def close(self) -> None:
        source, self._source = self._source, None
        if source is not None:
            with contextlib.suppress(OSError):  # what was read has been verified by its hash
                source.close()

    def _repeated(self, call: Callable[[ReadableFile], T]) -> T:
        def once() -> T:
            if self._source is None:
                self._source = self._storage.inner.open(self._path)
            try:
                return call(self._source)
            except OSError:
                self.close()
                raise

        return self._storage.read(once)


def _backoff_s() -> Iterator[float]:
    pause_s = STORAGE_FIRST_BACKOFF_S
    while True:
        yield pause_s
        pause_s *= 2


# ----------------------------------------------------------------------------
# Whether two processes read the same files through one kernel, and so share its page cache.

_BOOT = Path("/proc/sys/kernel/random/boot_id")


def page_cache_identity(storage: Storage, name: str) -> str | None:
    """An identity that processes share if they read the same files of a checkpoint through one
    kernel, regardless of the folder's path; None if that cannot be determined.

    Virtual machines started from one snapshot share a boot id, so the host name is part of it.
    """
    if isinstance(storage, PatientStorage):
        storage = storage.inner
    if not isinstance(storage, LocalStorage):
        return None
    try:
        folder = os.stat(Path(storage.folder) / name)
        kernel = f"{_BOOT.read_text().strip()} {os.uname().nodename}"
        return f"{kernel} {folder.st_dev} {folder.st_ino}"
    except OSError:
        return None


# ----------------------------------------------------------------------------
# Small files in the checkpoint folder, replaced atomically, and durable names.
#
# Records hold a few hundred bytes, such as the owner of the folder. They need not survive a power
# failure, so :func:`write_record` does not fsync; :func:`write_durably` does.

MAX_RECORD_BYTES = 64 << 10
_TEMPORARY = ".tmp-LATEST-record-"  # with LATEST's prefix, so that garbage collection removes it


def write_record(storage: Storage, name: str, data: bytes) -> None:
    """Atomically replace the file ``name`` in the root with ``data``. Raises :class:`SaveError`."""
    temporary = f"{_TEMPORARY}{secrets.token_hex(4)}"
    with writing(storage.place), removed_on_failure(storage, temporary):
        sink = storage.create(temporary)
        try:
            sink.write(data)
        finally:
            sink.close()
        storage.rename(temporary, name)


def read_record(storage: Storage, name: str) -> bytes | None:
    """The content of a small file in the root; None if it is missing or too large.

    Raises :class:`ReadFailed` if the storage fails.
    """
    with reading(f"{storage.place}/{name}"):
        try:
            source = storage.open(name)
        except ABSENT:
            return None
        with contextlib.closing(source):
            size = source.size()
            if size > MAX_RECORD_BYTES:
                return None
            data = bytearray(size)
            return bytes(data[: source.read_at(0, memoryview(data))])


def write_durably(storage: Storage, path: str, data: bytes) -> None:
    """Write a small file and make its content durable. Raises ``OSError``."""
    sink = storage.create(path)
    try:
        sink.write(data)
        sink.sync()
    finally:
        sink.close()


def sync_folder(storage: Storage, path: str) -> None:
    """Make the names in a folder durable, where the file system has an operation for that.

    Mounted buckets and some network file systems refuse the fsync of a folder: their names are
    durable without it, or cannot be made so. Raises ``OSError``.
    """
    try:
        storage.sync_folder(path)
    except OSError as error:
        if not is_unsupported(error):
            raise


@contextlib.contextmanager
def removed_on_failure(storage: Storage, path: str) -> Iterator[None]:
    """Remove a file if the block fails: what remains would need space that others lack."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):  # report the first failure
            storage.remove(path)
        raise
