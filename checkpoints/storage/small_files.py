"""Small files in the checkpoint folder, replaced atomically, and durable names.

Records hold a few hundred bytes, such as the owner of the folder. They need not survive a power
failure, so :func:`write_record` does not fsync; :func:`write_durably` does.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator

from checkpoints.errors import ReadFailed
from checkpoints.storage.failures import is_unsupported, writing
from checkpoints.storage.protocol import Storage

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
    try:
        source = storage.open(name)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ReadFailed(f"{name} in {storage.place} cannot be read: {error}") from error
    try:
        size = source.size()
        if size > MAX_RECORD_BYTES:
            return None
        data = bytearray(size)
        return bytes(data[: source.read_at(0, memoryview(data))])
    except OSError as error:
        raise ReadFailed(f"{name} in {storage.place} cannot be read: {error}") from error
    finally:
        source.close()


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
