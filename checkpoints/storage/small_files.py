"""Small files in the checkpoint folder, replaced atomically.

Records hold a few hundred bytes, such as the owner of the folder. They need not survive a power
failure, so :func:`write_record` does not fsync; :func:`write_durably` does.
"""

from __future__ import annotations

import secrets

from checkpoints.errors import ReadFailed
from checkpoints.storage.failures import writing
from checkpoints.storage.protocol import Storage

MAX_RECORD_BYTES = 64 << 10
_TEMPORARY = ".tmp-LATEST-record-"  # with LATEST's prefix, so that garbage collection removes it


def write_record(storage: Storage, name: str, data: bytes) -> None:
    """Atomically replace the file ``name`` in the root with ``data``. Raises :class:`SaveError`."""
    temporary = f"{_TEMPORARY}{secrets.token_hex(4)}"
    with writing(storage.place):
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
